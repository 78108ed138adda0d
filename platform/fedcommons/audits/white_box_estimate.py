"""An estimate of epsilon by canary directions, for an auditor that sees every noisy sum of a training.

Andrew et al., "One-shot empirical privacy estimation for federated learning", ICLR 2024, arXiv:2302.03098, adapted.

C: clipping norm;  u_1..u_k: random directions, vectors of norm C in d >= k parameters;  q: sampling rate;  sigma: noise
multiplier;  T: number of steps;  S_t: the noisy sum of clipped gradients of step t.
A fair coin includes or excludes each direction. An included direction is an example whose clipped gradient is u_j. The
score of a direction is s_j = sum_t <S_t, u_j> / C^2:

    out   score of an excluded direction: mean 0, standard deviation sigma sqrt(T)
    in    score of an included direction: mean q T, variance larger by q (1 - q) T
    mu = (mean of scores in - mean of scores out) / standard deviation of scores out

The estimate is the epsilon that distinguishes N(0, 1) from N(mu, 1), at the lower end of the confidence interval of mu.
In a correct training mu is at most q sqrt(T) / sigma; the epsilon of this mu is called the ceiling. It lies below the
accountant's epsilon, because an attacker that weighs each step separately reaches, for large T, a mu of
q sqrt(T (e^(1/sigma^2) - 1)).

Departs from the paper: directions are orthogonal. The paper's k << d random directions are only nearly orthogonal, so
they add to each other's scores, equally in every step. This would add a standard deviation of q T sqrt(k / 2d) to the
scores, and mu could not exceed sqrt(2d / k).

For a quantity that is released once (a noisy mean, class counts), a score is one release with or without an example,
projected on the example's contribution. Then q = 1 and T = 1.

The estimate assumes normal tails. It is no lower bound on epsilon, because it does not measure leakage in the tails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

from fedcommons.audits.lower_bound import apart, verdict
from fedcommons.privacy import accountants, gaussian
from fedcommons.privacy.release import Release

CONFIDENCE = 0.95
"""Confidence of the two-sided interval of mu, the distance between included and excluded scores."""

ALARM = 1e-3
"""Probability of a false alarm: the noise is correct, but it is reported as too small."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of epsilon from k canary directions.

    mu: (mean score of included directions - mean score of excluded directions) / standard deviation of the excluded
    directions' scores.
    low, high: confidence interval of mu. epsilon: the epsilon for mu = ``low``. reported: the accountant's epsilon.
    sigma: the stated noise multiplier. ceiling: the epsilon of a correct run if mu were known exactly. half: the
    epsilon that the estimate would reach with probability 0.9 if the noise were half of the stated noise.
    noise: the measured noise multiplier (standard deviation of excluded scores / sqrt(steps)), and its 99.9 % upper
    bound.
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
        """Compare the estimate with the reported epsilon: "above ...", "not above ..." or "cannot tell".

        The result is "cannot tell" if the estimate for half of the stated noise is at most the reported epsilon.
        """
        return verdict(self.epsilon, self.half, self.reported)

    @property
    def faults(self) -> list[str]:
        """Return a message each on epsilon and on the noise multiplier, if the estimate refutes the stated value."""
        (noise, most), join = self.noise, ", not ".join
        return [
            *([f"epsilon is about {join(apart(self.epsilon, self.reported))}"] * (self.epsilon > self.reported)),
            *([f"the noise multiplier is about {join(apart(noise, self.sigma))}"] * (most < self.sigma)),
        ]


def estimate(scores: np.ndarray, inside: np.ndarray, release: Release, delta: float) -> Estimate:
    """Return the estimate of epsilon from the scores of directions, compared with the values that the release states.

    mu (see ``Estimate``) does not detect noise that is reused in several steps: reused noise increases the standard
    deviation of the summed scores, by which mu is divided. But reused noise makes a score vary less between steps. If
    an upper bound on this variation is below the stated noise, epsilon is also computed from the bound, and the larger
    epsilon counts.

    Args:
        scores: (T, k), the score of each direction in each step, or (k,), the sums over steps.
        inside: (k,) bool, the included directions.
        release: states the sampling rate q, the noise multiplier sigma and the number of steps.
        delta: the delta of the (epsilon, delta) guarantee.

    Raises:
        ValueError: there are fewer than two included or two excluded directions, or the release has no guarantee.
    """
    from scipy.stats import chi2, norm  # imported here, because it takes half a second

    by_step = np.atleast_2d(scores)
    scores = by_step.sum(0)
    those_in, those_out = scores[inside], scores[~inside]
    if min(len(those_in), len(those_out)) < 2 or not (release.covered and release.steps):
        raise ValueError(f"two included directions, two excluded and a covered release are needed, got {len(those_in)} "
                         f"included, {len(those_out)} excluded and {release}")  # fmt: skip
    z, unit = float(norm.isf((1 - CONFIDENCE) / 2)), sqrt(release.steps)
    apart, spread = float(those_in.mean() - those_out.mean()), float(those_out.std(ddof=1))
    mu = apart / spread if spread else inf * apart if apart else 0.0
    margin = z * _error(mu, those_in.std(ddof=1) / spread, len(those_in), len(those_out)) if spread else 0.0
    honest, q = release.q * unit / release.sigma, release.q
    of_half = sqrt(1 + 4 * q * (1 - q) / release.sigma**2)  # std of included / std of excluded scores, at half noise
    power = z + float(norm.isf(0.1))  # the estimate reaches `half` with probability 0.9
    half = 2 * honest - power * _error(2 * honest, of_half, len(those_in), len(those_out))

    def measured(deviation: float, degrees: int) -> tuple[float, float]:
        return deviation, deviation * sqrt(degrees / float(chi2.ppf(ALARM, degrees)))

    noise = measured(spread / unit, len(those_out) - 1)
    epsilon = gaussian.epsilon(max(mu - margin, 0.0), delta)
    if degrees := (len(by_step) - 1) * len(those_out):
        new = measured(sqrt(float(by_step[:, ~inside].var(0, ddof=1).mean())), degrees)
        if new[1] < release.sigma:
            noise = min(noise, new)
            epsilon = max(epsilon, gaussian.epsilon(q * unit / new[1] if new[1] else inf, delta))
    return Estimate(
        k=len(scores),
        mu=mu,
        low=mu - margin,
        high=mu + margin,
        epsilon=epsilon,
        ceiling=gaussian.epsilon(honest, delta),
        half=gaussian.epsilon(max(half, 0.0), delta),
        noise=noise,
        sigma=release.sigma,
        reported=accountants.epsilon(release.q, release.sigma, release.steps, delta),
    )


def _error(mu: float, ratio: float, inside: int, outside: int) -> float:
    """Return the standard error of ``mu`` (``Estimate``) for ``inside`` included and ``outside`` excluded directions.

    ratio: standard deviation of the included scores / standard deviation of the excluded scores.
    """
    return sqrt(ratio**2 / inside + 1 / outside + mu**2 / (2 * outside))


def of_release(
    draw: Callable[[bool], np.ndarray], axis: np.ndarray, release: Release, delta: float = 1e-5, draws: int = 10_000
) -> Estimate:
    """Return the estimate for a mechanism that releases once, from ``draws`` releases with and without an example.

    draw(present): returns the released vector with new noise, where the example is present (True) or blanked out
    (False), before the mechanism divides the vector by a number. The example should be the worst case, which adds
    ``release.sensitivity`` times ``axis``, a vector of length 1. Then the component along ``axis`` is the best score.

    The standard error of mu is about sqrt(2 / draws). So an estimate reaches 0.8 of the reported epsilon with 10^4
    draws for noise multipliers up to 2, and with 4 * 10^4 draws for noise multipliers up to 3.
    """
    inside = np.arange(2 * draws) < draws
    scores = np.array([draw(bool(present)) @ axis for present in inside]) / release.sensitivity
    return estimate(scores, inside, release, delta)
