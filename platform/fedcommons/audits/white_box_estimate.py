"""An estimate of epsilon by canary directions, for an auditor that sees every noisy sum of a training.

Andrew et al., "One-shot empirical privacy estimation for federated learning", ICLR 2024, arXiv:2302.03098, adapted.

u_j: k directions of norm C, at random in d >= k parameters;  q: sampling rate;  sigma: noise multiplier;  T: steps;
S_t: the noisy sum of a step.   A fair coin includes or excludes each direction; an included direction is an example
whose clipped gradient is u_j. Its score is s_j = sum_t <S_t, u_j> / C^2:

    out   (excluded) mean 0, deviation sigma sqrt(T)
    in    (included) mean q T, variance larger by q (1 - q) T
    mu = (mean of scores in - mean of scores out) / deviation of scores out

and epsilon is that of two normal distributions at a distance of mu, at the lower end of mu's interval. In a correct
training mu is q sqrt(T) / sigma at most, which gives the ceiling. The ceiling lies below the accountant's epsilon: an
attacker that weighs each step separately reaches, as T grows, mu = q sqrt(T (e^(1/sigma^2) - 1)).

Departs from the paper: directions are orthogonal. Only nearly orthogonal directions, as k << d random ones, enter each
other's scores equally in every step. This adds a deviation of q T sqrt(k / 2d), so that no mu exceeds sqrt(2d / k).

For a quantity that is released once (a noisy mean, class counts), the scores are draws of two worlds, with and without
an example. Each score is the component along the example's contribution: q = 1, T = 1.

This estimate assumes normal tails. It is neither a certificate nor a bound: it misses leakage in the tails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, isinf, log, sqrt

import numpy as np

from fedcommons.audits.lower_bound import apart, verdict
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.release import Release

CONFIDENCE = 0.95
"""Two-sided confidence of mu's interval."""

ALARM = 1e-3
"""Probability of a false alarm: the noise is correct and is reported as too small."""


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon >= 0 of N(0, 1) against N(mu, 1), to 1e-9.

    It solves delta = P(N < mu/2 - e/mu) - exp(e) P(N < -mu/2 - e/mu) for e.

    Balle and Wang 2018, arXiv:1805.06530, theorem 8.
    """
    from scipy.special import log_ndtr, ndtr  # half a second to import

    def spent(e: float) -> float:
        return float(ndtr(mu / 2 - e / mu)) - exp(min(0.0, e + float(log_ndtr(-mu / 2 - e / mu))))

    if mu <= 0 or spent(0.0) <= delta:
        return 0.0
    if isinf(mu):
        return inf
    low, high = 0.0, mu * mu / 2 + mu * sqrt(2 * log(1 / delta))  # Mironov's bound for the Gaussian mechanism
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > delta else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate from k directions.

    low, high: interval of mu. epsilon: the epsilon of ``low``. reported: the accountant's epsilon. sigma: the stated
    noise multiplier. ceiling: the epsilon of a correct run if mu were known exactly. half: the epsilon that the
    estimate would reach with probability 0.9 if the noise were half of the stated noise.
    noise: measured noise multiplier (deviation of scores out, over sqrt(T) C) and its upper bound at 99.9 %.
    """

    k: int
    mu: float
    low: float
    high: float
    epsilon: float
    ceiling: float
    half: float
    noise: tuple[float, float]
    sigma: float
    reported: float

    @property
    def verdict(self) -> str:
        """Compare the estimate with the reported epsilon in words.

        The estimate cannot tell where even half of the stated noise would not raise it above the reported epsilon.
        """
        return verdict(self.epsilon, self.half, self.reported)

    @property
    def faults(self) -> list[str]:
        """Return in words each statement of the release that the estimate contradicts."""
        (noise, most), join = self.noise, ", not ".join
        return [
            *([f"epsilon is about {join(apart(self.epsilon, self.reported))}"] * (self.epsilon > self.reported)),
            *([f"the noise multiplier is about {join(apart(noise, self.sigma))}"] * (most < self.sigma)),
        ]


def estimate(scores: np.ndarray, inside: np.ndarray, release: Release, delta: float) -> Estimate:
    """Return the estimate from the scores of directions, compared with the values that the release states.

    Noise that is reused between steps makes the sum of a score vary more, so the sum hides it; the spread of the score
    over the steps shows it. If this spread is below the stated noise, epsilon is that of the upper bound on the noise.

    Args:
        scores: (T, k), of each step, or (k,) their sums.
        inside: (k,) bool, the directions that are in.
        release: the stated q, sigma and number of steps.
        delta: the delta of epsilon.

    Raises:
        ValueError: fewer than two directions are in, fewer than two are out, or the release is not covered.
    """
    from scipy.stats import chi2, norm  # half a second to import

    by_step = np.atleast_2d(scores)
    scores = by_step.sum(0)
    those_in, those_out = scores[inside], scores[~inside]
    if min(len(those_in), len(those_out)) < 2 or not (release.covered and release.steps):
        raise ValueError(f"two directions in, two out and a covered release are needed, got {len(those_in)} in, "
                         f"{len(those_out)} out and {release}")  # fmt: skip
    z, unit = float(norm.isf((1 - CONFIDENCE) / 2)), sqrt(release.steps)
    apart, spread = float(those_in.mean() - those_out.mean()), float(those_out.std(ddof=1))
    mu = apart / spread if spread else inf * apart if apart else 0.0
    margin = z * _error(mu, those_in.std(ddof=1) / spread, len(those_in), len(those_out)) if spread else 0.0
    honest, q = release.q * unit / release.sigma, release.q
    of_half = sqrt(1 + 4 * q * (1 - q) / release.sigma**2)  # deviation of scores in over that of scores out
    power = z + float(norm.isf(0.1))  # the estimate reaches `half` with probability 0.9
    half = 2 * honest - power * _error(2 * honest, of_half, len(those_in), len(those_out))

    def measured(deviation: float, degrees: int) -> tuple[float, float]:
        return deviation, deviation * sqrt(degrees / float(chi2.ppf(ALARM, degrees)))

    noise, epsilon = measured(spread / unit, len(those_out) - 1), gaussian_epsilon(mu - margin, delta)
    if degrees := (len(by_step) - 1) * len(those_out):
        new = measured(sqrt(float(by_step[:, ~inside].var(0, ddof=1).mean())), degrees)
        if new[1] < release.sigma:
            noise = min(noise, new)
            epsilon = max(epsilon, gaussian_epsilon(q * unit / new[1] if new[1] else inf, delta))
    return Estimate(
        k=len(scores),
        mu=mu,
        low=mu - margin,
        high=mu + margin,
        epsilon=epsilon,
        ceiling=gaussian_epsilon(honest, delta),
        half=gaussian_epsilon(half, delta),
        noise=noise,
        sigma=release.sigma,
        reported=composed(((release.q, release.sigma, release.steps),), delta),
    )


def _error(mu: float, ratio: float, inside: int, outside: int) -> float:
    """Return the standard error of mu; ratio: deviation of scores in over deviation of scores out."""
    return sqrt(ratio**2 / inside + 1 / outside + mu**2 / (2 * outside))


def of_release(
    draw: Callable[[bool], np.ndarray], axis: np.ndarray, release: Release, delta: float = 1e-5, draws: int = 10_000
) -> Estimate:
    """Return the estimate for a mechanism that releases once, by ``draws`` draws of each world.

    draw(present): the released vector with new noise, where an example is present (True) or blanked out, before the
    mechanism divides the vector by anything. The example should be the worst case: it adds ``release.sensitivity``
    times ``axis``, a vector of length 1. Then the likelihood ratio of the worlds grows with the component along
    ``axis``.

    The error of mu is about sqrt(2 / draws): 10^4 draws detect 0.8 of the reported epsilon up to a sigma of 2, and
    4 * 10^4 draws up to a sigma of 3.
    """
    inside = np.arange(2 * draws) < draws
    scores = np.array([draw(bool(present)) @ axis for present in inside]) / release.sensitivity
    return estimate(scores, inside, release, delta)
