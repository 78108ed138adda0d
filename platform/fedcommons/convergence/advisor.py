"""Prediction of the number of rounds for every share p of shared data, relative to the rounds without sharing.

f: the mean of the clients' losses;  zeta^2, sigma^2, L: gradient dissimilarity, gradient variance and smoothness of the
clients;  sigma~_avg^2, delta^2, L~_avg: variance, shift and smoothness of the pool of shared examples (``estimators``).

A short training run without sharing (the probe) measures these six parameters at a few models. Lemma 1 (``lemma1``)
predicts zeta^2, sigma^2 and L if a share p of the data is shared. Corollary I (``rates``) then predicts T(p), the
number of iterations until ||grad f||^2 = epsilon, up to a constant factor that cancels in T(p) / T(0). The number tau
of local steps per round does not depend on p (``LocalSGD.equal_work``), so T(p) / T(0) is also the ratio of rounds.

The band of a prediction is the minimum to maximum over all models of the probe, over two values of epsilon (the model's
||grad f||^2 and a tenth of it), and over the ends of the estimates' confidence intervals. The band is not a confidence
interval for the real number of rounds, because the corollary is only an upper bound. The corollary assumes that all
clients take part in every round, and that the step size is the best one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedcommons.convergence import lemma1, rates
from fedcommons.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and a prediction does not need torch
    from fedcommons.convergence.laboratory import Estimate


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The parameters of Corollary I, measured at one model of the probe.

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


@dataclass(frozen=True)
class Prediction:
    """The predicted number of rounds with a share p of shared data, divided by the number without sharing.

    relative: the ratio at the last model of the probe. low, high: ends of the band of ratios (see the module).
    """

    p: float
    relative: float
    low: float
    high: float


def probed(estimates: "Mapping[str, Estimate]") -> list[Probed]:
    """Return the estimated parameters, then variants with one parameter at an end of its confidence interval.

    Negative estimates are replaced by 0. estimates: an ``Estimate`` for every field of ``Probed``, by name.
    """
    names = Probed.__dataclass_fields__
    central = Probed(**{name: max(estimates[name].value, 0.0) for name in names})
    uncertain = [name for name in names if estimates[name].standard_error]
    ends = [(name, end) for name in uncertain for end in estimates[name].interval]
    return [central, *(replace(central, **{name: max(end, 0.0)}) for name, end in ends)]


def relative_rounds(at: Probed, p: float, work: LocalWork, epsilon: float) -> float:
    """Return T(p) / T(0), where T(p) is the number of iterations until ||grad f||^2 = ``epsilon`` with a share p.

    f: the mean of the clients' losses. at: the parameters at one model. p: share of shared data, in [0, 1].
    """
    return _iterations(at, p, work, epsilon) / _iterations(at, 0, work, epsilon)


def _iterations(at: Probed, p: float, work: LocalWork, epsilon: float) -> float:
    zeta_sq = lemma1.zeta_sq(p, at.zeta_sq)
    sigma_sq = lemma1.sigma_sq(p, at.sigma_sq, at.sigma_pool_sq, at.zeta_sq, at.delta_sq)
    smooth = lemma1.smoothness(p, at.L_max, at.L_pool)
    return rates.non_convex(epsilon, work.n_clients, work.tau, zeta_sq, sigma_sq / work.batch_size, smooth)


def predict(probe: Sequence[Sequence[Probed]], shares: Iterable[float], work: LocalWork) -> list[Prediction]:
    """Return a prediction for every share p of shared data in ``shares``.

    probe: what ``probed`` returns for each measured model of a short training run without sharing. The last model gives
    the prediction. ``low`` and ``high`` are the extreme predictions over all models.

    Raises:
        UserError: the gradient at a model of the probe is zero, so no number of rounds can be predicted.
    """
    if any(variants[0].gradient_sq <= 0 for variants in probe):
        raise UserError(
            "the gradient is zero at a model of the short first run (probe): probe fewer rounds or more samples."
        )
    models = [at for variants in probe for at in variants if at.gradient_sq > 0]
    predictions = []
    for p in shares:
        band = [relative_rounds(at, p, work, at.gradient_sq * factor) for at in models for factor in (1, 0.1)]
        last = probe[-1][0]
        predictions.append(Prediction(p, relative_rounds(last, p, work, last.gradient_sq), min(band), max(band)))
    return predictions
