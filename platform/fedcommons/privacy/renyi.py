"""Renyi divergences of a step of DP-SGD, computed for all orders at once. Opacus computes one order after another.

Mironov, Talwar and Zhang, "Renyi differential privacy of the sampled Gaussian mechanism", arXiv:1908.10530, section
3.3. q: sampling rate;  sigma: noise multiplier;  a: order of the divergence;  N: normal random variable with mean 0 and
variance sigma^2.

The divergence is log(A) / (a - 1), where with j = a - i and z = sigma^2 log(1/q - 1) + 1/2

    A = sum_{i >= 0} binom(a, i) [ q^i (1-q)^j e^{(i^2 - i) / (2 sigma^2)} P(N < z - i)
                                 + q^j (1-q)^i e^{(j^2 - j) / (2 sigma^2)} P(N < j - z) ]

For an integer order a, terms with i > a are zero, and A is the paper's binomial sum. The brackets have two summands.
"""

import numpy as np

BLOCK = 64
"""Number of terms in the sum A's first block, more than the largest order, 63. Each later block is twice as long."""

SMALL = -30.0
"""The sum A ends at the first block whose last term is small: both logarithms of its summands are below this value."""


def divergences(q: float, sigma: float, orders: np.ndarray) -> np.ndarray:
    """Return (n,): the Renyi divergence of one step at each of n ``orders`` in (1, 64).

    q: sampling rate, in [0, 1]. sigma: noise multiplier, above 0.
    """
    if q in (0, 1):
        return q * orders / (2 * sigma**2)
    signs, logs, last = _terms(q, sigma, orders, np.arange(BLOCK))
    peak = logs.max((0, 2))  # subtracted before exp, because e^(a^2 / (2 sigma^2)) may overflow
    sums = _sum(signs, logs, peak)
    first, size, remaining = BLOCK, 2 * BLOCK, np.flatnonzero(last >= SMALL)
    while len(remaining):
        signs, logs, last = _terms(q, sigma, orders[remaining], np.arange(first, first + size))
        sums[remaining] += _sum(signs, logs, peak[remaining])
        first, size, remaining = first + size, 2 * size, remaining[last >= SMALL]
    return (peak + np.log(sums)) / (orders - 1)


def _terms(q: float, sigma: float, orders: np.ndarray, i: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return terms ``i`` of the sum A (see the module) for n orders, as three arrays.

    (n, terms): sign of each term. (2, n, terms): logarithms of the two summands in the bracket of each term, times the
    term's binomial coefficient. (n,): the larger of the two logarithms in the last term.
    """
    from scipy.special import binom, log_ndtr  # imported here, because it takes half a second

    j = orders[:, None] - i
    z, coefficient = sigma**2 * np.log(1 / q - 1) + 0.5, binom(orders[:, None], i)
    with np.errstate(divide="ignore"):  # terms above an integer order have coefficient 0 and log(0)
        size = np.log(np.abs(coefficient))
    logs = np.stack(
        [
            size + k * np.log(q) + m * np.log1p(-q) + (k * k - k) / (2 * sigma**2) + log_ndtr(to_edge / sigma)
            for k, m, to_edge in ((i, j, z - i), (j, i, j - z))
        ]
    )
    return np.sign(coefficient), logs, logs[:, :, -1].max(0)


def _sum(signs: np.ndarray, logs: np.ndarray, peak: np.ndarray) -> np.ndarray:
    return (signs * np.exp(logs - peak[:, None])).sum((0, 2))
