"""The conditional variational autoencoder: its loss against the closed forms, its networks, its draws."""

from dataclasses import replace
from math import erf, exp, pi, sqrt
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedcommons.config import experiment as config
from fedcommons.generators.cvae import CVAE as Generator
from fedcommons.generators.private_cvae import PrivateCVAE
from fedcommons.runs import inputs
from lightning_modules.cvae import CVAE, Decoder, decode, divergence, truncated_normal

DIGITS = inputs.load(config.Data(limit=22)).train[slice(0, 20)]


def model(*, channels: tuple[int, ...] = (4, 8), beta: float = 1.0, reconstruction: str = "cross_entropy") -> CVAE:
    torch.manual_seed(0)
    return CVAE(
        shape=(1, 8, 8), n_classes=10, channels=channels, hidden=16, latent=3, beta=beta, reconstruction=reconstruction
    )


def test_the_divergence_is_that_of_torch() -> None:
    mean, log_variance = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(mean, (log_variance / 2).exp()), normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(divergence(mean, log_variance), wanted)


@pytest.mark.parametrize("reconstruction", ["cross_entropy", "squares"])
@pytest.mark.parametrize("mirrored", [None, torch.arange(20).view(20, 1, 1, 1) % 2 == 0])
def test_the_loss_is_the_equation(reconstruction: str, mirrored: torch.Tensor | None) -> None:
    vae, eps = model(beta=0.3, reconstruction=reconstruction), torch.randn(20, 3)
    found = vae.of_each(DIGITS.x, DIGITS.y, eps, mirrored)
    for i in range(20):
        x = DIGITS.x[i : i + 1].double() / 255
        x = x.flip(-1) if mirrored is not None and mirrored[i] else x
        mean, v = (part.double() for part in vae.encoder(x.float()))
        z = mean + (v / 2).exp() * eps[i].double()
        pixels = torch.sigmoid(vae.decoder(z.float(), DIGITS.y[i : i + 1]).double())
        of_x = -(x * pixels.log() + (1 - x) * (1 - pixels).log()).sum()
        if reconstruction == "squares":
            of_x = ((pixels - x) ** 2).sum()
        wanted = of_x + 0.3 * 0.5 * (mean**2 + v.exp() - 1 - v).sum()
        torch.testing.assert_close(found[i].double(), wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(vae(DIGITS.x, DIGITS.y, eps, mirrored), found.mean())


def test_the_networks_have_the_sizes_of_fedcvae() -> None:
    built = CVAE(
        shape=(1, 32, 32), n_classes=10, channels=(32, 32, 64, 64), hidden=500, latent=10, batch_norm=True
    )  # fmt: skip
    larger = Decoder((1, 32, 32), 10, (32, 32, 64, 64), 100, batch_norm=True)
    sizes = [sum(p.numel() for p in network.parameters()) for network in (built.encoder, built.decoder, larger)]
    assert sizes == [254_296, 120_961, 144_001]


@pytest.mark.parametrize("bound", [0.5, 1.0, 3.0])
def test_truncated_normals_keep_their_bounds_and_have_their_variance(bound: float) -> None:
    z = truncated_normal(4000, 5, bound, torch.Generator().manual_seed(0))
    mass = erf(bound / sqrt(2))
    variance = 1 - 2 * bound * exp(-(bound**2) / 2) / sqrt(2 * pi) / mass
    assert z.shape == (4000, 5)
    assert bound * 0.99 < z.abs().max() <= bound
    assert abs(float(z.var()) - variance) < 4 * variance * sqrt(2 / z.numel())
    assert abs(float(z.mean())) < 4 * sqrt(variance / z.numel())


def test_images_are_drawn_by_the_decoder_as_it_is_in_evaluation() -> None:
    decoder = Decoder((1, 8, 8), 10, (4, 8), 3, batch_norm=True)
    z, y = torch.randn(6, 3), torch.arange(6)
    together = decode(decoder, z, y)
    torch.testing.assert_close(decode(decoder, z, y, batch_size=1), together)  # batch norm does not mix them
    assert 0 <= together.min() <= together.max() <= 1


def test_padding_is_cut_again() -> None:
    """An image of 6x6 is in the middle of one of 8x8, whose margin no loss sees."""
    torch.manual_seed(0)
    small, large = (Decoder((1, side, side), 10, (4, 8), 3) for side in (6, 8))
    small.load_state_dict(large.state_dict())
    z, y = torch.randn(2, 3), torch.arange(2)
    assert torch.equal(small(z, y), F.pad(large(z, y), (-1, -1, -1, -1)))


@pytest.mark.parametrize(("channels", "alone"), [((4, 4, 4), 2), ((4, 4), 1)])
def test_an_image_alone_in_its_batch_is_there_twice_where_batch_norm_sees_one_pixel(
    channels: tuple[int, ...], alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, draw = [], CVAE.draw
    monkeypatch.setattr(CVAE, "draw", lambda vae, n: (sizes.append(n), draw(vae, n))[1])
    generator = Generator(batch_size=4, channels=channels, hidden=8, latent=3, batch_norm=True)
    generator.fit(DIGITS[slice(0, 9)], 10, 0, [1])
    assert sizes == [4, 4, alone]
    weights = replace(generator, batch_norm=False).fit(DIGITS[slice(0, 9)], 10, 0, [1])[1].weights
    assert sizes[3:] == [4, 4, 1]
    assert all(t.isfinite().all() for t in weights.values())


def test_constants_reach_the_networks_and_the_codes_of_new_images() -> None:
    made = Generator(channels=(4, 8), hidden=16, latent=3, beta=0.3, reconstruction="squares", truncate=0.01)
    built = made.build((1, 8, 8), 10, 0)
    assert (built.beta, built.reconstruction) == (0.3, "squares")
    first = built.decoder.layers[0]
    assert isinstance(first, torch.nn.Linear)
    with torch.no_grad():
        first.weight.mul_(20)  # else a new decoder shows little of its codes
    narrow, wide = (
        replace(made, truncate=bound).sample(built.state_dict(), (1, 8, 8), 10, torch.zeros(50, dtype=torch.int64), 0)
        for bound in (0.01, 3.0)
    )
    spread = [float(x.float().std(0).mean()) for x in (narrow, wide)]
    assert 20 * spread[0] < spread[1]


def test_a_private_images_loss_is_the_mean_over_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: PrivateCVAE, vae: Any, optimizer: Any, loss: Any, draw: Any, *_: Any, **__: Any) -> dict[int, Any]:
        drawn, named = draw(5, slice(None)), dict(vae.named_parameters())
        assert [part.shape[:2] for part in drawn] == [(5, 4)]
        for i in range(5):
            x, y = DIGITS.x[i], DIGITS.y[i]
            wanted = sum(vae.of_each(x[None], y[None], eps[None])[0] for eps in drawn[0][i]) / 4
            torch.testing.assert_close(loss(named, x, y, *(part[i] for part in drawn)), wanted)
        return {}

    monkeypatch.setattr(PrivateCVAE, "train", train)
    PrivateCVAE(channels=(4, 8), hidden=16, latent=3, draws=4, noise_multiplier=1.0).fit(DIGITS, 10, 0, [1])


def test_it_learns() -> None:
    generator = Generator(epochs=1, batch_size=20, lr=1e-2, channels=(4, 8), hidden=16, latent=3)
    first, last = (generator.fit(DIGITS, 10, 0, [1, 40])[epoch].weights for epoch in (1, 40))
    before, after = (generator.losses(weights, DIGITS, 10, 0).mean() for weights in (first, last))
    assert after < 0.8 * before
