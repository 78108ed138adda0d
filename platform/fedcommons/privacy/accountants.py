"""Epsilon of DP-SGD with Poisson sampling, and the noise multiplier for a target epsilon, by Opacus' accountants.

q: sampling rate;  sigma: noise multiplier, the standard deviation of the noise over the clipping norm.

If all steps have q = 1 (no sampling), they are one Gaussian mechanism, and epsilon is exact (``privacy.gaussian``).
If some steps have q < 1, there are two accountants:

rdp   Renyi differential privacy (Mironov et al. 2019), which the privacy ledger uses; divergences: ``privacy.renyi``
prv   numerical composition of privacy losses (Gopi et al. 2021): epsilon is some percent below "rdp", but takes seconds
"""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, reduce
from math import sqrt
from types import ModuleType

import numpy as np

from fedcommons.errors import UserError
from fedcommons.privacy import gaussian
from fedcommons.privacy.renyi import divergences

LARGEST_SIGMA = 100.0
"""Largest accepted noise multiplier. A target epsilon that needs more noise is refused: the model would not learn."""

Spent = tuple[tuple[float, float, int], ...]
"""A tuple (sampling rate q, noise multiplier sigma, number of steps) for each mechanism that a client has run."""


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Opacus warns if the best Renyi order is the first or last order that it tries. Epsilon is valid nevertheless.
        warnings.filterwarnings("ignore", "Optimal order is the")
        yield


@cache
def _opacus() -> ModuleType:
    """Import and return ``opacus.accountants``, without the log handlers that its import adds to the root logger."""
    root = logging.getLogger()
    before = [*root.handlers]
    import opacus.accountants.utils

    for handler in {*root.handlers} - {*before}:
        root.removeHandler(handler)
    return opacus.accountants


@lru_cache(maxsize=4096)
def _renyi_of_a_step(q: float, sigma: float) -> np.ndarray:
    return divergences(q, sigma, np.asarray(_opacus().RDPAccountant.DEFAULT_ALPHAS, dtype=float))


def accountant_of(rates: Iterable[float]) -> str:
    """Return the accountant that ``composed`` uses: "exact Gaussian" if all sampling rates are 1, else "rdp"."""
    return "rdp" if any(q != 1 for q in rates) else "exact Gaussian"


@lru_cache(maxsize=100_000)
def composed(spent: Spent, delta: float) -> float:
    """Return the epsilon >= 0 of all steps of one client: exact if all sampling rates are 1, else by "rdp"."""
    if accountant_of(q for q, _, steps in spent if steps) != "rdp":
        return gaussian.epsilon(sqrt(sum(steps / sigma**2 for _, sigma, steps in spent)), delta)
    orders, spent_at = _opacus().RDPAccountant.DEFAULT_ALPHAS, _opacus().analysis.rdp.get_privacy_spent
    costs = [steps * _renyi_of_a_step(q, sigma) for q, sigma, steps in spent if steps]
    with _quiet():
        total = spent_at(orders=orders, rdp=list(reduce(np.add, costs)), delta=delta)[0]
    return max(0.0, float(total))  # a negative total means that the steps are (0, delta)-private


@lru_cache(maxsize=4096)
def epsilon(q: float, sigma: float, steps: int, delta: float, accountant: str = "rdp") -> float:
    """Return the epsilon >= 0, at ``delta``, of DP-SGD steps, by the accountant "rdp" or "prv"; 0 without steps."""
    if accountant == "rdp" or steps == 0:
        return composed(((q, sigma, steps),), delta)
    counter = _opacus().create_accountant(accountant)
    counter.history = [(sigma, q, steps)]
    return max(0.0, float(counter.get_epsilon(delta)))


def require_reachable(target: float, q: float, steps: int, delta: float, accountant: str = "rdp") -> None:
    """Check that a noise multiplier of at most ``LARGEST_SIGMA`` reaches the target epsilon at ``delta``.

    Raises:
        UserError: the target epsilon needs a larger noise multiplier.
    """
    if (least := epsilon(q, LARGEST_SIGMA, steps, delta, accountant)) > target:
        raise UserError(
            f"target_epsilon {target:g} would need a noise multiplier above {LARGEST_SIGMA:g}, at which epsilon "
            f"is still {least:.3g} (q = {q:.3g}, {steps} steps); ask for a larger epsilon or fewer steps."
        )


@lru_cache(maxsize=1024)
def tight_noise_for(target: float, q: float, steps: int, delta: float) -> float:
    """Return the smallest noise multiplier (to 0.02 %) whose epsilon, by ``composed``, is at most ``target``.

    Raises:
        UserError: the target epsilon needs a noise multiplier above ``LARGEST_SIGMA``.
    """
    require_reachable(target, q, steps, delta)
    low, high = 1e-3, LARGEST_SIGMA
    while high > 1.0002 * low:
        middle = sqrt(low * high)
        low, high = (low, middle) if composed(((q, middle, steps),), delta) <= target else (middle, high)
    return high


@lru_cache(maxsize=1024)
def noise_for(target: float, q: float, steps: int, delta: float, accountant: str = "rdp") -> float:
    """Return the smallest noise multiplier sigma with which ``steps`` steps cost at most the epsilon ``target``.

    Opacus' search stops when epsilon is at most 0.01 below the target. For q = 1 and "rdp", sigma is exact.
    """
    if q == 1 and accountant == "rdp":
        return sqrt(steps) * gaussian.noise_for(target, delta)
    with _quiet():
        return float(
            _opacus().utils.get_noise_multiplier(
                target_epsilon=target, target_delta=delta, sample_rate=q, steps=steps, accountant=accountant
            )
        )
