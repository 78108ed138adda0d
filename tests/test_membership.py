"""The membership attack: it finds what a memorising generator was trained on, and nothing where data are ignored."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from fedcommons.audits.membership import (
    Losing,
    attack,
    auc,
    by_loss,
    by_pool,
    halves,
    likelihood_ratios,
    roc,
    scores,
)
from fedcommons.data.examples import Examples
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.generator import Generator, TrainedGenerator, Weights
from fedcommons.generators.private import PrivateDDPM
from fedcommons.seeds import generator


def images(n: int, *key: int | str) -> Examples:
    """Noise of two classes."""
    x = torch.randint(0, 256, (n, 1, 8, 8), generator=generator(*key), dtype=torch.uint8)
    return Examples(x, torch.arange(n) % 2)


@dataclass(frozen=True)
class Parrot:
    """Draws what it was trained on, with noise; with ``deaf`` it draws noise only."""

    noise: float = 40.0
    deaf: bool = False
    epochs: int = 1
    sampling: ClassVar[tuple[str, ...]] = ()

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> dict[int, TrainedGenerator]:
        return {e: TrainedGenerator({"x": examples.x, "seed": torch.tensor(seed)}) for e in epochs}

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        draws = generator(seed, int(weights["seed"]))
        rows = torch.randint(len(weights["x"]), (len(labels),), generator=draws)
        x = weights["x"][rows].float() * (not self.deaf)
        return (x + self.noise * torch.randn(len(labels), *shape, generator=draws)).clamp(0, 255).to(torch.uint8)


def attacked(part: Generator, n: int, generators: int, seed: int, by=by_pool):
    known = images(n, "images", seed)
    inside = halves(known.y.numpy(), generators, seed)
    (found,) = scores(part, known, inside, 2, seed, [by])
    return attack(likelihood_ratios(found, inside), inside, seed)


def test_a_generator_that_memorises_is_found_out() -> None:
    for seed in range(5):
        found = attacked(Parrot(), 120, 8, seed)
        assert found.auc_interval[0] > 0.75
        assert found.tpr_interval[0] > 0.3
    assert attacked(Parrot(noise=1), 120, 8, 0).auc > found.auc


@pytest.mark.long
def test_a_generator_that_ignores_its_data_is_not() -> None:
    """AUC 1/2 within its interval, in nearly all of 30 attacks (95 %), and as many true as false positives."""
    found = [attacked(Parrot(deaf=True), 80, 6, seed) for seed in range(30)]
    assert sum(f.auc_interval[0] <= 0.5 <= f.auc_interval[1] for f in found) >= 26
    assert sum(f.tpr_interval[0] <= 0.01 for f in found) >= 28
    assert abs(np.mean([f.auc for f in found]) - 0.5) < 0.02


DIFFUSION = DDPM(
    epochs=150, batch_size=16, lr=3e-3, channels=(8, 8), timesteps=50, schedule="squaredcos_cap_v2",
    sampler="ddim", sampling_steps=2,
)  # fmt: skip


@pytest.mark.slow
def test_the_loss_of_a_ddpm_finds_its_images() -> None:
    """A tiny DDPM that sees 16 images of noise 150 times."""
    known = images(32, "images")
    inside = halves(known.y.numpy(), 4, 0)
    (found,) = scores(DIFFUSION, known, inside, 2, 0, [by_loss])
    assert auc(*roc((found - found.mean(0)).ravel(), inside.ravel())) > 0.8


def test_the_loss_of_a_ddpm_is_over_the_same_draws_for_every_image() -> None:
    assert isinstance(DIFFUSION, Losing)
    assert isinstance(PrivateDDPM(noise_multiplier=1.0), Losing)
    known = images(6, "images")
    weights = DIFFUSION.fit(known, 2, 0, {1})[1].weights
    once, again = (DIFFUSION.losses(weights, known, 2, 5) for _ in range(2))
    assert torch.equal(once, again)
    assert torch.allclose(once[3:5], DIFFUSION.losses(weights, known[3:5], 2, 5), atol=1e-5)
    assert not torch.equal(once, DIFFUSION.losses(weights, known, 2, 6))
    zero = {name: torch.zeros_like(w) for name, w in weights.items()}  # predicts no noise: the loss is the noise's size
    assert torch.allclose(DIFFUSION.losses(zero, known, 2, 5), torch.ones(6), atol=0.15)
    assert len(set(DIFFUSION.losses(zero, known, 2, 5).tolist())) == 1


def test_every_generator_sees_a_half_of_its_own() -> None:
    labels = np.repeat([0, 1, 2], [40, 60, 5])
    inside = halves(labels, 10, 3)
    assert np.array_equal(inside, halves(labels, 10, 3))
    assert not np.array_equal(inside, halves(labels, 10, 4))
    for k, mask in enumerate(inside):
        assert np.bincount(labels[mask]).tolist() == [20, 30, 2 + k % 2]
    together = np.corrcoef(inside[:, :40].astype(float))[np.triu_indices(10, 1)]
    assert np.abs(together).max() < 0.6


def test_the_ratio_is_that_of_two_normal_densities() -> None:
    """By hand: three generators, one image that the second and third saw or not."""
    rng = np.random.default_rng(0)
    inside = rng.random((7, 5)) < 0.5
    inside[:, 0] = [True, True, True, False, False, False, False]
    inside[:, 1] = True
    values = rng.normal(size=(7, 5)) + 2 * inside
    found = likelihood_ratios(values, inside)
    mu_in, mu_out = values[1:3, 0].mean(), values[3:, 0].mean()  # for generator 0, which saw image 0
    other_in, other_out = values[:3, 0].mean(), values[4:, 0].mean()  # for generator 3, which did not
    one = (values[0, 0] - mu_out) ** 2 - (values[0, 0] - mu_in) ** 2
    other = (values[3, 0] - other_out) ** 2 - (values[3, 0] - other_in) ** 2
    assert found[0, 0] / found[3, 0] == pytest.approx(one / other)
    assert np.isfinite(found).all()
    assert np.array_equal(np.sign(found[[0, 3], 0]), np.sign([one, other]))
    changed = values.copy()
    changed[0, 0] += 1e-9  # its own score does not enter its own fit: only the variance moves
    assert likelihood_ratios(changed, inside)[0, 0] == pytest.approx(found[0, 0], rel=1e-6)


def test_the_area_is_that_of_mann_and_whitney() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        positive = rng.random(60) < 0.4
        values = np.round(rng.normal(size=60) + positive, 1)  # with ties
        u = mannwhitneyu(values[positive], values[~positive]).statistic
        fpr, tpr = roc(values, positive)
        assert auc(fpr, tpr) == pytest.approx(u / positive.sum() / (~positive).sum())
        assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
        assert (np.diff(fpr) >= 0).all()
        assert (np.diff(tpr) >= 0).all()


def test_the_rate_at_one_percent_is_read_off_the_curve() -> None:
    """200 others, of which two are above 30 of 100 members: 1 %; a third is above ten more."""
    values = np.concatenate([[10.0] * 30, [11, 11], [9] * 10, [9.5], [0] * 197, [0] * 60])
    positive = np.concatenate([[True] * 30, [False] * 2, [True] * 10, [False], [False] * 197, [True] * 60])
    found = attack(values[None], positive[None], 0, draws=20)
    assert found.tpr_at == pytest.approx(0.3)
    assert found.tpr_interval[0] < 0.3 < found.tpr_interval[1]


def test_training_is_keyed_by_the_seed_and_the_shadow() -> None:
    part, known = Parrot(), images(20, "k")
    inside = halves(known.y.numpy(), 2, 0)
    a, b, c = (scores(p, known, inside, 2, s, [by_pool])[0] for p, s in ((part, 0), (replace(part), 0), (part, 1)))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)
