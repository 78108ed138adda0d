"""The networks and the classifier that clients train."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules import Classifier
from lightning_modules.networks import CNN, MLP, VGG11, Conv5, ConvNet, Linear, ResNet18

CIFAR, DIGITS, MNIST = (3, 32, 32), (1, 8, 8), (1, 28, 28)


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def uint8_batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Images and labels drawn with a seed."""
    x = torch.randint(256, (6, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return x, torch.arange(6)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: VGG11(CIFAR, 10), 9_750_922),  # arXiv:2306.13263, table A.2: Mc = 37.2 MB, in MiB of float32
        (lambda: MLP(MNIST, 10), 199_210),  # McMahan et al. (2017)
        (lambda: ConvNet(MNIST, 10), 317_706),  # FedDM, table 3: a tenth of what ten clients upload
        (lambda: ConvNet(CIFAR, 100), 504_420),
        (lambda: ResNet18(CIFAR, 10), 11_173_962),
        # convolutions 832 + 51,264, hidden 1,600 x 512 + 512, last 5,130
        (lambda: Conv5(MNIST, 10), 876_938),
        # conv 9 a + a, conv 9 a b + b, hidden (4 b) h + h for two poolings of 8x8, last 10 h + 10
        (lambda: CNN(DIGITS, 10, (4, 6), 8), 10 * 4 + 9 * 4 * 6 + 6 + 4 * 6 * 8 + 8 + 10 * 8 + 10),
    ],
)
def test_a_network_has_the_published_size(make: Callable[[], nn.Module], size: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == size


def test_vgg11_starts_as_the_authors_do_and_drops_out_in_training_only() -> None:
    torch.manual_seed(0)
    vgg, x = VGG11(CIFAR, 10), draws(2, *CIFAR)
    convolutions = [m for m in vgg.features if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 8
    for layer in convolutions:  # N(0, 2 / (9 out)); the sample std of n normal numbers is off by about 1/sqrt(2n)
        expected = (2 / (9 * layer.out_channels)) ** 0.5
        assert layer.weight.std().item() == pytest.approx(expected, rel=5 / (2 * layer.weight.numel()) ** 0.5)
    vgg.eval()
    assert torch.equal(vgg(x), vgg(x))
    vgg.train()
    assert not torch.equal(vgg(x), vgg(x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda shape: CNN(shape, 3), (2, 9, 7)), (lambda shape: CNN(shape, 3), (1, 4, 4)),
        (lambda shape: Linear(shape, 10), DIGITS), (lambda shape: MLP(shape, 100, hidden=(7,)), CIFAR),
        (lambda shape: VGG11(shape, 100), CIFAR), (lambda shape: ConvNet(shape, 3, width=4), (2, 9, 7)),
        (lambda shape: ConvNet(shape, 3, width=4), (2, 2, 3)), (lambda shape: ResNet18(shape, 10), (1, 16, 17)),
        (lambda shape: Conv5(shape, 3), (2, 31, 40)),
    ],
)  # fmt: skip
def test_a_network_is_its_last_layer_on_its_embedding(make: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network, x = make(shape).eval(), draws(3, *shape)
    logits = network(x)
    assert logits.shape == (3, network.last.out_features)
    assert torch.equal(logits, network.last(network.embed(x)))
    assert list(network.named_children())[-1][0] == "last"
    if isinstance(network, Linear):
        torch.testing.assert_close(logits, x.view(3, 64) @ network.last.weight.T + network.last.bias)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda s: ConvNet(s, 10, width=8), (1, 4, 4)), (lambda s: ResNet18(s, 10), (1, 16, 16))],
    ids=["convnet of fewer blocks", "resnet18"],
)
def test_instance_norm_leaves_every_channel_alive(make: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    """Of a single pixel it would make zero, whatever the image is."""
    torch.manual_seed(0)
    network, x = make(shape), draws(6, *shape)
    z = network.embed(x)
    assert (z.std(0) > 1e-3).all()
    torch.testing.assert_close(z[:1], network.embed(x[:1]), rtol=1e-3, atol=1e-4)
    assert not [name for name, _ in network.named_buffers()]


def test_convnet_halves_normalises_every_channel_by_itself_and_pads_to_a_multiple_of_eight() -> None:
    for side, blocks in ((2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (32, 3)):
        layers = ConvNet((1, side, side), 10, width=4).features
        assert sum(isinstance(layer, nn.Conv2d) for layer in layers) == blocks
    a = draws(3, 4, 8, 8)
    found = ConvNet(DIGITS, 10, width=4).features[1](a)
    expected = (a - a.mean((2, 3), keepdim=True)) / (a.var((2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(found, expected)
    network, x, padded = ConvNet(MNIST, 10, width=4), draws(2, *MNIST), torch.zeros(2, 1, 32, 32)
    padded[:, :, 2:30, 2:30] = x  # zeros all around
    assert torch.equal(network(x), network(padded))


def test_conv5_pads_with_zeros_all_around_to_32_pixels_and_has_no_relu_before_the_hidden_layer() -> None:
    torch.manual_seed(0)
    network, x, padded = Conv5((1, 28, 31), 10), draws(2, 1, 28, 31), torch.zeros(2, 1, 32, 32)
    padded[:, :, 2:30, :31] = x
    first, pool, second, _, _ = network.features
    maps = pool(second(pool(first(padded)))).flatten(1)
    assert maps.min() < 0
    torch.testing.assert_close(network(x), network.last(F.relu(network.hidden(maps))))


@pytest.mark.parametrize(
    ("network", "shape"),
    [(ConvNet, (1, 1, 8)), (ConvNet, (64,)), (ResNet18, (1, 15, 16)), (Conv5, (64,)), (CNN, (1, 3, 4)),
     (VGG11, (3, 33, 32)), (VGG11, (3, 32, 48))],
)  # fmt: skip
def test_wrong_sizes_are_refused(network: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="it needs images"):
        network(shape, 10)


# The classifier


def test_uint8_images_are_scaled_and_normalised_per_channel_and_floats_pass() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    classifier = Classifier(nn.Identity(), lr=0.1, mean=mean, std=std)
    x, _ = uint8_batch(CIFAR)
    expected = torch.stack([(x[:, c].double() / 255 - mean[c]) / std[c] for c in range(3)], 1)
    assert classifier(x).dtype == torch.float32
    torch.testing.assert_close(classifier(x).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(classifier(draws(4, *CIFAR)), draws(4, *CIFAR))


def test_the_loss_is_the_mean_of_each_examples_cross_entropy_times_its_weight() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1, mean=(0.3,), std=(0.4,))
    (x, y), weight = uint8_batch(DIGITS), torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25, 1.0])
    logits = classifier.network((x / 255 - 0.3) / 0.4)
    own = torch.stack([-torch.log_softmax(row, 0)[label] for row, label in zip(logits, y, strict=True)])
    for batch, expected in (
        ((x, y), own.mean()),
        ((x, y, torch.ones(6)), own.mean()),
        ((x, y, weight), (weight * own).sum() / 6),  # by n, not by the sum of weights
    ):
        torch.testing.assert_close(classifier.training_step(batch, 0), expected)
    without = x.clone()
    without[1] = 255 - x[1]  # an example of weight 0 has no gradient
    gradients = [
        torch.autograd.grad(classifier.training_step((images, y, weight), 0), list(classifier.parameters()))
        for images in (x, without)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert set(classifier.state_dict()) == {"network.last.weight", "network.last.bias"}  # no normalisation travels


def test_the_optimizer_is_plain_sgd_with_the_rates_asked_for() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer, weight = classifier.configure_optimizers(), classifier.network.get_parameter("last.weight")
    assert isinstance(optimizer, torch.optim.SGD)
    expected, velocity = weight.detach().clone(), torch.zeros_like(weight)
    for _ in range(3):
        optimizer.zero_grad()
        classifier.training_step(uint8_batch(DIGITS), 0).backward()
        assert weight.grad is not None
        velocity = 0.9 * velocity + weight.grad + 0.01 * expected
        expected = expected - 0.1 * velocity
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)
