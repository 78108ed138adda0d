"""The autoencoders that draw images, beta-VAE and CVAE: their losses in closed form, sizes, codes and draws."""

from dataclasses import replace
from math import erf, exp, pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedcommons.config import experiment as config
from fedcommons.core import trainer
from fedcommons.data.examples import Examples
from fedcommons.generators.beta_vae import BetaVAE as BetaGenerator
from fedcommons.generators.cvae import CVAE as Generator
from fedcommons.generators.generator import TrainedGenerator
from fedcommons.generators.private_cvae import PrivateCVAE
from fedcommons.runs import inputs
from fedcommons.seeds import generator, seed_for, set_default_generator
from lightning_modules.beta_vae import BetaVAE, kl
from lightning_modules.cvae import CVAE, Decoder, decode, divergence, truncated_normal

SHAPE = (1, 8, 8)
Y = torch.arange(12) % 2
X = torch.zeros(12, *SHAPE, dtype=torch.uint8)
X[Y == 0, :, :4], X[Y == 1, :, 4:] = 255, 255  # class 0 is bright above, class 1 below
DIGITS = inputs.load(config.Data(limit=22)).train[slice(0, 20)]


@pytest.mark.parametrize("seed", range(3))
def test_the_divergence_is_that_of_gaussians(seed: int) -> None:
    mean, v = torch.randn(2, 7, 10, generator=generator(seed), dtype=torch.float64)
    expected = kl_divergence(Normal(mean, (v / 2).exp()), Normal(0.0, 1.0)).sum(1)
    for formula in (kl, divergence):
        assert torch.allclose(formula(mean, v), expected)
        assert formula(torch.zeros(1, 10), torch.zeros(1, 10)) == 0


# beta-VAE


def beta_model(shape: tuple[int, ...] = SHAPE, **constants: Any) -> BetaVAE:
    set_default_generator(0, "weights")
    return BetaVAE(shape=shape, **{"latent": 2, "filters": 4, "hidden": 8, "lr": 1e-3, "n_classes": 2, **constants})


@pytest.mark.parametrize(("capacity", "gamma"), [(20.0, 100.0), (0.5, 7.0)])
def test_the_beta_vae_loss_equals_the_formula_of_its_paper(capacity: float, gamma: float) -> None:
    model = beta_model(gamma=gamma, capacity=capacity, ramp=4)
    noise = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))  # what it will draw
    loss = model.training_step((X, Y), 0)
    mean, v = model.encode(X)
    decoded = model.decoder(mean + (v / 2).exp() * noise).sigmoid()
    bce = -(X / 255 * decoded.log() + (1 - X / 255) * (1 - decoded).log()).sum() / 12
    divergence = (mean**2 + v.exp() - 1 - v).sum() / 2 / 12
    assert torch.allclose(loss, bce + gamma * (divergence - capacity / 4).abs(), rtol=1e-5)


def test_the_networks_have_the_papers_sizes_and_capacity_rises_and_stays() -> None:
    for side, total in ((64, 502_005), (32, 469_173), (16, 436_341), (8, 403_509)):
        model = beta_model((1, side, side), latent=10, filters=32, hidden=256)
        assert sum(map(torch.Tensor.numel, model.parameters())) == total
        assert model.encoder(torch.zeros(2, 1, side, side)).shape == (2, 20)
    part = BetaGenerator()
    assert (part.epochs, part.batch_size, part.lr, part.gamma, part.capacity) == (360, 256, 5e-4, 100, 20)
    assert part.ramp * 15 == part.epochs
    assert [beta_model(ramp=8).target(step) for step in (1, 4, 8, 9, 100)] == [2.5, 10, 20, 20, 20]
    channels = (32, 32, 64, 64)
    built = CVAE(shape=(1, 32, 32), n_classes=10, channels=channels, hidden=500, latent=10, batch_norm=True)
    larger = Decoder((1, 32, 32), 10, channels, 100, batch_norm=True)
    sizes = [sum(p.numel() for p in network.parameters()) for network in (built.encoder, built.decoder, larger)]
    assert sizes == [254_296, 120_961, 144_001]  # of FedCVAE


@pytest.mark.parametrize(
    ("batch_size", "capacity"), [(4, 6.0), (12, 6.0), (64, 6.0), *((5, c) for c in (0.1, 0.3, 0.6, 1.0, 2.0, 4.0))]
)
def test_its_loop_gives_the_bits_of_a_trainer_and_the_ramp_counts_epochs(batch_size: int, capacity: float) -> None:
    """Batches whose last one is short, full and the only one; C matters only where KL crosses it.

    Old artifacts, which a Trainer trained, keep their names: the order of batches must be its DataLoader's, too.
    """
    sizes: dict[str, Any] = {"latent": 2, "filters": 4, "hidden": 8, "lr": 5e-3, "gamma": 7.0, "capacity": capacity}
    part = BetaGenerator(epochs=4, batch_size=batch_size, ramp=2, **sizes)
    set_default_generator(3, "initial weights")
    ramp = 2 * -(-12 // batch_size)
    model = BetaVAE(shape=SHAPE, n_classes=2, ramp=ramp, flip=True, seed=seed_for(3, "noise"), **sizes)
    loader = DataLoader(TensorDataset(X, Y), batch_size, shuffle=True, generator=generator(3, "order"))
    trainer.fit(model, loader, 3, [])
    model.centre(X, Y)
    weights, expected = part.fit(Examples(X, Y), 2, 3, [3], flip=True)[3].weights, model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert weights["means"].any()


def test_samples_are_drawn_around_the_means_of_their_classes_posterior_means() -> None:
    model = beta_model(n_classes=3)
    model.centre(X, Y)
    means = model.encode(X)[0]
    assert torch.allclose(model.means[:2], torch.stack([means[y == Y].mean(0) for y in (0, 1)]), atol=1e-6)
    assert not model.means[2].any()
    labels = torch.tensor([1, 0, 0])
    z = model.means[labels] + torch.randn(3, 2, generator=torch.Generator().manual_seed(4))
    assert torch.equal(model.sample(labels, 4), (255 * model.decoder(z).sigmoid()).round().to(torch.uint8))


def test_the_loss_of_an_image_is_its_bound() -> None:
    model = beta_model()
    noise = torch.randn(16, 1, 2, generator=torch.Generator().manual_seed(7))
    mean, v = model.encode(X)
    total = torch.zeros(12)
    for eps in noise:
        logits = model.decoder(mean + (v / 2).exp() * eps)
        total += F.binary_cross_entropy_with_logits(logits, X / 255, reduction="none").flatten(1).sum(1) / 16
    assert torch.allclose(model.losses(X, 7), total + kl(mean, v), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "margin"),
    [((1, 6, 6), (1, 1, 1, 1)), ((1, 12, 12), (2, 2, 2, 2)), ((1, 28, 28), (2, 2, 2, 2)), ((1, 6, 14), (1, 1, 5, 5)),
     ((3, 9, 5), (5, 6, 3, 4))],
)  # fmt: skip
def test_an_image_is_in_the_middle_of_a_square_of_a_power_of_two(
    shape: tuple[int, ...], margin: tuple[int, ...]
) -> None:
    model = beta_model(shape)
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8, generator=generator(0))
    assert model.encode(images)[0].equal(model.encoder(F.pad(images / 255, margin)).chunk(2, 1)[0])
    z = torch.randn(5, 2, generator=generator(1))
    assert model.decode(z).equal(F.pad(model.decoder(z), tuple(-side for side in margin)))


# CVAE


@pytest.mark.parametrize("reconstruction", ["cross_entropy", "squares"])
@pytest.mark.parametrize("mirrored", [None, torch.arange(20).view(20, 1, 1, 1) % 2 == 0])
def test_the_loss_of_a_cvae_is_the_equation(reconstruction: str, mirrored: Tensor | None) -> None:
    torch.manual_seed(0)
    vae = CVAE(shape=SHAPE, n_classes=10, channels=(4, 8), hidden=16, latent=3, beta=0.3, reconstruction=reconstruction)
    eps = torch.randn(20, 3)
    losses = vae.of_each(DIGITS.x, DIGITS.y, eps, mirrored)
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
        torch.testing.assert_close(losses[i].double(), wanted, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(vae(DIGITS.x, DIGITS.y, eps, mirrored), losses.mean())


def test_images_are_decoded_in_evaluation_mode_and_padding_is_cut_again() -> None:
    """An image of 6x6 is in the middle of one of 8x8, whose margin no loss sees."""
    decoder = Decoder(SHAPE, 10, (4, 8), 3, batch_norm=True)
    z, y = torch.randn(6, 3, generator=generator(0)), torch.arange(6)
    together = decode(decoder, z, y)
    torch.testing.assert_close(decode(decoder, z, y, batch_size=1), together)  # batch norm does not mix them
    assert 0 <= together.min() <= together.max() <= 1
    small, large = (Decoder((1, side, side), 10, (4, 8), 3) for side in (6, 8))
    small.load_state_dict(large.state_dict())
    assert torch.equal(small(z, y), F.pad(large(z, y), (-1, -1, -1, -1)))


def test_codes_of_new_images_are_truncated_normals() -> None:
    for bound in (0.5, 1.0, 3.0):
        z = truncated_normal(4000, 5, bound, torch.Generator().manual_seed(0))
        mass = erf(bound / sqrt(2))
        variance = 1 - 2 * bound * exp(-(bound**2) / 2) / sqrt(2 * pi) / mass
        assert z.shape == (4000, 5)
        assert bound * 0.99 < z.abs().max() <= bound
        assert abs(float(z.var()) - variance) < 4 * variance * sqrt(2 / z.numel())
        assert abs(float(z.mean())) < 4 * sqrt(variance / z.numel())
    part = Generator(channels=(4, 8), hidden=16, latent=3, beta=0.3, reconstruction="squares")
    built, labels = part.build(SHAPE, 10, 0), torch.zeros(50, dtype=torch.int64)
    assert (built.beta, built.reconstruction) == (0.3, "squares")
    with torch.no_grad():
        next(built.decoder.layers[0].parameters()).mul_(20)  # else a new decoder shows little of its codes
    narrow, wide = (
        replace(part, truncate=bound).sample(built.state_dict(), SHAPE, 10, labels, 0).float() for bound in (0.01, 3.0)
    )
    assert 20 * narrow.std(0).mean() < wide.std(0).mean()


@pytest.mark.long
def test_a_cvae_learns_also_from_an_image_alone_in_its_batch() -> None:
    part = Generator(epochs=1, batch_size=20, lr=1e-2, channels=(4, 8), hidden=16, latent=3)
    before, after = (part.losses(part.fit(DIGITS, 10, 0, [e])[e].weights, DIGITS, 10, 0).mean() for e in (1, 40))
    assert after < 0.8 * before
    for channels in ((4, 4, 4), (4, 4)):  # where BatchNorm sees one pixel
        alone = Generator(batch_size=4, channels=channels, hidden=8, latent=3, batch_norm=True)
        weights = alone.fit(DIGITS[slice(0, 9)], 10, 0, [1])[1].weights
        assert all(t.isfinite().all() for t in weights.values())


class Watched(PrivateCVAE):
    """Compares its loss with the mean over its draws in place of training."""

    def train(self, vae: Any, optimizer: Any, loss: Any, draw: Any, *_: Any, **__: Any) -> dict[int, TrainedGenerator]:
        drawn, named = draw(5, slice(None)), dict(vae.named_parameters())
        assert [part.shape[:2] for part in drawn] == [(5, 4)]
        for i in range(5):
            x, y = DIGITS.x[i], DIGITS.y[i]
            wanted = sum(vae.of_each(x[None], y[None], eps[None])[0] for eps in drawn[0][i]) / 4
            torch.testing.assert_close(loss(named, x, y, *(part[i] for part in drawn)), wanted)
        return {7: TrainedGenerator({})}


def test_a_private_images_loss_is_the_mean_over_its_draws() -> None:
    part = Watched(channels=(4, 8), hidden=16, latent=3, draws=4, noise_multiplier=1.0)
    assert 7 in part.fit(DIGITS, 10, 0, [1])
