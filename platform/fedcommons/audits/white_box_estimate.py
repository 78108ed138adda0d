"""An estimate of epsilon by canary directions, for an auditor who sees every noisy sum of a training.

Andrew et al., "One-shot empirical privacy estimation for federated learning", ICLR 2024, arXiv:2302.03098, adapted.

u_j: k directions of norm C, at random in d >= k parameters;  q: sampling rate;  sigma: noise multiplier;  T: steps;
S_t: the noisy sum of a step.   A fair coin puts each direction in or leaves it out; one that is in is an example whose
clipped gradient is u_j. Its score is s_j = sum_t <S_t, u_j> / C^2:

    out   mean 0, deviation sigma sqrt(T)
    in    mean q T, variance larger by q (1 - q) T
    mu = (mean of those in - mean of those out) / deviation of those out

and epsilon is that of two normal distributions at a distance of mu, at the lower end of mu's interval. Of an honest
training mu is q sqrt(T) / sigma at most, which gives the ceiling. It lies below what an accountant counts, as one who
weighs each step by itself sees more: as T grows, q sqrt(T (e^(1/sigma^2) - 1)).

Departs from the paper: directions are orthogonal. Those that are only nearly so, as k << d random ones, enter each
other's scores in every step alike, which adds a deviation of q T sqrt(k / 2d), so that no mu exceeds sqrt(2d / k).

Of what is released once (a noisy mean, class counts) the scores are draws of two worlds, with an example and without,
each along what the example adds: q = 1, T = 1.

This is an estimate that takes tails for normal. It is no certificate and no bound: what hides in the tails it misses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, isinf, log, sqrt

import numpy as np

from fedcommons.audits.lower_bound import apart, verdict
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.release import Release

CONFIDENCE = 0.95
"""Of mu's interval, both ends together."""

ALARM = 1e-3
"""Probability with which the noise of an honest training is called too small."""


def gaussian_epsilon(mu: float, delta: float) -> float:
    """epsilon >= 0 of N(0, 1) against N(mu, 1): delta = P(N < mu/2 - e/mu) - exp(e) P(N < -mu/2 - e/mu), to 1e-9.

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
    """What k directions say. epsilon: that of ``low``, the lower end of mu's interval. reported: what is accounted.

    ceiling: the epsilon of an honest run, were mu known exactly. half: the epsilon that would probably be found if the
    noise were half of what is stated. noise: deviation of those out, over sqrt(T) C, and with 99.9 % at most so large.
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
        """What it says of the reported epsilon. It cannot tell where half of the noise would not be above it either."""
        return verdict(self.epsilon, self.half, self.reported)

    @property
    def faults(self) -> list[str]:
        """What cannot be so, in words."""
        (noise, most), mine = self.noise, ", not ".join
        return [
            *([f"epsilon is about {mine(apart(self.epsilon, self.reported))}"] * (self.epsilon > self.reported)),
            *([f"the noise multiplier is about {mine(apart(noise, self.sigma))}"] * (most < self.sigma)),
        ]


def estimate(scores: np.ndarray, inside: np.ndarray, release: Release, delta: float) -> Estimate:
    """Return the estimate by the scores of directions, of which some are in, against what the release states.

    Steps whose noise is not new hide from the sum of a score, which then varies more, and not from its spread over the
    steps: where that is smaller than the stated noise, epsilon is that of a noise that is at most so large.

    Args:
        scores: (T, k), of each step, or (k,) their sums.
        inside: (k,) bool, the directions that are in.
        release: what is stated.
        delta: of epsilon.

    Raises:
        ValueError: fewer than two directions are in, or out, or the release is not covered.
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
    of_half = sqrt(1 + 4 * q * (1 - q) / release.sigma**2)  # deviation of those in over that of those out
    power = z + float(norm.isf(0.1))  # found with probability 0.9
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
    """Standard error of mu; ratio: of the deviations of those in and out."""
    return sqrt(ratio**2 / inside + 1 / outside + mu**2 / (2 * outside))


def of_release(
    draw: Callable[[bool], np.ndarray], axis: np.ndarray, release: Release, delta: float = 1e-5, draws: int = 10_000
) -> Estimate:
    """The estimate for a mechanism that releases once, by so many draws of each world.

    draw(there): what is released, with new noise, where an example is there or blanked out, and before the mechanism
    divides it by anything. The example should be the worst one, which adds ``release.sensitivity`` times ``axis``, a
    vector of length 1: then the likelihood ratio of the worlds grows with what is released, along ``axis``.

    The error of mu is about sqrt(2 / draws): 10^4 draws tell 0.8 of what is reported up to a sigma of 2, and four times
    as many up to 3.
    """
    inside = np.arange(2 * draws) < draws
    scores = np.array([draw(bool(there)) @ axis for there in inside]) / release.sensitivity
    return estimate(scores, inside, release, delta)
