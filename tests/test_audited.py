"""The lower bound on epsilon from one run: valid for mechanisms of known epsilon, close to it, and closed cases."""

from itertools import product
from math import exp, log

import numpy as np
import pytest
from scipy.stats import binom

from fedcommons.audits.lower_bound import LowerBound, by_scores, ceiling, coins, lower_bound, p_value
from fedcommons.seeds import numpy_generator


def right(epsilon: float) -> float:
    """Of randomised response: the probability of the true bit."""
    return exp(epsilon) / (1 + exp(epsilon))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 4.0])
def test_of_randomised_response_it_is_rarely_above_epsilon_and_close_to_it(epsilon: float) -> None:
    """m independent bits, each reported truly with odds e^epsilon: all are guessed as reported."""
    draws = numpy_generator("randomised response", str(epsilon))
    for m, gap in ((200, 2.5), (2000, 0.9), (100_000, 0.1)):
        counts = draws.binomial(m, right(epsilon), size=100 if m < 100_000 else 2)
        bounds = {v: lower_bound(m, m, v, 0.0) for v in set(counts.tolist())}
        found = np.array([bounds[v] for v in counts.tolist()])
        assert np.mean(found > epsilon) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / len(found))
        assert np.median(found) > epsilon - gap


@pytest.mark.long
def test_how_often_it_is_above_epsilon_is_said_exactly() -> None:
    """Summed over all outcomes, for sizes at which it can be: at most 5 %, and not far below it."""
    for m, epsilon in product((30, 200), (0.3, 1.0, 3.0)):
        outcomes = np.arange(m + 1)
        above = np.array([lower_bound(m, m, int(v), 0.0) > epsilon for v in outcomes])
        chance = binom.pmf(outcomes, m, right(epsilon))[above].sum()
        assert chance <= 0.05
        assert chance > 0.005 or m * log(right(epsilon)) > log(0.05)  # all right is likelier: nothing can be refuted


def test_of_m_right_guesses_it_is_the_closed_form() -> None:
    """q^m = 5 %: epsilon = ln(q / (1 - q))."""
    for m in (10, 100, 1000):
        q = 0.05 ** (1 / m)
        assert lower_bound(m, m, m, 0.0) == pytest.approx(log(q / (1 - q)), abs=2e-6)
    assert lower_bound(4, 4, 4, 0.0) == 0  # 1/16 > 5 %
    assert lower_bound(5, 5, 5, 0.0) > 0  # 1/32
    assert lower_bound(100, 0, 0, 0.0) == 0
    assert lower_bound(100, 50, 25, 1e-5) == 0


@pytest.mark.parametrize(("r", "confidence", "most"), [(89, 0.95, 3.37), (250, 1 - 0.05 / 3, 4.10), (4, 0.95, 0.0)])
def test_the_ceiling_is_the_closed_form_that_no_outcome_exceeds(r: int, confidence: float, most: float) -> None:
    t = (1 - confidence) ** (1 / r)
    found = ceiling(4 * r, r, 0.0, confidence)
    assert found == pytest.approx(max(0.0, log(t / (1 - t))), abs=2e-6)
    assert found == pytest.approx(most, abs=0.006)
    assert all(lower_bound(4 * r, r, v, 0.0, confidence) <= found for v in range(r + 1))


def test_delta_lowers_the_ceiling_a_little() -> None:
    assert ceiling(1000, 250, 1e-5, 1 - 0.05 / 3) == pytest.approx(4.06, abs=0.005)
    assert ceiling(359, 89, 1e-5) == pytest.approx(3.36, abs=0.006)


def test_a_bound_whose_ceiling_is_not_above_what_is_reported_cannot_tell() -> None:
    """40 of 89 right, as of a private pool at epsilon 9.99: no outcome could have been above it."""
    inside = np.arange(359) % 2 == 0
    found = by_scores(inside.astype(float), inside, 89, 1e-5)
    assert found.bound == found.ceiling == ceiling(359, 89, 1e-5)
    assert found.verdict(9.99) == found.verdict(found.ceiling) == "cannot tell"
    assert found.verdict(found.ceiling - 0.01) == "above the reported one"
    assert found.verdict(None) == "no epsilon is reported"
    low = LowerBound(0.0, 3.36, 359, 89, 40)
    assert (low.verdict(9.99), low.verdict(3.0)) == ("cannot tell", "not above the reported one")


def test_without_delta_it_is_the_binomial_tail() -> None:
    for r, v, epsilon in product((5, 40), (0, 3, 5), (0.0, 1.0)):
        assert p_value(50, r, v, epsilon, 0.0) == pytest.approx(binom.sf(v - 1, r, right(epsilon)))


def test_delta_is_the_theorems_term_written_out() -> None:
    """Against loops over i and k; and for v = 1: 2 m delta P[Binomial = 0]."""
    for m, r, v, epsilon, delta in ((20, 12, 9, 0.7, 1e-3), (50, 50, 33, 0.0, 1e-4), (9, 9, 9, 2.0, 1e-2)):
        q = right(epsilon)
        tail = [sum(binom.pmf(k, r, q) for k in range(w, r + 1)) for w in range(r + 1)]
        worst = max((tail[v - i] - tail[v]) / i for i in range(1, v + 1))
        assert p_value(m, r, v, epsilon, delta) == pytest.approx(tail[v] + 2 * m * delta * worst)
    assert p_value(3, 2, 1, 0.0, 0.01) == pytest.approx(0.75 + 0.06 * 0.25)


@pytest.mark.parametrize("delta", [1e-4, 1e-2])
def test_it_holds_for_a_mechanism_that_spends_its_delta(delta: float) -> None:
    """Each bit is shown with probability delta, else by randomised response; tails in closed form."""
    for m, epsilon in product((5, 40, 400), (0.2, 1.5)):
        q = delta + (1 - delta) * right(epsilon)
        for v in range(m + 1):
            assert binom.sf(v - 1, m, q) <= p_value(m, m, v, epsilon, delta) + 1e-12


def test_it_holds_for_a_mechanism_that_shows_everything_with_probability_delta() -> None:
    """All m bits are shown with probability delta, else nothing: the worst dependence between canaries."""
    delta = 0.01
    for m in (1, 5, 20):
        for v in range(m + 1):
            chance = delta + (1 - delta) * binom.sf(v - 1, m, 0.5)
            assert chance <= p_value(m, m, v, 0.0, delta) + 1e-12


def test_it_falls_with_delta_and_grows_with_right_guesses_and_confidence() -> None:
    by_delta = [lower_bound(1000, 200, 180, delta) for delta in (0.0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert by_delta == sorted(by_delta, reverse=True)
    assert by_delta[0] > by_delta[-1] >= 0
    by_right = [lower_bound(1000, 200, v, 1e-5) for v in range(100, 201, 10)]
    assert by_right == sorted(by_right)
    assert lower_bound(1000, 200, 180, 1e-5, 0.99) < lower_bound(1000, 200, 180, 1e-5, 0.9)


def test_the_highest_scores_are_guessed() -> None:
    inside = coins(1000, numpy_generator("coins"))
    assert abs(inside.mean() - 0.5) < 0.07
    perfect = by_scores(inside.astype(float), inside, 300, 0.0)
    assert (perfect.m, perfect.r, perfect.v) == (1000, 300, 300)
    assert perfect.bound == lower_bound(1000, 300, 300, 0.0)
    assert by_scores(-inside.astype(float), inside, 300, 0.0).v == 0
    assert by_scores(np.zeros(1000), inside, 300, 0.0).v == inside[:300].sum()


@pytest.mark.parametrize("wrong", [(5, 6, 0, 0.0, 0.0), (5, 4, 5, 0.0, 0.0), (5, 4, 3, -1.0, 0.0), (5, 4, 3, 0.0, 2.0)])
def test_numbers_that_mean_nothing_are_refused(wrong: tuple[int, int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        p_value(*wrong)
