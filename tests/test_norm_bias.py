"""Biases in front of BatchNorm: their gradient is zero, so Adam moves them by rounding noise; ``norm_bias`` off."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcommons import experiment
from fedcommons.algorithms.coboosting import CoBoosting
from fedcommons.algorithms.dense import DENSE
from fedcommons.algorithms.fedcvae import FedCVAE
from fedcommons.algorithms.upsampling import Upsampler
from fedcommons.config import experiment as config
from fedcommons.errors import UserError
from fedcommons.generators.cvae import CVAE
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.gan import GAN
from fedcommons.generators.loop import batch_of
from fedcommons.runs import inputs
from fedcommons.runs.build import prepare
from fedcommons.runs.worker import build_module
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.merf_generator import Generator
from lightning_modules.cvae import CVAE as Autoencoder
from lightning_modules.gan import GAN as Adversarial
from lightning_modules.networks.cnn import CNN
from lightning_modules.networks.convnet import ConvNet

SHAPE, N = (1, 8, 8), 12


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
    "merf": (
        lambda bias: Generator(SHAPE, 10, norm_bias=bias),
        lambda net: net(torch.cat([_draws()[2], _draws()[2][:, :2]], 1), _draws()[1]).square().sum(),
    ),
    "upsampler": (lambda bias: Upsampler(SHAPE, 3, 4, norm_bias=bias), lambda net: net(_draws()[2]).square().sum()),
    "cnn": (
        lambda bias: CNN(SHAPE, 10, (4, 8), 16, batch_norm=True, norm_bias=bias),
        lambda net: nn.functional.cross_entropy(net(_draws()[0] / 255), _draws()[1]),
    ),
    "convnet": (
        lambda bias: ConvNet(SHAPE, 10, 4, norm_bias=bias),
        lambda net: nn.functional.cross_entropy(net(_draws()[0] / 255), _draws()[1]),
    ),
}
"""A network by ``norm_bias``, and a loss of it on a batch."""


def _gradients(name: str, network: nn.Module) -> dict[str, float]:
    """Return the largest gradient of each parameter, over the largest of all, in float64."""
    loss = NETWORKS[name][1](network)
    found = torch.autograd.grad(loss, list(network.parameters()))
    sizes = {n: float(g.abs().max()) for (n, _), g in zip(network.named_parameters(), found, strict=True)}
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


def test_biases_are_there_by_default_and_the_constant_reaches_the_model() -> None:
    for part in (CVAE, GAN, MERF, FedCVAE, DENSE, CoBoosting):
        assert part.norm_bias is True
    sizes = []
    for bias in (True, False):
        fields = {"model": "cnn", "model.batch_norm": True, "model.norm_bias": bias, "data.limit": 60}
        chosen = experiment("smoke", values=fields)
        sizes.append(sum(p.numel() for p in build_module(chosen, inputs.load(chosen.data)).parameters()))
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"sharing": "local_synthetic", "generator": "cvae", "generator.norm_bias": False}, "generator.batch_norm"),
        ({"sharing": "merf", "sharing.target_epsilon": 1.0, "sharing.norm_bias": False}, "sharing.fit generator"),
        ({"model": "cnn", "model.norm_bias": False}, "model.batch_norm"),
    ],
)
def test_norm_bias_is_refused_where_there_is_no_norm(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        prepare(experiment("smoke", values=values))


def test_messages_of_merf_do_not_depend_on_the_network_that_is_fitted() -> None:
    """Else the same sums would be released twice, with two noises, at one epsilon."""
    base = {"sharing": "merf", "sharing.target_epsilon": 1.0, "sharing.fit": "generator", "data.limit": 100}
    messages = []
    for bias in (True, False):
        ready = prepare(experiment("smoke", values={**base, "sharing.norm_bias": bias}))
        stage = ready.stage
        assert isinstance(stage, MERF)
        messages.append(stage.message(ready.dealt, 0, stage.phi(ready.dealt)).values)
    assert torch.equal(*messages)


def test_even_batches_are_as_many_as_others_and_none_is_small() -> None:
    """No generator steps as far for a last image alone as for a whole batch."""
    for n, most in product((1, 64, 65, 129, 1000), (1, 7, 64)):
        sizes = [len(part) for part in torch.arange(n).split(batch_of(n, most, True))]
        assert len(sizes) == -(-n // most)
        assert max(sizes) <= most
        assert sizes[-1] > max(sizes) - len(sizes)
        assert batch_of(n, most, False) == most


@pytest.mark.parametrize("kind", [DDPM, GAN, CVAE])
def test_they_change_a_training_only_where_the_last_batch_was_smaller(kind: Any) -> None:
    """Of 20 images ten per batch are even; of 21 the last batch had one image."""
    images = inputs.load(config.Data(limit=40)).train
    for n, is_equal in ((20, True), (21, False)):
        each = (kind(batch_size=10, epochs=1, even_batches=flag, channels=(8, 16)) for flag in (False, True))
        mixed, even = (part.fit(images[torch.arange(n)], 10, 0, [1])[1].weights for part in each)
        assert all(torch.equal(mixed[name], even[name]) for name in mixed) == is_equal
