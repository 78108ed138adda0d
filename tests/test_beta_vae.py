"""The beta-VAE: its loss in closed form, its capacity, its size, and the generator around it, on tiny images."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedcommons.config import parts
from fedcommons.core import trainer
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.beta_vae import BetaVAE as Generator
from fedcommons.seeds import generator, set_default_generator
from lightning_modules.beta_vae import BetaVAE, kl

SHAPE = (1, 8, 8)
Y = torch.arange(12) % 2
X = torch.zeros(12, *SHAPE, dtype=torch.uint8)
X[Y == 0, :, :4], X[Y == 1, :, 4:] = 255, 255  # class 0 is bright above, class 1 below
HALVES = Examples(X, Y)
TINY = Generator(epochs=4, batch_size=5, lr=5e-3, latent=2, filters=4, hidden=8, ramp=2)


def model(shape: tuple[int, ...] = SHAPE, **constants: int) -> BetaVAE:
    set_default_generator(0, "weights")
    small = {"latent": 2, "filters": 4, "hidden": 8, "lr": 1e-3, "n_classes": 2, **constants}
    return BetaVAE(shape=shape, **small)  # pyright: ignore[reportArgumentType]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("seed", range(3))
def test_the_divergence_is_that_of_gaussians(seed: int) -> None:
    mean, v = torch.randn(2, 7, 10, generator=generator(seed), dtype=torch.float64)
    expected = kl_divergence(Normal(mean, (v / 2).exp()), Normal(0.0, 1.0)).sum(1)
    assert torch.allclose(kl(mean, v), expected)
    assert kl(torch.zeros(1, 10), torch.zeros(1, 10)) == 0


def test_the_loss_is_the_papers() -> None:
    one = model(gamma=100, capacity=20, ramp=4)
    noise = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))  # what it will draw
    loss = one.training_step((X, Y), 0)
    mean, v = one.encode(X)
    decoded = one.decoder(mean + (v / 2).exp() * noise).sigmoid()
    bce = -(X / 255 * decoded.log() + (1 - X / 255) * (1 - decoded).log()).sum() / 12
    divergence = (mean**2 + v.exp() - 1 - v).sum() / 2 / 12
    assert torch.allclose(loss, bce + 100 * (divergence - 20 / 4).abs(), rtol=1e-5)


def test_capacity_rises_and_stays() -> None:
    one = model(ramp=8)
    assert [one.target(step) for step in (1, 4, 8, 9, 100)] == [2.5, 10, 20, 20, 20]


def test_the_ramp_is_counted_in_epochs_and_gamma_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve images in batches of five are three steps an epoch, and two epochs of ramp are six."""
    told, target = [], BetaVAE.target

    def spy(one: BetaVAE, step: int) -> float:
        told.append((one.gamma, target(one, step)))
        return told[-1][1]

    monkeypatch.setattr(BetaVAE, "target", spy)
    replace(TINY, gamma=7.0, capacity=6.0).fit(HALVES, 2, 0, [3])
    assert told == [(7.0, pytest.approx(c)) for c in (1, 2, 3, 4, 5, 6, 6, 6, 6)]


@pytest.mark.parametrize(("side", "halvings"), [(64, 4), (32, 3), (16, 2), (8, 1)])
def test_it_is_of_the_papers_size(side: int, halvings: int) -> None:
    one = model((1, side, side), latent=10, filters=32, hidden=256)
    linear = 512 * 256 + 256 + 256 * 256 + 256
    maps = 32 * 16 + 32 + (halvings - 1) * (32 * 32 * 16 + 32)
    assert sum(map(torch.Tensor.numel, one.encoder.parameters())) == maps + linear + 256 * 20 + 20
    back = 10 * 256 + 256 + 256 * 256 + 256 + 256 * 512 + 512 + (halvings - 1) * (32 * 32 * 16 + 32) + 32 * 16 + 1
    assert sum(map(torch.Tensor.numel, one.decoder.parameters())) == back
    assert one.encoder(torch.zeros(2, 1, side, side)).shape == (2, 20)
    assert one.decoder(torch.zeros(2, 10)).shape == (2, 1, side, side)
    assert sum(map(torch.Tensor.numel, one.parameters())) == 502_005 or side != 64


def test_centres_are_means_of_posterior_means() -> None:
    one = model(n_classes=3)
    one.centre(X, Y)
    means = one.encode(X)[0]
    assert torch.allclose(one.means[:2], torch.stack([means[y == Y].mean(0) for y in (0, 1)]), atol=1e-6)
    assert not one.means[2].any()


def test_samples_are_drawn_around_the_centres() -> None:
    one = model()
    one.means.copy_(torch.tensor([[5.0, 0], [0, -5]]))
    labels = torch.tensor([1, 0, 0])
    z = one.means[labels] + torch.randn(3, 2, generator=torch.Generator().manual_seed(4))
    assert torch.equal(one.sample(labels, 4), (255 * one.decoder(z).sigmoid()).round().to(torch.uint8))


def test_the_loss_of_an_image_is_its_bound() -> None:
    one = model()
    noise = torch.randn(16, 1, 2, generator=torch.Generator().manual_seed(7))
    mean, v = one.encode(X)
    total = torch.zeros(12)
    for eps in noise:
        logits = one.decoder(mean + (v / 2).exp() * eps)
        total += F.binary_cross_entropy_with_logits(logits, X / 255, reduction="none").flatten(1).sum(1) / 16
    assert torch.allclose(one.losses(X, 7), total + kl(mean, v), rtol=1e-5)


@pytest.fixture(scope="module")
def trained() -> Mapping[str, Tensor]:
    return TINY.fit(HALVES, 2, 0, [4])[4].weights


def test_it_follows_from_the_seed_alone(trained: Mapping[str, Tensor]) -> None:
    torch.rand(3)
    course = TINY.fit(HALVES, 2, 0, [1, 3, 4])  # whatever else is asked for
    assert same(course[4].weights, trained)
    assert not same(course[3].weights, trained)
    assert same(TINY.fit(HALVES, 2, 0, [1])[1].weights, course[1].weights)
    assert not same(TINY.fit(HALVES, 2, 1, [4])[4].weights, trained)
    assert not same(TINY.fit(HALVES, 2, 0, [4], flip=True)[4].weights, trained)
    labels = torch.tensor([0, 1, 1])
    first, again, other = (TINY.sample(trained, SHAPE, 2, labels, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert (first.shape, first.dtype) == ((3, *SHAPE), torch.uint8)


@pytest.mark.parametrize("batch_size", [5, 4, 12, 64])  # the last batch is short, full, the only one
def test_its_loop_gives_the_bits_of_a_trainer(batch_size: int) -> None:
    """Old artifacts, which a Trainer trained, keep their names: the order of batches must be its DataLoader's, too."""
    tiny = replace(TINY, batch_size=batch_size)
    set_default_generator(3, "initial weights")
    one = tiny._build(SHAPE, 2, 3, True, tiny.ramp * -(-12 // batch_size))
    loader = DataLoader(TensorDataset(X, Y), batch_size, shuffle=True, generator=generator(3, "order"))
    trainer.fit(one, loader, 3, [])
    one.centre(X, Y)
    assert same(tiny.fit(HALVES, 2, 3, [3], flip=True)[3].weights, one.state_dict())


def test_the_mean_codes_travel_with_the_weights(trained: Mapping[str, Tensor]) -> None:
    assert trained["means"].shape == (2, 2)
    assert trained["means"].any()
    receipt = TINY.fit(HALVES, 2, 0, [1])[1].receipt
    assert receipt is not None
    assert not receipt.release(0).covered


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.long
def test_it_learns_to_draw_classes(seed: int) -> None:
    many = Examples(X.repeat(4, 1, 1, 1), Y.repeat(4))
    one = Generator(epochs=60, batch_size=16, lr=5e-3, latent=2, filters=8, hidden=16, ramp=4, capacity=3.0)
    weights = one.fit(many, 2, seed, [60])[60].weights
    drawn = one.sample(weights, SHAPE, 2, torch.arange(40) % 2, 0).float()
    above = drawn[:, 0, :4].mean((1, 2)) > drawn[:, 0, 4:].mean((1, 2))
    assert (above == (torch.arange(40) % 2 == 0)).float().mean() > 0.7
    far = one.losses(weights, Examples(255 - X.transpose(2, 3), Y), 2, 0)
    assert one.losses(weights, HALVES, 2, 0).max() < far.min()


@pytest.mark.parametrize("side", [6, 12, 28])
def test_a_side_that_is_no_power_of_two_is_padded_and_cut_again(side: int) -> None:
    model = BetaVAE(shape=(1, side, side), n_classes=2, latent=3, filters=4, hidden=8, lr=1e-3)
    images = torch.randint(0, 256, (5, 1, side, side), dtype=torch.uint8)
    wide = torch.nn.functional.pad(images, model.pad)
    assert wide.shape[2] == wide.shape[3] == 2 ** (side - 1).bit_length()
    assert model.encode(images)[0].equal(model.encoder(wide / 255).chunk(2, 1)[0])
    assert model.decode(torch.zeros(5, 3)).shape == images.shape


@pytest.mark.parametrize(("shape", "margin"), [((1, 6, 14), (1, 1, 5, 5)), ((3, 9, 5), (5, 6, 3, 4))])
def test_an_image_that_is_no_square_is_in_the_middle_of_one(shape: tuple[int, ...], margin: tuple[int, ...]) -> None:
    one = model(shape)
    images = torch.randint(0, 256, (5, *shape), dtype=torch.uint8)
    assert one.encode(images)[0].equal(one.encoder(F.pad(images / 255, margin)).chunk(2, 1)[0])
    z = torch.randn(5, 2)
    assert one.decode(z).equal(F.pad(one.decoder(z), tuple(-side for side in margin)))


def test_other_examples_are_refused() -> None:
    with pytest.raises(UserError, match=r"beta_vae draw uint8 images, and mine has torch.float32"):
        Generator().check_type(torch.float32, "mine")


def test_its_defaults_are_the_papers() -> None:
    found = parts.make("generator", "beta_vae", {})
    assert (found.epochs, found.batch_size, found.lr, found.latent, found.gamma, found.capacity) == (
        360, 256, 5e-4, 10, 100, 20,
    )  # fmt: skip
    assert found.ramp * 15 == found.epochs
