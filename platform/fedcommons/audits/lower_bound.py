"""A lower bound on epsilon from one training run, by guesses of which canaries were included in the training.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, arXiv:2305.08846, theorem 5.2.

m: number of canaries, each included or excluded by a fair coin;  r: number of guesses, fixed before the auditor sees
any score (the auditor makes no guess on the other m - r canaries);  v: number of correct guesses.
If the run is (epsilon, delta)-DP for one canary, then with q = 1/(1 + e^-epsilon)

    P[at least v of r right] <= f(v) + 2 m delta max_{1<=i<=v} (f(v - i) - f(v)) / i,    f(v) = P[Binomial(r, q) >= v].

Reason: for delta = 0, each guess is right with odds of at most e^epsilon, whatever the other coins are. So the number
of right guesses is stochastically below a binomial. A delta > 0 adds a random number F >= 0, with a mean of at most
2 m delta, to the number of right guesses. In the worst case F is i with probability 2 m delta / i, and else 0.
"""

from dataclasses import dataclass

import numpy as np


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Return an upper bound, in [0, 1], on P[at least v of r guesses are right] in an (epsilon, delta)-DP run.

    Raises:
        ValueError: 0 <= v <= r <= m does not hold, epsilon is below 0, or delta is outside of [0, 1].
    """
    from scipy.special import expit
    from scipy.stats import binom  # imported here, because it takes half a second

    if not (0 <= v <= r <= m and epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(
            f"0 <= v <= r <= m, epsilon >= 0, 0 <= delta <= 1 must hold: {v}, {r}, {m}, {epsilon}, {delta}"
        )
    q = expit(epsilon)
    below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, q))  # P[v - i <= Binomial < v] for i = 1 .. v
    jump = float(np.max(below / np.arange(1, v + 1), initial=0.0))
    return min(1.0, float(binom.sf(v - 1, r, q)) + 2 * m * delta * jump)


def lower_bound(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest epsilon >= 0 (to 1e-6) that is refuted by v right guesses among r guesses about m canaries.

    An (epsilon, delta)-DP run gets a lower bound above epsilon with probability at most 1 - ``confidence``. The bound
    is 0 if the guesses refute no epsilon.
    """
    level = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return p_value(m, r, v, epsilon, delta) < level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):  # the loop ends, because f(v) tends to 1 as epsilon grows
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def ceiling(m: int, r: int, delta: float, confidence: float = 0.95) -> float:
    """Return the largest possible lower bound, from r right guesses about m canaries; 0 if r is too small.

    At delta = 0 the bound is log(t / (1 - t)) with t = (1 - confidence)^(1/r). For 89 guesses this is 3.37.
    """
    return lower_bound(m, r, r, delta, confidence)


def apart(first: float, second: float) -> tuple[str, str]:
    """Return two numbers as text, with at least three digits and with enough digits to see that the numbers differ."""
    both = ((f"{first:.{digits}g}", f"{second:.{digits}g}") for digits in range(3, 18))
    return next((texts for texts in both if texts[0] != texts[1]), (repr(first), repr(second)))


def verdict(bound: float, most: float, reported: float | None) -> str:
    """Compare a lower bound with a reported epsilon (None: there is no privacy guarantee); return the result as text.

    most: the largest possible lower bound. If it is at most the reported epsilon, the result is "cannot tell".
    """
    if reported is None:
        return "no epsilon is reported"
    if bound > reported:
        return "above the reported one"
    return "not above the reported one" if most > reported else "cannot tell"


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on epsilon from v right guesses among r guesses about m canaries; ceiling: the bound for v = r."""

    bound: float
    ceiling: float
    m: int
    r: int
    v: int

    def verdict(self, reported: float | None) -> str:
        """Compare the bound with a reported epsilon: "above ...", "not above ..." or "cannot tell"."""
        return verdict(self.bound, self.ceiling, reported)


def coins(m: int, draws: np.random.Generator) -> np.ndarray:
    """Draw (m,) bool by fair coins: which of m canaries are included in the training."""
    return draws.random(m) < 0.5


def by_scores(scores: np.ndarray, inside: np.ndarray, r: int, delta: float, confidence: float = 0.95) -> LowerBound:
    """Guess that the canaries with the r highest scores were included, and return the lower bound on epsilon.

    scores: (m,), high for included canaries. inside: (m,) bool, the included canaries. Ties are broken by the index of
    the canary, which is independent of the coin.
    """
    top = np.argsort(-scores, kind="stable")[:r]
    v, m = int(inside[top].sum()), len(scores)
    bound, most = lower_bound(m, len(top), v, delta, confidence), ceiling(m, len(top), delta, confidence)
    return LowerBound(bound, most, m, len(top), v)
