"""Lemma 1 of Fedssyn: heterogeneity, noise and smoothness when a share p of all data comes from the pool.

On the exact mixtures (1 - p) D_i + p D~ of every client's data with the whole pool, at every model and for every pool:

zeta_mix^2   = (1 - p)^2 zeta^2
sigma_mix^2  = (1 - p) sigma^2 + p sigma~_avg^2 + p (1 - p) (zeta^2 + delta^2)
L_mix       <= (1 - p) L_max + p L~_avg

The lemma states the first two lines as bounds; averaged over clients they are equalities (the cross term vanishes). For
D_i u D~_si, where each client has a different part of the pool, they are only approximate, in expectation over the
shuffling.
Source: Fedssyn (Li et al., TMLR 2024), lemma 1; symbols as in ``estimators``.
"""

from fedcommons.errors import UserError


def zeta_sq(p: float, zeta_sq: float) -> float:
    """Return zeta_mix^2."""
    return (1 - share(p)) ** 2 * zeta_sq


def sigma_sq(p: float, sigma_sq: float, sigma_pool_sq: float, zeta_sq: float, delta_sq: float) -> float:
    """Return sigma_mix^2; ``sigma_pool_sq``: sigma~_avg^2."""
    p = share(p)
    return (1 - p) * sigma_sq + p * sigma_pool_sq + p * (1 - p) * (zeta_sq + delta_sq)


def smoothness(p: float, l_max: float, l_pool: float) -> float:
    """Return the upper bound of L_mix."""
    return (1 - share(p)) * l_max + p * l_pool


def share(p: float) -> float:
    """Check p and return it.

    Raises:
        UserError: p is outside [0, 1].
    """
    if not 0 <= p <= 1:
        raise UserError(f"p, the share of shared data, must lie in [0, 1], got {p:g}.")
    return p
