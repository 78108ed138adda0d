"""The autoencoders beta-VAE, CVAE and the one that classifies: losses in closed form, sizes, codes and draws."""

from math import erf, exp, pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedcommons import Examples, UserError, experiment, generator, seed_for, set_default_generator
from fedcommons.config import schema as config
from fedcommons.generators.beta_vae import BetaVAE as BetaGenerator
from fedcommons.generators.cvae import CVAE as Generator
from fedcommons.runs.build import build, load, module_of
from lightning_modules import VAEClassifier, vae
from lightning_modules.beta_vae import BetaVAE
from lightning_modules.cvae import CVAE, Decoder, decode, divergence, truncated_normal
from lightning_modules.networks import Encoder
from papers.fedssyn.central import run_trainer

SHAPE = (1, 8, 8)
Y = torch.arange(12) % 2
X = torch.zeros(12, *SHAPE, dtype=torch.uint8)
X[Y == 0, :, :4], X[Y == 1, :, 4:] = 255, 255  # class 0 is bright above, class 1 below
DIGITS = load(config.Data(limit=22)).train[slice(0, 20)]


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
    for side, total in ((64, 502_005), (8, 403_509)):
        model = beta_model((1, side, side), latent=10, filters=32, hidden=256)
        assert sum(map(torch.Tensor.numel, model.parameters())) == total
        assert model.encoder(torch.zeros(2, 1, side, side)).shape == (2, 20)
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
    """Batches whose last one is short, full and the only one; C matters only where KL crosses it."""
    sizes: dict[str, Any] = {"latent": 2, "filters": 4, "hidden": 8, "lr": 5e-3, "gamma": 7.0, "capacity": capacity}
    part = BetaGenerator(epochs=4, batch_size=batch_size, ramp=2, **sizes)
    set_default_generator(3, "initial weights")
    ramp = 2 * -(-12 // batch_size)
    model = BetaVAE(shape=SHAPE, n_classes=2, ramp=ramp, flip=True, seed=seed_for(3, "noise"), **sizes)
    loader = DataLoader(TensorDataset(X, Y), batch_size, shuffle=True, generator=generator(3, "order"))
    run_trainer(model, loader, 3, [])
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
    assert torch.allclose(model.losses(X, 7), total + divergence(mean, v), rtol=1e-5)


@pytest.mark.parametrize(("shape", "margin"), [((1, 28, 28), (2, 2, 2, 2)), ((3, 9, 5), (5, 6, 3, 4))])
def test_an_image_is_in_the_middle_of_a_power_of_two_square(shape: tuple[int, ...], margin: tuple[int, ...]) -> None:
    model = beta_model(shape)
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8, generator=generator(0))
    assert model.encode(images)[0].equal(model.encoder(F.pad(images / 255, margin)).chunk(2, 1)[0])
    z = torch.randn(5, 2, generator=generator(1))
    assert model.decode(z).equal(F.pad(model.decoder(z), tuple(-side for side in margin)))


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


def test_a_cvae_learns_also_from_an_image_alone_in_its_batch() -> None:
    for channels in ((4, 4, 4), (4, 4)):  # where BatchNorm sees one pixel
        alone = Generator(batch_size=4, channels=channels, hidden=8, latent=3, batch_norm=True)
        weights = alone.fit(DIGITS[slice(0, 9)], 10, 0, [1])[1].weights
        assert all(t.isfinite().all() for t in weights.values())


CIFAR = (3, 32, 32)
RATE = {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "optimizer": "adam"}


def _vae(trade_off: float = 0.05) -> VAEClassifier:
    torch.manual_seed(0)
    return vae(SHAPE, 10, **RATE, latent=5, channels=(3, 4), trade_off=trade_off).double()


def _batch(n: int = 6) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.rand(n, *SHAPE, generator=draws, dtype=torch.float64), torch.arange(n) % 10


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 0.0, 2.0, 1.0, 0.25, 1.0], dtype=torch.float64)])
def test_the_joint_loss_is_the_formula_example_by_example(weights: Tensor | None) -> None:
    module, (x, y) = _vae(0.3), _batch()
    torch.manual_seed(7)
    result = module.training_step((x, y) if weights is None else (x, y, weights), 0)
    torch.manual_seed(7)
    noise, total = torch.randn(6, 5, dtype=torch.float64), 0.0
    for j in range(6):
        mu, v = (part[0] for part in module.encode(x[j : j + 1]))
        z = mu + torch.exp(v / 2) * noise[j]
        ce = -torch.log_softmax(module.classifier(z), 0)[y[j]]
        kl = sum(0.5 * (m * m + torch.exp(s) - 1 - s) for m, s in zip(mu, v, strict=True)) / 5
        mse = ((module.decoder(z[None])[0] - x[j]) ** 2).sum()
        total += (1.0 if weights is None else weights[j]) * (ce + 0.3 * (kl + mse)) / 6
    assert isinstance(total, Tensor)
    torch.testing.assert_close(result, total)


def test_the_loss_as_in_the_authors_code() -> None:
    """In evaluation mode, so that the code is its mean and BatchNorm has statistics of its own."""
    options = {"batch_norm": True, "classify": "features", "reconstruction": "cross_entropy"}
    module = vae(SHAPE, 10, **RATE, latent=5, channels=(3, 4), depth=2, trade_off=0.3, **options).double()
    x, y = _batch()
    for _ in range(3):
        module(x)
    module.eval()
    mu, v = module.encode(x)
    features, decoded = module.encoder(x), module.decoder(mu)
    torch.testing.assert_close(module(x), module.classifier(features))
    ce = -torch.log_softmax(module.classifier(features), 1)[torch.arange(6), y]
    kl = (mu * mu + torch.exp(v) - 1 - v).sum(1) / 10
    of_pixels = -(x * decoded.log() + (1 - x) * (1 - decoded).log()).sum((1, 2, 3))
    torch.testing.assert_close(module.training_step((x, y), 0), (ce + 0.3 * (kl + of_pixels)).mean())
    for part, expected in ((module.encoder, 4), (module.decoder, 3)):
        assert sum(isinstance(m, nn.BatchNorm2d) for m in part.modules()) == expected


def test_with_normalise_the_encoder_alone_sees_normalised_pixels() -> None:
    plain = _vae().float()
    assert not torch.equal(plain(_batch()[0].float()), plain(_batch()[0].float()))
    plain.eval()
    start = {"latent": 5, "channels": (3, 4), "mean": (0.3,), "std": (0.4,)}
    module = vae(SHAPE, 10, **RATE, **start, normalise=True).eval()
    module.load_state_dict(plain.state_dict())
    x = torch.randint(256, (6, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    moved = (x / 255 - 0.3) / 0.4
    assert torch.equal(plain(x), plain.classifier(plain.encode(x)[0]))
    for images in (x, x / 255):
        torch.testing.assert_close(module(images), plain(moved))
    mu, v = plain.encode(moved)
    kl, y = (mu * mu + torch.exp(v) - 1 - v).sum(1) / 10, torch.arange(6)
    squares = (plain.decoder(mu) - x / 255).square().sum((1, 2, 3))
    ce = -torch.log_softmax(plain.classifier(mu), 1)[y, y]
    torch.testing.assert_close(module.training_step((x, y), 0), (ce + 0.05 * (kl + squares)).mean())


def test_the_papers_sizes() -> None:
    """CIFAR: Theta > 1,000,000 parameters of encoder and classifier, so that the latents are about 7.68 % (A.9)."""
    module = vae(CIFAR, 10, **RATE, latent=128, channels=(32, 64), depth=2)
    whole, decoder = (sum(p.numel() for p in part.parameters()) for part in (module, module.decoder))
    assert whole - decoder == 1_115_690
    decoded = module.decoder(10 * torch.randn(3, 128, generator=generator(0)))
    assert decoded.shape == (3, *CIFAR)
    assert 0 <= decoded.min() <= decoded.max() <= 1
    for name, kind in (("vae", VAEClassifier), ("encoder", Encoder)):
        config = experiment("smoke", values={"model.name": name, "model.latent": 7})
        module = module_of(config)(build(config).dataset)
        assert isinstance(module if name == "vae" else module.get_submodule("network"), kind)
        with pytest.raises(UserError, match=r"an image 4 times .* multiples of 16, and examples are \(1, 8, 8\)"):
            build(experiment("smoke", values={"model.name": name, "model.channels": (2, 2, 2, 2)}))
