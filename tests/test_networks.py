"""The networks and the classifier that clients train."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules import Classifier
from lightning_modules.networks import CNN, MLP, VGG11, Conv5, ConvNet, Linear, ResNet18

CIFAR, DIGITS = (3, 32, 32), (1, 8, 8)


def parameters(network: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in network.parameters())


def uint8_batch(shape: tuple[int, ...], n: int = 6) -> tuple[Tensor, Tensor]:
    """Images and labels drawn with a seed."""
    draws = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, *shape), generator=draws, dtype=torch.uint8), torch.arange(n) % 10


@pytest.fixture(scope="module")
def vgg() -> VGG11:
    torch.manual_seed(0)
    return VGG11(CIFAR, 10)


def test_vgg11_has_the_papers_size(vgg: VGG11) -> None:
    # convolutions 9,220,480 + head 2 (512 * 512 + 512) + last 512 C + C; arXiv:2306.13263, table A.2: Mc = 37.2 MB
    assert parameters(vgg) == 9_750_922
    assert 4 * parameters(vgg) / 2**20 == pytest.approx(37.197, abs=5e-4)  # MiB; the paper's "37.2 MB"
    with torch.device("meta"):
        assert parameters(VGG11(CIFAR, 100)) == 9_797_092


def test_vgg11_convolutions_start_as_the_authors_do(vgg: VGG11) -> None:
    convolutions = [m for m in vgg.features if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 8
    for layer in convolutions:
        # N(0, 2 / (9 out)); the sample std of n normal numbers is off by about 1/sqrt(2n)
        wanted = (2 / (9 * layer.out_channels)) ** 0.5
        assert layer.weight.std().item() == pytest.approx(wanted, rel=5 / (2 * layer.weight.numel()) ** 0.5)


def test_vgg11_drops_out_in_training_only(vgg: VGG11) -> None:
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0))
    vgg.eval()
    assert torch.equal(vgg(x), vgg(x))
    vgg.train()
    assert not torch.equal(vgg(x), vgg(x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda shape: CNN(shape, 10), DIGITS),
        (lambda shape: CNN(shape, 10), (1, 28, 28)),
        (lambda shape: CNN(shape, 100, channels=(4, 8), hidden=16), CIFAR),
        (lambda shape: CNN(shape, 3), (2, 9, 7)),
        (lambda shape: Linear(shape, 10), DIGITS),
        (lambda shape: Linear(shape, 100), CIFAR),
        (lambda shape: MLP(shape, 10), DIGITS),
        (lambda shape: MLP(shape, 100, hidden=(7,)), CIFAR),
        (lambda shape: VGG11(shape, 100), CIFAR),
        (lambda shape: ConvNet(shape, 10, width=4), DIGITS),
        (lambda shape: ConvNet(shape, 10, width=4), (1, 28, 28)),
        (lambda shape: ConvNet(shape, 3, width=4), (2, 9, 7)),
        (lambda shape: ConvNet(shape, 3, width=4), (2, 2, 3)),
        (lambda shape: ResNet18(shape, 10), (1, 16, 17)),
        (lambda shape: Conv5(shape, 10), (1, 28, 28)),
        (lambda shape: Conv5(shape, 3), (2, 31, 40)),
    ],
    ids=[
        "cnn digits",
        "cnn mnist",
        "cnn cifar100",
        "cnn odd sides",
        "linear digits",
        "linear cifar100",
        "mlp digits",
        "mlp cifar100",
        "vgg11",
        "convnet digits",
        "convnet mnist",
        "convnet odd sides",
        "convnet tiny",
        "resnet18",
        "conv5 mnist",
        "conv5 odd sides",
    ],
)
def test_a_network_is_its_last_layer_on_its_embedding(
    make: Callable[[tuple[int, ...]], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    network = make(shape)
    network.eval()
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    last, embed = network.last, network.embed
    assert isinstance(last, nn.Linear)
    assert callable(embed)
    logits = network(x)
    assert logits.shape == (3, last.out_features)
    assert torch.equal(logits, last(embed(x)))
    assert list(network.named_children())[-1][0] == "last"


def test_the_linear_network_is_softmax_regression() -> None:
    network = Linear(DIGITS, 10)
    x = torch.randn(3, *DIGITS, generator=torch.Generator().manual_seed(0))
    assert parameters(network) == 64 * 10 + 10
    torch.testing.assert_close(network(x), x.view(3, 64) @ network.last.weight.T + network.last.bias)


def test_the_mlp_has_the_papers_size() -> None:
    """McMahan et al. (2017): 199,210 parameters."""
    assert parameters(MLP((1, 28, 28), 10)) == 199_210


def test_the_cnn_has_the_channels_asked_for() -> None:
    # conv 9 a + a, conv 9 a b + b, hidden (4 b) h + h for two poolings of 8x8, last 10 h + 10
    a, b, h = 4, 6, 8
    assert parameters(CNN(DIGITS, 10, (a, b), h)) == 10 * a + 9 * a * b + b + 4 * b * h + h + 10 * h + 10


def test_convnet_has_the_papers_sizes() -> None:
    """FedDM, table 3: ten clients upload 3,177,060, 3,200,100 and 5,044,200 numbers."""
    with torch.device("meta"):
        sizes = [parameters(ConvNet(*of)) for of in (((1, 28, 28), 10), (CIFAR, 10), (CIFAR, 100))]
    assert sizes == [317_706, 320_010, 504_420]


def test_convnet_pads_with_zeros_all_around_to_a_multiple_of_eight() -> None:
    torch.manual_seed(0)
    network = ConvNet((1, 28, 28), 10, width=4)
    x = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(2, 1, 32, 32)
    padded[:, :, 2:30, 2:30] = x
    assert torch.equal(network(x), network(padded))


@pytest.mark.parametrize(("side", "blocks"), [(2, 1), (4, 2), (7, 2), (8, 3), (15, 3), (32, 3)])
def test_convnet_has_as_many_blocks_as_the_image_can_be_halved(side: int, blocks: int) -> None:
    network = ConvNet((1, side, side), 10, width=4)
    assert sum(isinstance(layer, nn.Conv2d) for layer in network.features) == blocks


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda s: ConvNet(s, 10, width=8), DIGITS), (lambda s: ConvNet(s, 10, width=8), (1, 4, 4)),
     (lambda s: ResNet18(s, 10), (1, 16, 16))],
    ids=["convnet", "convnet of fewer blocks", "resnet18"],
)  # fmt: skip
def test_instance_norm_leaves_every_channel_of_the_embedding_alive_and_mixes_no_images(
    make: Callable[[tuple[int, ...]], nn.Module], shape: tuple[int, ...]
) -> None:
    """Of a single pixel it would make zero, whatever the image is."""
    torch.manual_seed(0)
    network = make(shape)
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    assert callable(network.embed)
    z = network.embed(x)
    assert (z.std(0) > 1e-3).all()
    torch.testing.assert_close(z[:1], network.embed(x[:1]), rtol=1e-3, atol=1e-4)
    assert not [name for name, _ in network.named_buffers()]


def test_convnet_normalises_every_channel_of_an_image_by_itself() -> None:
    network = ConvNet((1, 8, 8), 10, width=4)
    a = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    found = network.features[1](a)
    wanted = (a - a.mean((2, 3), keepdim=True)) / (a.var((2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(found, wanted)


def test_resnet18_has_the_usual_size() -> None:
    with torch.device("meta"):
        assert parameters(ResNet18(CIFAR, 10)) == 11_173_962


def test_conv5_has_the_size_of_fedcvaes_classifier() -> None:
    # convolutions 832 + 51,264, hidden 1,600 x 512 + 512, last 5,130
    with torch.device("meta"):
        assert parameters(Conv5((1, 32, 32), 10)) == parameters(Conv5((1, 28, 28), 10)) == 876_938


def test_conv5_pads_with_zeros_all_around_to_32_pixels_and_has_no_relu_before_the_hidden_layer() -> None:
    torch.manual_seed(0)
    network = Conv5((1, 28, 31), 10)
    x = torch.randn(2, 1, 28, 31, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(2, 1, 32, 32)
    padded[:, :, 2:30, :31] = x
    first, pool, second, _, _ = network.features
    maps = pool(second(pool(first(padded)))).flatten(1)
    assert maps.min() < 0
    assert torch.equal(network.features(F.pad(x, network.margin)), maps)
    torch.testing.assert_close(network(x), network.last(F.relu(network.hidden(maps))))


@pytest.mark.parametrize(
    ("network", "shape"), [(ConvNet, (1, 1, 8)), (ConvNet, (64,)), (ResNet18, (1, 15, 16)), (Conv5, (64,))]
)
def test_images_that_are_too_small_are_refused(
    network: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="it needs images"):
        network(shape, 10)


# --- the classifier


def test_uint8_images_are_scaled_and_normalised_per_channel() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    classifier = Classifier(nn.Identity(), lr=0.1, mean=mean, std=std)
    x, _ = uint8_batch(CIFAR)
    wanted = torch.stack([(x[:, c].double() / 255 - mean[c]) / std[c] for c in range(3)], 1)
    seen = classifier(x)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen.double(), wanted, atol=1e-5, rtol=1e-5)


def test_features_that_are_floating_pass_as_they_are() -> None:
    classifier = Classifier(nn.Identity(), lr=0.1, mean=(0.5,), std=(0.25,))
    x = torch.randn(4, *DIGITS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(classifier(x), x)


def test_normalisation_is_no_part_of_the_model_that_travels() -> None:
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1, mean=(0.5,), std=(0.25,))
    assert set(classifier.state_dict()) == {"network.last.weight", "network.last.bias"}
    assert set(dict(classifier.named_parameters())) == set(classifier.state_dict())


def test_the_loss_is_the_mean_cross_entropy_of_the_normalised_images() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1, mean=(0.3,), std=(0.4,))
    x, y = uint8_batch(DIGITS)
    logits = classifier.network((x / 255 - 0.3) / 0.4)
    wanted = torch.stack([-torch.log_softmax(row, 0)[label] for row, label in zip(logits, y, strict=True)]).mean()
    torch.testing.assert_close(classifier.training_step((x, y), 0), wanted)


def test_the_weighted_loss_multiplies_each_examples_own_loss() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1)
    x, y = uint8_batch(DIGITS)
    weight = torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25, 1.0])
    own = [F.cross_entropy(classifier(x[i : i + 1]), y[i : i + 1]) for i in range(len(y))]
    wanted = sum(w * loss for w, loss in zip(weight, own, strict=True)) / len(y)  # by n, not by the sum of weights
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(classifier.training_step((x, y, weight), 0), wanted)


def test_weights_of_one_change_nothing() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1)
    x, y = uint8_batch(DIGITS)
    torch.testing.assert_close(
        classifier.training_step((x, y, torch.ones(len(y))), 0), classifier.training_step((x, y), 0)
    )


def test_an_example_of_weight_zero_has_no_gradient() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1)
    x, y = uint8_batch(DIGITS, 2)
    other = x.clone()
    other[1] = 255 - other[1]
    gradients = []
    for images in (x, other):
        classifier.zero_grad()
        classifier.training_step((images, y, torch.tensor([1.0, 0.0])), 0).backward()
        gradients.append(classifier.network.get_parameter("last.weight").grad)
    assert torch.equal(gradients[0], gradients[1])


def test_the_optimizer_is_plain_sgd_with_the_rates_asked_for() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Linear(DIGITS, 10), lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = classifier.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert {k: optimizer.defaults[k] for k in ("lr", "momentum", "weight_decay", "nesterov", "dampening")} == {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "nesterov": False,
        "dampening": 0,
    }
    weight = classifier.network.get_parameter("last.weight")
    before = weight.detach().clone()
    classifier.training_step(uint8_batch(DIGITS), 0).backward()
    assert weight.grad is not None
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * (weight.grad + 0.01 * before))
