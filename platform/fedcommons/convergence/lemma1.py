"""Lemma 1 of Fedssyn: heterogeneity, gradient variance and smoothness if a share p of all data comes from the pool.

D_i: data of client i;  D~: the pool of shared examples.  On the data D_i: zeta^2, dissimilarity of the clients'
gradients; sigma^2, variance of per-sample gradients; L_max, largest smoothness of a client's loss.  On the pool:
sigma~_avg^2, gradient variance; L~_avg, smoothness.  delta^2: squared distance of the mean gradients of the clients and
of the pool. ``estimators`` has the formulas. The index mix stands for the mixtures (1 - p) D_i + p D~ of every client's
data with the whole pool. At every model and for every pool:

zeta_mix^2   = (1 - p)^2 zeta^2
sigma_mix^2  = (1 - p) sigma^2 + p sigma~_avg^2 + p (1 - p) (zeta^2 + delta^2)
L_mix       <= (1 - p) L_max + p L~_avg

The lemma states the first two lines as upper bounds. Averaged over clients, the first two lines are equalities, because
the cross term vanishes. In training, each client has a different random subset D~_si of the pool. The first two lines
are then only approximately true, in expectation over the random assignment.
Source: Fedssyn (Li et al., TMLR 2024), lemma 1.
"""

from fedcommons.errors import UserError


def zeta_sq(p: float, zeta_sq: float) -> float:
    """Return zeta_mix^2 = (1 - p)^2 zeta^2, the dissimilarity of gradients on mixtures with a share p of the pool."""
    return (1 - share(p)) ** 2 * zeta_sq


def sigma_sq(p: float, sigma_sq: float, sigma_pool_sq: float, zeta_sq: float, delta_sq: float) -> float:
    """Return sigma_mix^2, the variance of per-sample gradients on mixtures.

    p: share of the pool, in [0, 1]. sigma_sq, zeta_sq: variance sigma^2 and dissimilarity zeta^2 of gradients on the
    clients' data. sigma_pool_sq: the variance on the pool. delta_sq: squared distance of the mean gradients of the
    clients and of the pool.
    """
    p = share(p)
    return (1 - p) * sigma_sq + p * sigma_pool_sq + p * (1 - p) * (zeta_sq + delta_sq)


def smoothness(p: float, l_max: float, l_pool: float) -> float:
    """Return the upper bound (1 - p) L_max + p L~_avg of the smoothness of a client's loss on mixtures.

    p: share of the pool. l_max, l_pool: L_max and L~_avg, smoothness on the clients' data (maximum) and on the pool.
    """
    return (1 - share(p)) * l_max + p * l_pool


def share(p: float) -> float:
    """Check p, the share of the pool in mixtures, and return p.

    Raises:
        UserError: p is outside [0, 1].
    """
    if not 0 <= p <= 1:
        raise UserError(f"p, the share of shared data, must lie in [0, 1], got {p:g}.")
    return p
