"""Exact accounting of the Gaussian mechanism: epsilon of a noisy value of bounded sensitivity, and noise for a target.

Balle and Wang, "Improving the Gaussian mechanism for differential privacy", arXiv:1805.06530, theorem 8.
mu: sensitivity over standard deviation of the noise, 1/sigma for a noise multiplier sigma;  Phi: normal distribution.

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

Several such mechanisms on the same data are one mechanism whose mu^2 is the sum of their mu^2 (Dong, Roth and Su,
arXiv:1905.02383).
"""

from math import exp, expm1, inf, log

MU = (1e-7, 1e7)
"""Range of mu in which roots are searched: below it a value is almost only noise, above it almost without noise."""


def delta(epsilon: float, mu: float) -> float:
    """Return the smallest delta at ``epsilon`` >= 0, for mu > 0."""
    from scipy.special import log_ndtr  # half a second to import

    first, second = float(log_ndtr(mu / 2 - epsilon / mu)), float(log_ndtr(-mu / 2 - epsilon / mu))
    return -exp(first) * expm1(min(0.0, epsilon + second - first)) if first > -inf else 0.0


def _excess(epsilon_: float, mu: float, delta_: float) -> float:
    """Return log(delta(epsilon)/delta), which is 0 at the root."""
    return log(max(delta(epsilon_, mu), 1e-300)) - log(delta_)


def epsilon(mu: float, delta_: float) -> float:
    """Return the smallest epsilon >= 0 at ``delta_`` in (0, 1), for mu >= 0.

    Above mu = 1e7 the result is an upper bound, with a relative error of about 1e-6 or less.
    """
    from scipy.optimize import root_scalar

    if mu == 0 or delta(0.0, mu) <= delta_:
        return 0.0
    # The bound follows from Phi(-z) <= e^(-z^2/2): at this epsilon the first term is below delta_.
    most = mu * mu / 2 + mu * (2 * log(1 / delta_)) ** 0.5
    if mu > MU[1]:
        return most
    return float(root_scalar(lambda e: _excess(e, mu, delta_), bracket=(0.0, most), xtol=1e-12, rtol=1e-12).root)


def noise_for(target: float, delta_: float) -> float:
    """Return the smallest noise multiplier sigma whose epsilon at ``delta_`` is the target > 0."""
    from scipy.optimize import root_scalar

    least, most = MU
    ends = log(least), log(most)
    root = root_scalar(lambda at: _excess(target, exp(at), delta_), bracket=ends, xtol=1e-14, rtol=1e-14).root
    sigma = exp(-float(root))
    return sigma * (1 + 1e-12)  # rounding must not let epsilon exceed the target
