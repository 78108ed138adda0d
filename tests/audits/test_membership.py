"""Audits of generators: the membership attack, its worst case in closed form, and the lower bound on epsilon."""

from dataclasses import dataclass
from itertools import product
from math import exp, log, sqrt
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import binom, mannwhitneyu, norm
from torch import Tensor

from fedcommons import Examples, generator, numpy_generator
from fedcommons.audits.copies import clopper_pearson
from fedcommons.audits.exposed import worst_case
from fedcommons.audits.lower_bound import LowerBound, by_scores, ceiling, coins, lower_bound, p_value
from fedcommons.audits.membership import attack, auc, by_pool, halves, likelihood_ratios, roc, scores
from fedcommons.generators.generator import Generator, TrainedGenerator, Weights


def images(n: int, *key: int | str) -> Examples:
    x = torch.randint(0, 256, (n, 1, 8, 8), generator=generator(*key), dtype=torch.uint8)
    return Examples(x, torch.arange(n) % 2)


@dataclass(frozen=True)
class Parrot:
    """Draws what it was trained on, with noise; with ``deaf`` it draws noise only."""

    noise: float = 40.0
    deaf: bool = False
    epochs: int = 1
    sampling: ClassVar[tuple[str, ...]] = ()

    def fit(self, examples: Examples, n_classes: int, seed: int, epochs: Any, *, flip: bool = False) -> Any:
        return {e: TrainedGenerator({"x": examples.x, "seed": torch.tensor(seed)}) for e in epochs}

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        draws = generator(seed, int(weights["seed"]))
        rows = torch.randint(len(weights["x"]), (len(labels),), generator=draws)
        x = weights["x"][rows].float() * (not self.deaf)
        return (x + self.noise * torch.randn(len(labels), *shape, generator=draws)).clamp(0, 255).to(torch.uint8)


def attacked(part: Generator, n: int, generators: int, seed: int, by=by_pool):
    candidates = images(n, "images", seed)
    inside = halves(candidates.y.numpy(), generators, seed)
    (pool_scores,) = scores(part, candidates, inside, 2, seed, [by])
    return attack(likelihood_ratios(pool_scores, inside), inside, seed)


def test_a_generator_that_memorises_is_found_out() -> None:
    for seed in range(5):
        result = attacked(Parrot(), 120, 8, seed)
        assert result.auc_interval[0] > 0.75
        assert result.tpr_interval[0] > 0.3
    candidates = images(20, "k")  # training is keyed by the seed
    inside = halves(candidates.y.numpy(), 2, 0)
    a, b, c = (scores(Parrot(), candidates, inside, 2, seed, [by_pool])[0] for seed in (0, 0, 1))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.long
def test_a_generator_that_ignores_its_data_is_not() -> None:
    """AUC 1/2 within its interval, in nearly all of 30 attacks (95 %), and as many true as false positives."""
    results = [attacked(Parrot(deaf=True), 80, 6, seed) for seed in range(30)]
    assert sum(f.auc_interval[0] <= 0.5 <= f.auc_interval[1] for f in results) >= 26
    assert sum(f.tpr_interval[0] <= 0.01 for f in results) >= 28
    assert abs(np.mean([f.auc for f in results]) - 0.5) < 0.02


def test_every_generator_sees_a_half_of_its_own() -> None:
    labels = np.repeat([0, 1, 2], [40, 60, 5])
    inside = halves(labels, 10, 3)
    assert np.array_equal(inside, halves(labels, 10, 3))
    assert not np.array_equal(inside, halves(labels, 10, 4))
    for k, mask in enumerate(inside):
        assert np.bincount(labels[mask]).tolist() == [20, 30, 2 + k % 2]


def test_the_ratio_is_that_of_two_normal_densities() -> None:
    """By hand, for the first image, which three of seven generators saw."""
    rng = np.random.default_rng(0)
    inside = rng.random((7, 5)) < 0.5
    inside[:, 0] = [True, True, True, False, False, False, False]
    inside[:, 1] = True
    values = rng.normal(size=(7, 5)) + 2 * inside
    ratios = likelihood_ratios(values, inside)
    mu_in, mu_out = values[1:3, 0].mean(), values[3:, 0].mean()  # for generator 0, which saw image 0
    other_in, other_out = values[:3, 0].mean(), values[4:, 0].mean()  # for generator 3, which did not
    seen_ratio = (values[0, 0] - mu_out) ** 2 - (values[0, 0] - mu_in) ** 2
    unseen_ratio = (values[3, 0] - other_out) ** 2 - (values[3, 0] - other_in) ** 2
    assert ratios[0, 0] / ratios[3, 0] == pytest.approx(seen_ratio / unseen_ratio)
    assert np.isfinite(ratios).all()
    assert np.array_equal(np.sign(ratios[[0, 3], 0]), np.sign([seen_ratio, unseen_ratio]))
    changed = values.copy()
    changed[0, 0] += 1e-9  # its own score does not enter its own fit: only the variance moves
    assert likelihood_ratios(changed, inside)[0, 0] == pytest.approx(ratios[0, 0], rel=1e-6)


def test_the_area_is_that_of_mann_and_whitney() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        positive = rng.random(60) < 0.4
        values = np.round(rng.normal(size=60) + positive, 1)  # with ties
        u = mannwhitneyu(values[positive], values[~positive]).statistic
        fpr, tpr = roc(values, positive)
        assert auc(fpr, tpr) == pytest.approx(u / positive.sum() / (~positive).sum())
        assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)


def test_the_rate_at_one_percent_is_read_off_the_curve() -> None:
    """200 others, of which two are above 30 of 100 members: 1 %; a third is above ten more."""
    values = np.concatenate([[10.0] * 30, [11, 11], [9] * 10, [9.5], [0] * 197, [0] * 60])
    positive = np.concatenate([[True] * 30, [False] * 2, [True] * 10, [False], [False] * 197, [True] * 60])
    result = attack(values[None], positive[None], 0, draws=20)
    assert result.tpr_at == pytest.approx(0.3)
    assert result.tpr_interval == clopper_pearson(result.tpr_at, 150)


# The lower bound: valid for mechanisms of known epsilon, close to it, and closed cases


def right(epsilon: float) -> float:
    """Of randomised response: the probability of the true bit."""
    return exp(epsilon) / (1 + exp(epsilon))


@pytest.mark.long
def test_how_often_it_is_above_epsilon_is_said_exactly() -> None:
    """Summed over all outcomes, for sizes at which it can be: at most 5 %, and not far below it."""
    for m, epsilon in product((30, 200), (0.3, 1.0, 3.0)):
        outcomes = np.arange(m + 1)
        above = np.array([lower_bound(m, m, int(v), 0.0) > epsilon for v in outcomes])
        chance = binom.pmf(outcomes, m, right(epsilon))[above].sum()
        assert chance <= 0.05
        assert chance > 0.005 or m * log(right(epsilon)) > log(0.05)  # all right is likelier: nothing can be refuted


@pytest.mark.parametrize(("r", "confidence", "most"), [(89, 0.95, 3.37), (250, 1 - 0.05 / 3, 4.10), (4, 0.95, 0.0)])
def test_the_ceiling_is_the_closed_form_that_no_outcome_exceeds(r: int, confidence: float, most: float) -> None:
    t = (1 - confidence) ** (1 / r)
    highest = ceiling(4 * r, r, 0.0, confidence)
    assert highest == pytest.approx(max(0.0, log(t / (1 - t))), abs=2e-6)
    assert highest == pytest.approx(most, abs=0.006)
    assert all(lower_bound(4 * r, r, v, 0.0, confidence) <= highest for v in range(r + 1))
    assert lower_bound(4 * r, r, r, 0.0, confidence) == highest  # q^r = 1 - confidence: epsilon = ln(q / (1 - q))
    assert lower_bound(4 * r, r, 0, 0.0, confidence) == lower_bound(100, 0, 0, 0.0) == 0
    assert most != 3.37 or ceiling(359, 89, 1e-5) == pytest.approx(3.36, abs=0.006)  # delta lowers it a little


def test_a_bound_whose_ceiling_is_not_above_what_is_reported_cannot_tell() -> None:
    """40 of 89 right, as of a private pool at epsilon 9.99: no outcome could have been above it."""
    inside = np.arange(359) % 2 == 0
    result = by_scores(inside.astype(float), inside, 89, 1e-5)
    assert result.bound == result.ceiling == ceiling(359, 89, 1e-5)
    assert result.verdict(9.99) == result.verdict(result.ceiling) == "cannot tell"
    assert result.verdict(result.ceiling - 0.01) == "above the reported one"
    assert result.verdict(None) == "no epsilon is reported"
    low = LowerBound(0.0, 3.36, 359, 89, 40)
    assert (low.verdict(9.99), low.verdict(3.0)) == ("cannot tell", "not above the reported one")


def test_delta_is_the_theorems_term_written_out() -> None:
    """Without it the binomial tail; against loops over i and k; and for v = 1: 2 m delta P[Binomial = 0]."""
    for r, v, epsilon in product((5, 40), (0, 3, 5), (0.0, 1.0)):
        assert p_value(50, r, v, epsilon, 0.0) == pytest.approx(binom.sf(v - 1, r, right(epsilon)))
    for m, r, v, epsilon, delta in ((20, 12, 9, 0.7, 1e-3), (50, 50, 33, 0.0, 1e-4), (9, 9, 9, 2.0, 1e-2)):
        q = right(epsilon)
        tail = [sum(binom.pmf(k, r, q) for k in range(w, r + 1)) for w in range(r + 1)]
        worst = max((tail[v - i] - tail[v]) / i for i in range(1, v + 1))
        assert p_value(m, r, v, epsilon, delta) == pytest.approx(tail[v] + 2 * m * delta * worst)
    assert p_value(3, 2, 1, 0.0, 0.01) == pytest.approx(0.75 + 0.06 * 0.25)


def test_the_highest_scores_are_guessed() -> None:
    inside = coins(1000, numpy_generator("coins"))
    assert abs(inside.mean() - 0.5) < 0.07
    perfect = by_scores(inside.astype(float), inside, 300, 0.0)
    assert (perfect.m, perfect.r, perfect.v) == (1000, 300, 300)
    assert perfect.bound == lower_bound(1000, 300, 300, 0.0)
    assert by_scores(-inside.astype(float), inside, 300, 0.0).v == 0
    assert by_scores(np.zeros(1000), inside, 300, 0.0).v == inside[:300].sum()


@pytest.mark.parametrize("wrong", [(5, 6, 0, 0.0, 0.0), (5, 4, 5, 0.0, 0.0), (5, 4, 3, 0.0, 2.0)])
def test_numbers_that_mean_nothing_are_refused(wrong: tuple[int, int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        p_value(*wrong)


def releases(norms: np.ndarray, generators: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and memberships (K, n) of K releases sum_j x_j + N(0, I) of random halves of n orthogonal x_j.

    The score of image j is the release's component in direction x_j: N(|x_j|, 1) for a member and N(0, 1) otherwise.
    """
    inside = halves(np.zeros(len(norms), int), generators, seed)
    return inside * norms + np.random.default_rng(seed).normal(size=inside.shape), inside


@pytest.mark.parametrize("outlier", [0.5, 1.5, 3.0])
def test_the_outliers_of_a_gaussian_release_have_the_auc_of_the_closed_form(outlier: float) -> None:
    """Phi(r/sqrt(2)) for the two outliers of 40 examples, although the average over all examples is near 0.5."""
    norms = np.where(np.arange(40) % 20 == 7, outlier, 0.05)
    scores, inside = releases(norms, 2000, 0)
    worst, average = worst_case(scores, inside, 0), attack(likelihood_ratios(scores, inside), inside, 0, draws=20)
    assert worst is not None
    assert worst.images == 2
    assert worst.auc == pytest.approx(norm.cdf(outlier / sqrt(2)), abs=0.025)
    assert worst.auc_interval[0] <= norm.cdf(outlier / sqrt(2)) <= worst.auc_interval[1]
    assert worst.tpr_at == pytest.approx(norm.cdf(outlier - norm.ppf(0.99)), abs=0.03)
    assert average.auc < 0.56


def test_few_generators_estimate_the_same_auc() -> None:
    """With 16 generators, the mean over 60 attacks is that of the closed form: choosing does not inflate it."""
    norms = np.where(np.arange(40) % 20 == 7, 5.0, 0.0)
    results = [worst_case(*releases(norms, 16, seed), seed, draws=2) for seed in range(60)]
    assert np.mean([result.auc for result in results if result]) == pytest.approx(norm.cdf(5 / sqrt(2)), abs=0.005)


def test_a_mechanism_that_ignores_its_data_has_no_exposed_examples() -> None:
    """AUC 0.5 in the mean of 200 attacks and within its interval in most of them; as many true as false positives."""
    results = [worst_case(*releases(np.zeros(60), 12, seed), seed, draws=100) for seed in range(200)]
    every = [result for result in results if result]
    assert abs(np.mean([result.auc for result in every]) - 0.5) < 0.015
    assert np.mean([result.auc_interval[0] <= 0.5 <= result.auc_interval[1] for result in every]) > 0.8
    assert {result.tpr_at for result in every} == {None}  # 9 non-members in a half show no rate of 1 %
    twenty = [worst_case(*releases(np.zeros(20), 12, seed), seed, draws=2) for seed in range(400)]  # one image
    assert abs(np.mean([r.auc for r in twenty if r]) - 0.5) < 0.02  # a half with members only counts as 0.5
    many = worst_case(*releases(np.zeros(60), 4000, 0), 0, draws=2)
    assert many is not None
    assert many.tpr_at == pytest.approx(0.01, abs=0.006)


def test_a_small_shift_of_all_examples_and_too_few_generators() -> None:
    scores, inside = releases(np.full(40, 1.0), 400, 1)
    worst = worst_case(scores, inside, 1)
    assert worst is not None
    assert worst.auc == pytest.approx(norm.cdf(1 / sqrt(2)), abs=0.06)  # no example is more exposed than another
    assert worst_case(scores[:11], inside[:11], 1) is None
