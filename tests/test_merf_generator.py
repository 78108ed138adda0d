"""DP-MERF's generator: its size, what training does to its features, and what its images depend on."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.core.dp_sgd import NoisySum
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.seeds import generator
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.merf import MERF
from fedcommons.sharing.merf_generator import CODE, Generator, drawn, generated, trained
from fedcommons.sharing.random_features import Features, Fourier, means, pixels, sums

SHAPE = (1, 8, 8)
PHI = Fourier.draw(64, 200, [8.0], 3)


def some(n: int, seed: int = 0) -> Examples:
    """Bars: an image of class c has a bright row or a bright column, as it comes, and noise everywhere."""
    draws = generator(seed, "images of the test")
    x = torch.randint(60, (n, *SHAPE), generator=draws, dtype=torch.uint8)
    y = torch.arange(n) % 4
    for c in range(4):
        x[y == c, :, 2 * c] += 190
    across = torch.rand(n, generator=draws) < 0.5
    return Examples(torch.where(across[:, None, None, None], x.mT, x), y)


def features_of(images: Examples, classes: int) -> Tensor:
    return torch.stack([PHI(pixels(images.x[images.y == c])).mean(0) for c in range(classes)])


def test_the_network_has_the_papers_size_for_mnist() -> None:
    network = Generator((1, 28, 28), 10)
    assert sum(each.numel() for each in network.parameters()) == 166_161
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in network.layers) == 2


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 5, 7), (1, 1, 1)])
def test_images_of_any_sides_come_out_in_their_shape(shape: tuple[int, ...]) -> None:
    images = drawn(Generator(shape, 3).eval(), 2, seed=0)
    assert images.x.shape == (6, *shape)
    assert images.x.dtype == torch.uint8
    assert images.y.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.long
def test_training_brings_means_of_features_to_those_of_the_sums() -> None:
    """Without noise, to a twentieth of where it began, and each class to its own. One image repeated has another."""
    noisy = sums(PHI, some(400), 4)

    def off(steps: int) -> Tensor:
        got = features_of(generated(PHI, noisy, SHAPE, 50, steps, seed=0), 4)
        return torch.cdist(got, means(noisy)) ** 2

    first, last = off(1), off(200)
    assert last.diag().sum() < 0.05 * first.diag().sum()
    assert last.argmin(1).tolist() == [0, 1, 2, 3]


@pytest.mark.long
def test_a_rare_class_is_met_as_a_frequent_one() -> None:
    """Classes weigh alike: their sums are divided by counts, and labels are uniform."""
    examples = some(400)
    keep = (examples.y > 0) | (torch.arange(400) < 40)
    noisy = sums(PHI, Examples(examples.x[keep], examples.y[keep]), 4)
    got = features_of(generated(PHI, noisy, SHAPE, 50, 100, seed=0), 4)
    off = ((got - means(noisy)) ** 2).sum(1)
    assert off[0] < 2 * off[1:].max()


def test_the_rate_falls_by_a_tenth_after_each_fifth_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    class Recorded(torch.optim.Adam):
        def step(self, *of: Any, **how: Any) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(*of, **how)

    monkeypatch.setattr(torch.optim, "Adam", Recorded)
    trained(PHI, sums(PHI, some(40), 4), SHAPE, 10, seed=0)
    assert rates == pytest.approx([0.01 * 0.9 ** (i // 2) for i in range(10)])


def test_the_same_seed_draws_the_same_bits_and_leaves_other_draws_alone() -> None:
    noisy = sums(PHI, some(40), 4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = generated(PHI, noisy, SHAPE, 5, 3, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.x, generated(PHI, noisy, SHAPE, 5, 3, seed=0).x)
    assert not torch.equal(one.x, generated(PHI, noisy, SHAPE, 5, 3, seed=1).x)
    assert not torch.equal(one.x, generated(PHI, noisy + 1, SHAPE, 5, 3, seed=0).x)


def test_images_do_not_depend_on_one_another() -> None:
    """BatchNorm has its statistics from training: an image is a function of its own code."""
    network = trained(PHI, sums(PHI, some(40), 4), SHAPE, 3, seed=0)
    images = drawn(network, 5, seed=0)
    codes = torch.randn(20, CODE, generator=generator(0, "codes of images"))
    assert len(images.x.flatten(1).unique(dim=0)) == 20
    with torch.no_grad():
        for i in range(20):
            one = (255 * network(codes[i : i + 1], images.y[i : i + 1])).round()
            assert (one - images.x[i].float()).abs().max() <= 1  # sums in another order


def dealt(x: Tensor, y: Tensor, classes: int = 4) -> Dealt:
    return Dealt(Clients(Examples(x, y), np.array_split(np.arange(len(x)), 2)), classes, False, 0)


def images_of(stage: MERF, start: Dealt) -> Tensor:
    """What it adds to the clients' own."""
    return stage.make(start, []).store.x[len(start.own.store) :]


class Sent(MERF):
    """Clients send the messages of ``SENT``, whatever they hold."""

    def message(self, dealt: Dealt, client: int, phi: Features) -> NoisySum:
        return SENT[client]


SENT: list[NoisySum] = []


def test_images_follow_from_the_release_alone() -> None:
    """Other private images behind the same noisy messages give the same images: processing after the release."""
    constants: dict[str, Any] = {"noise_multiplier": 1.0, "features": 40, "per_class": 3, "steps": 3}
    for fit in ("generator", "images"):
        stage = MERF(**constants, fit=fit)
        mine, others = (dealt(each.x, each.y) for each in (some(40), some(40, seed=1)))
        SENT[:] = [stage.message(mine, client, stage.phi(mine)) for client in range(2)]
        own = images_of(stage, mine)
        assert not torch.equal(own, images_of(stage, others))
        assert torch.equal(own, images_of(Sent(**constants, fit=fit), others))
