"""A lower bound on epsilon from one training run, by guesses of which canaries were in it.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, arXiv:2305.08846, theorem 5.2.

m: canaries, each included or excluded by a fair coin;  r: number of guesses, fixed before scores are seen (the auditor
abstains from the other m - r);  v: correct guesses.   If the run is (epsilon, delta)-DP for one canary, then
with q = 1/(1 + e^-epsilon)

    P[at least v of r right] <= f(v) + 2 m delta max_{1<=i<=v} (f(v - i) - f(v)) / i,    f(v) = P[Binomial(r, q) >= v].

Why: for delta = 0 each guess is right with odds of at most e^epsilon whatever the other coins are. So the number of
right guesses is stochastically below a binomial. delta adds a random F >= 0 with a mean of at most 2 m delta to that
number; the worst F jumps from v - i to v with probability 2 m delta / i.
"""

from dataclasses import dataclass

import numpy as np


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Return the largest probability, in [0, 1], that an (epsilon, delta)-DP run lets v or more of r guesses be right.

    Raises:
        ValueError: not 0 <= v <= r <= m, epsilon < 0, or delta outside of [0, 1].
    """
    from scipy.special import expit
    from scipy.stats import binom  # half a second to import

    if not (0 <= v <= r <= m and epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(
            f"0 <= v <= r <= m, epsilon >= 0, 0 <= delta <= 1 must hold: {v}, {r}, {m}, {epsilon}, {delta}"
        )
    q = expit(epsilon)
    below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, q))  # P[v - i <= Binomial < v] for i = 1 .. v
    jump = float(np.max(below / np.arange(1, v + 1), initial=0.0))
    return min(1.0, float(binom.sf(v - 1, r, q)) + 2 * m * delta * jump)


def lower_bound(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest epsilon >= 0 that v right guesses of r refute, to 1e-6: the run is not (epsilon, delta)-DP.

    An (epsilon, delta)-DP run gets a bound above its epsilon with probability at most 1 - ``confidence``. The
    bound is 0 where the guesses refute no epsilon.
    """
    level = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return p_value(m, r, v, epsilon, delta) < level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):  # ends: f(v) tends to 1
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def ceiling(m: int, r: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest possible bound, that of r right guesses of r; 0 where r is too small for any bound.

    At delta = 0 it is log(t / (1 - t)) with t = (1 - confidence)^(1/r): 3.37 for 89 guesses.
    """
    return lower_bound(m, r, r, delta, confidence)


def apart(first: float, second: float) -> tuple[str, str]:
    """Return two numbers as text, with at least three digits and as many more as make the texts differ."""
    both = ((f"{first:.{digits}g}", f"{second:.{digits}g}") for digits in range(3, 18))
    return next((texts for texts in both if texts[0] != texts[1]), (repr(first), repr(second)))


def verdict(bound: float, most: float, reported: float | None) -> str:
    """Compare a lower bound (at most ``most``) with a reported epsilon in words; None: no release is covered."""
    if reported is None:
        return "no epsilon is reported"
    if bound > reported:
        return "above the reported one"
    return "not above the reported one" if most > reported else "cannot tell"


@dataclass(frozen=True)
class LowerBound:
    """A lower bound from v right guesses of r among m canaries; ceiling: the largest possible bound."""

    bound: float
    ceiling: float
    m: int
    r: int
    v: int

    def verdict(self, reported: float | None) -> str:
        """Return in words whether the bound is above a reported epsilon, not above it, or cannot tell."""
        return verdict(self.bound, self.ceiling, reported)


def coins(m: int, draws: np.random.Generator) -> np.ndarray:
    """Draw (m,) bool: which canaries are in."""
    return draws.random(m) < 0.5


def by_scores(scores: np.ndarray, inside: np.ndarray, r: int, delta: float, confidence: float = 0.95) -> LowerBound:
    """Guess that the canaries with the r highest scores are in, and bound epsilon.

    scores: (m,), high for canaries that are in. Ties at the last place are broken by the index of the canary, which is
    independent of its coin.
    """
    top = np.argsort(-scores, kind="stable")[:r]
    v, m = int(inside[top].sum()), len(scores)
    bound, most = lower_bound(m, len(top), v, delta, confidence), ceiling(m, len(top), delta, confidence)
    return LowerBound(bound, most, m, len(top), v)
