"""Epsilon of DP-SGD with Poisson sampling, and the noise for a target, by Opacus' accountants.

If all steps have q = 1 (no sampling), they are one Gaussian mechanism, and epsilon is exact (``gaussian``). For steps
with sampling, and for mixtures, there are two accountants.
rdp: Renyi differential privacy (Mironov et al. 2019), as in the ledger, with divergences from ``renyi``;  prv:
numerical composition of privacy losses (Gopi et al. 2021), tighter by some percent; one epsilon takes seconds.
q: sampling rate;  sigma: noise multiplier.
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
"""A target that needs a larger sigma is refused, because the model would learn nothing."""

Spent = tuple[tuple[float, float, int], ...]
"""(q, sigma, steps) of one client's releases."""


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Opacus warns if the best order is the first or the last order: the bound holds, but could be tighter.
        warnings.filterwarnings("ignore", "Optimal order is the")
        yield


@cache
def _opacus() -> ModuleType:
    """Return Opacus' accountants. Their import adds handlers to the root logger, which would print messages twice."""
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
    """Return the name of the accountant that ``composed`` uses for steps with these sampling rates."""
    return "rdp" if any(q != 1 for q in rates) else "exact Gaussian"


@lru_cache(maxsize=100_000)
def composed(spent: Spent, delta: float) -> float:
    """Return epsilon >= 0 of all steps; 0 without steps. rdp adds divergences at each order; all q = 1: exact."""
    if accountant_of(q for q, _, steps in spent if steps) != "rdp":
        return gaussian.epsilon(sqrt(sum(steps / sigma**2 for _, sigma, steps in spent)), delta)
    orders, spent_at = _opacus().RDPAccountant.DEFAULT_ALPHAS, _opacus().analysis.rdp.get_privacy_spent
    costs = [steps * _renyi_of_a_step(q, sigma) for q, sigma, steps in spent if steps]
    with _quiet():
        total = spent_at(orders=orders, rdp=list(reduce(np.add, costs)), delta=delta)[0]
    return max(0.0, float(total))  # the formula is negative if delta alone covers all steps


@lru_cache(maxsize=4096)
def epsilon(q: float, sigma: float, steps: int, delta: float, accountant: str = "rdp") -> float:
    """Return epsilon >= 0 of ``steps`` steps; 0 without steps."""
    if accountant == "rdp" or steps == 0:
        return composed(((q, sigma, steps),), delta)
    counter = _opacus().create_accountant(accountant)
    counter.history = [(sigma, q, steps)]
    return max(0.0, float(counter.get_epsilon(delta)))


def require_reachable(target: float, q: float, steps: int, delta: float, accountant: str = "rdp") -> None:
    """Check that a sigma of at most ``LARGEST_SIGMA`` reaches the target epsilon.

    Raises:
        UserError: the target needs a larger sigma.
    """
    if (least := epsilon(q, LARGEST_SIGMA, steps, delta, accountant)) > target:
        raise UserError(
            f"target_epsilon {target:g} would need a noise multiplier above {LARGEST_SIGMA:g}, at which epsilon "
            f"is still {least:.3g} (q = {q:.3g}, {steps} steps); ask for a larger epsilon or fewer steps."
        )


@lru_cache(maxsize=1024)
def noise_for(target: float, q: float, steps: int, delta: float, accountant: str = "rdp") -> float:
    """Return the smallest sigma whose epsilon is at most the target.

    Opacus' search stops when epsilon is at most 0.01 below the target; for q = 1 and rdp sigma is exact.
    """
    if q == 1 and accountant == "rdp":
        return sqrt(steps) * gaussian.noise_for(target, delta)
    with _quiet():
        return float(
            _opacus().utils.get_noise_multiplier(
                target_epsilon=target, target_delta=delta, sample_rate=q, steps=steps, accountant=accountant
            )
        )
