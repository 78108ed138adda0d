"""Prediction of the number of rounds for every share p of shared data, relative to the rounds without sharing.

A few training runs of few rounds (the probe), without sharing and with some shares p, give curves of test accuracy over
rounds. Two curves give a ratio of rounds (``ratio``). All ratios together give the exponent k of the prediction
rounds(p) / rounds(0) = (1 - p)^k. With k = 1, rounds fall by the share p; with k = 0, sharing saves no rounds.

Theory: Lemma 1 (``lemma1``) predicts the parameters of Corollary I (``rates``) if a share p of the data is shared. The
corollary then predicts T(p), the number of iterations until ||grad f||^2 = epsilon, up to a constant factor that
cancels in T(p) / T(0). The number tau of local steps per round does not depend on p (``LocalSGD.equal_work``), so
T(p) / T(0) is also a ratio of rounds. It is a quotient of two upper bounds, so it is no bound. The corollary assumes
that all clients take part in every round, and that the step size is the best one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log

from fedcommons.convergence import lemma1, rates


def first_round(accuracies: Sequence[float], level: float) -> float | None:
    """Return the first time at which the accuracy reaches ``level``, in rounds; None if no round reaches it.

    accuracies: of rounds 0 (the untrained model), 1, 2, ...; the curve is linear between two rounds.
    """
    if accuracies[0] >= level:
        return 0.0
    for r, (before, after) in enumerate(pairwise(accuracies)):
        if after >= level:
            return r + (level - before) / (after - before)
    return None


def ratio(shared: Sequence[float], without: Sequence[float]) -> float:
    """Return (rounds with sharing) / (rounds without) until the largest accuracy that both curves reach.

    shared, without: accuracies of rounds 0, 1, 2, ... If a curve never exceeds the untrained model, the ratio is 1.
    """
    level = min(max(shared), max(without))
    needed, usual = first_round(shared, level), first_round(without, level)
    return needed / usual if needed and usual else 1.0


def exponent(ratios: Iterable[tuple[float, float]]) -> float:
    """Return the least-squares fit of k in log(ratio) = k log(1 - p).

    ratios: pairs (share p of shared data in (0, 1), ratio of rounds as in ``ratio``, > 0).
    """
    logs = [(log(1 - p), log(relative)) for p, relative in ratios]
    return sum(x * y for x, y in logs) / sum(x * x for x, _ in logs)


def smallest_enough(ratios: Mapping[float, float], speed_up: float) -> float | None:
    """Return the smallest share p whose ratio of rounds is at most 1 / ``speed_up``; None: no share is enough."""
    return min((p for p, relative in ratios.items() if relative <= 1 / speed_up), default=None)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The parameters of Corollary I, measured at one model.

    gradient_sq: ||grad f||^2 for the mean f of the clients' losses. zeta_sq, sigma_sq: gradient dissimilarity zeta^2
    and gradient variance sigma^2 (per sample) of the clients. sigma_pool_sq, delta_sq: gradient variance sigma~_avg^2
    and shift delta^2 of the pool. L_max: largest smoothness of a client's loss. L_pool: smoothness L~_avg on the pool.
    """

    gradient_sq: float
    zeta_sq: float
    sigma_sq: float
    sigma_pool_sq: float
    delta_sq: float
    L_max: float
    L_pool: float


@dataclass(frozen=True)
class LocalWork:
    """The work of a round: number N of participating clients, tau local steps per client, B samples per step."""

    n_clients: int
    tau: float
    batch_size: int


def theory(at: Measured, p: float, work: LocalWork, epsilon: float) -> float:
    """Return T(p) / T(0) by Corollary I (non-convex), where T(p) is the number of iterations to ||grad f||^2 = epsilon.

    f: the mean of the clients' losses. at: the parameters at one model. p: share of shared data, in [0, 1].
    """
    return _iterations(at, p, work, epsilon) / _iterations(at, 0, work, epsilon)


def _iterations(at: Measured, p: float, work: LocalWork, epsilon: float) -> float:
    zeta_sq = lemma1.zeta_sq(p, at.zeta_sq)
    sigma_sq = lemma1.sigma_sq(p, at.sigma_sq, at.sigma_pool_sq, at.zeta_sq, at.delta_sq)
    smooth = lemma1.smoothness(p, at.L_max, at.L_pool)
    return rates.non_convex(epsilon, work.n_clients, work.tau, zeta_sq, sigma_sq / work.batch_size, smooth)
