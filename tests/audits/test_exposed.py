"""Worst-case membership: closed form of a Gaussian release, nothing for a mechanism that ignores its data."""

from math import sqrt

import numpy as np
import pytest
from scipy.stats import norm

from fedcommons.audits.exposed import worst_case
from fedcommons.audits.membership import attack, halves, likelihood_ratios


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
    found = [worst_case(*releases(norms, 16, seed), seed, draws=2) for seed in range(60)]
    assert np.mean([one.auc for one in found if one]) == pytest.approx(norm.cdf(5 / sqrt(2)), abs=0.005)


def test_a_mechanism_that_ignores_its_data_has_no_exposed_examples() -> None:
    """AUC 0.5 in the mean of 200 attacks and within its interval in most of them; as many true as false positives."""
    found = [worst_case(*releases(np.zeros(60), 12, seed), seed, draws=100) for seed in range(200)]
    every = [one for one in found if one]
    assert abs(np.mean([one.auc for one in every]) - 0.5) < 0.015
    assert np.mean([one.auc_interval[0] <= 0.5 <= one.auc_interval[1] for one in every]) > 0.8
    assert {one.tpr_at for one in every} == {None}  # 9 non-members in a half show no rate of 1 %
    twenty = [worst_case(*releases(np.zeros(20), 12, seed), seed, draws=2) for seed in range(400)]  # one image
    assert abs(np.mean([one.auc for one in twenty if one]) - 0.5) < 0.02  # a half with members only counts as 0.5
    many = worst_case(*releases(np.zeros(60), 4000, 0), 0, draws=2)
    assert many is not None
    assert many.tpr_at == pytest.approx(0.01, abs=0.006)


def test_a_small_shift_of_all_examples_and_too_few_generators() -> None:
    scores, inside = releases(np.full(40, 1.0), 400, 1)
    worst = worst_case(scores, inside, 1)
    assert worst is not None
    assert worst.auc == pytest.approx(norm.cdf(1 / sqrt(2)), abs=0.06)  # no example is more exposed than another
    assert worst_case(scores[:11], inside[:11], 1) is None
