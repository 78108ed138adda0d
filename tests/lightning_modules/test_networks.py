"""The networks, the classifier that clients train, and biases in front of BatchNorm (``norm_bias``)."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons import experiment
from fedcommons.config import schema as config
from fedcommons.generators.cvae import CVAE
from fedcommons.generators.training_loop import batch_of
from fedcommons.runs.build import build, load
from fedcommons.sharing.merf import MERF
from lightning_modules import Classifier
from lightning_modules.cvae import CVAE as Autoencoder
from lightning_modules.gan import GAN as Adversarial
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
    [(lambda shape: CNN(shape, 3), (2, 9, 7)), (lambda shape: CNN(shape, 3), (1, 4, 4)),
     (lambda shape: Linear(shape, 10), DIGITS), (lambda shape: MLP(shape, 100, hidden=(7,)), CIFAR),
     (lambda shape: VGG11(shape, 100), CIFAR), (lambda shape: ConvNet(shape, 3, width=4), (2, 9, 7)),
     (lambda shape: Conv5(shape, 3), (2, 31, 40))],
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


def test_convnet_halves_normalises_every_channel_by_itself_and_pads_to_a_multiple_of_eight() -> None:
    for side, blocks in ((2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (32, 3)):
        layers = ConvNet((1, side, side), 10, width=4).features
        assert sum(isinstance(layer, nn.Conv2d) for layer in layers) == blocks
    a = draws(3, 4, 8, 8)
    result = ConvNet(DIGITS, 10, width=4).features[1](a)
    expected = (a - a.mean((2, 3), keepdim=True)) / (a.var((2, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(result, expected)
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
    [(ConvNet, (1, 1, 8)), (ResNet18, (1, 15, 16)), (Conv5, (64,)), (CNN, (1, 3, 4)), (VGG11, (3, 32, 48))],
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
    losses = torch.stack([-torch.log_softmax(row, 0)[label] for row, label in zip(logits, y, strict=True)])
    for batch, expected in (
        ((x, y), losses.mean()),
        ((x, y, torch.ones(6)), losses.mean()),
        ((x, y, weight), (weight * losses).sum() / 6),  # by n, not by the sum of weights
    ):
        torch.testing.assert_close(classifier.training_step(batch, 0), expected)
    assert set(classifier.state_dict()) == {"network.last.weight", "network.last.bias"}  # no normalisation travels


SHAPE, N = (1, 8, 8), 12
"""Images, and examples of a batch, of the networks with BatchNorm."""


def _draws() -> tuple[Tensor, ...]:
    """Images, labels and codes of a batch."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(256, (N, *SHAPE), generator=draws).double()
    return images, torch.arange(N) % 10, torch.randn(N, 3, generator=draws).double()


NETWORKS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[Any], Tensor]]] = {
    "cvae": (
        lambda bias: Autoencoder(
            shape=SHAPE, n_classes=10, channels=(4, 8), hidden=16, latent=3, batch_norm=True, norm_bias=bias
        ),
        lambda net: net(*_draws()),
    ),
    "gan": (
        lambda bias: Adversarial(shape=SHAPE, n_classes=10, channels=(4, 8), latent=3, norm_bias=bias).generator,
        lambda net: net(_draws()[2], _draws()[1]).tanh().square().sum(),
    ),
    "cnn": (
        lambda bias: CNN(SHAPE, 10, (4, 8), 16, batch_norm=True, norm_bias=bias),
        lambda net: nn.functional.cross_entropy(net(_draws()[0] / 255), _draws()[1]),
    ),
}
"""A network by ``norm_bias``, and a loss of it on a batch."""


def _gradients(name: str, network: nn.Module) -> dict[str, float]:
    """Return the largest gradient of each parameter, over the largest of all, in float64."""
    loss = NETWORKS[name][1](network)
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    sizes = {n: float(g.abs().max()) for (n, _), g in zip(network.named_parameters(), gradients, strict=True)}
    return {n: size / max(sizes.values()) for n, size in sizes.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_without_norm_bias_no_weight_has_a_gradient_of_rounding_noise(name: str) -> None:
    """With it some have: the biases that the norm takes away again. Both compute the same function of the rest."""
    make, loss = NETWORKS[name]
    torch.manual_seed(0)
    full, lean = make(True).double(), make(False).double()
    idle = {n for n, size in _gradients(name, full).items() if size < 1e-12}
    assert idle
    assert all(n.endswith("bias") for n in idle)
    assert {n for n, _ in full.named_parameters()} - {n for n, _ in lean.named_parameters()} == idle
    assert min(_gradients(name, lean).values()) > 1e-9
    lean.load_state_dict({n: t for n, t in full.state_dict().items() if n not in idle})
    assert loss(lean).item() == pytest.approx(loss(full).item(), rel=1e-9)


def test_messages_of_merf_do_not_depend_on_the_network_that_is_fitted() -> None:
    """Else the same sums would be released twice, with two noises, at one epsilon."""
    base = {"sharing": "merf", "sharing.target_epsilon": 1.0, "sharing.fit": "generator", "data.limit": 100}
    messages = []
    for bias in (True, False):
        ready = build(experiment("smoke", values={**base, "sharing.norm_bias": bias}))
        stage = ready.stage
        assert isinstance(stage, MERF)
        messages.append(stage.message(ready.client_data, 0, stage.phi(ready.client_data)).values)
    assert torch.equal(*messages)


def test_even_batches_are_as_many_as_others_and_none_is_small() -> None:
    """No generator steps as far for a last image alone as for a whole batch."""
    for n, most in product((1, 64, 65, 129, 1000), (1, 7, 64)):
        sizes = [len(part) for part in torch.arange(n).split(batch_of(n, most, True))]
        assert len(sizes) == -(-n // most)
        assert max(sizes) <= most
        assert sizes[-1] > max(sizes) - len(sizes)
        assert batch_of(n, most, False) == most


def test_they_change_a_training_only_where_the_last_batch_was_smaller() -> None:
    """Of 20 images ten per batch are even; of 21 the last batch had one image."""
    images = load(config.Data(limit=40)).train
    for n, is_equal in ((20, True), (21, False)):
        each = (CVAE(batch_size=10, epochs=1, even_batches=flag, channels=(8, 16)) for flag in (False, True))
        mixed, even = (part.fit(images[torch.arange(n)], 10, 0, [1])[1].weights for part in each)
        assert all(torch.equal(mixed[name], even[name]) for name in mixed) == is_equal
