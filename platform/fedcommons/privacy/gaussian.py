"""Exact accounting of the Gaussian mechanism, which adds normal noise to a value of bounded sensitivity.

Balle and Wang, "Improving the Gaussian mechanism for differential privacy", arXiv:1805.06530, theorem 8.
mu: sensitivity over the standard deviation of the noise, so 1/sigma for a noise multiplier sigma;  Phi: distribution
function of the standard normal distribution. The mechanism is (epsilon, delta)-private with

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

Several Gaussian mechanisms on the same data are equivalent to one mechanism. Its mu^2 is the sum of the mechanisms'
mu^2 (Dong, Roth and Su, arXiv:1905.02383).
"""

from math import exp, expm1, inf, log

MU = (1e-7, 1e7)
"""Smallest and largest mu of numerical searches; mu: sensitivity divided by the noise's standard deviation."""


def delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta at which the Gaussian mechanism is (epsilon, delta)-private, for epsilon >= 0.

    mu: sensitivity over the standard deviation of the noise, above 0.
    """
    from scipy.special import log_ndtr  # imported here, because it takes half a second

    first, second = float(log_ndtr(mu / 2 - epsilon / mu)), float(log_ndtr(-mu / 2 - epsilon / mu))
    return -exp(first) * expm1(min(0.0, epsilon + second - first)) if first > -inf else 0.0


def _excess(epsilon_: float, mu: float, delta_: float) -> float:
    """Return log(delta(epsilon_, mu) / delta_); it is 0 where the mechanism is exactly (epsilon_, delta_)-private."""
    return log(max(delta(epsilon_, mu), 1e-300)) - log(delta_)


def epsilon(mu: float, delta_: float) -> float:
    """Return the smallest epsilon >= 0 at which the Gaussian mechanism is (epsilon, delta_)-private.

    mu: sensitivity over the standard deviation of the noise, at least 0. delta_: delta of the guarantee, in (0, 1).
    Above mu = 1e7 the result is an upper bound with a relative error of about 1e-6 or less.
    """
    from scipy.optimize import root_scalar

    if mu == 0 or delta(0.0, mu) <= delta_:
        return 0.0
    # ``most`` bounds epsilon from above: as Phi(-z) <= e^(-z^2/2), the first term of delta(most) is below delta_.
    most = mu * mu / 2 + mu * (2 * log(1 / delta_)) ** 0.5
    if mu > MU[1]:
        return most
    return float(root_scalar(lambda e: _excess(e, mu, delta_), bracket=(0.0, most), xtol=1e-12, rtol=1e-12).root)


def noise_for(target: float, delta_: float) -> float:
    """Return the noise multiplier sigma at which the Gaussian mechanism has the epsilon ``target`` at ``delta_``."""
    from scipy.optimize import root_scalar

    least, most = MU
    ends = log(least), log(most)
    root = root_scalar(lambda at: _excess(target, exp(at), delta_), bracket=ends, xtol=1e-14, rtol=1e-14).root
    sigma = exp(-float(root))
    return sigma * (1 + 1e-12)  # slightly more noise, so that epsilon does not exceed the target by rounding
