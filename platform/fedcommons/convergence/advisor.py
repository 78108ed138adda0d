"""How much sharing is enough: relative rounds for every share p, predicted by Corollary I from a short probe.

A probe without sharing measures zeta^2, sigma^2, L and the pool's sigma~_avg^2, delta^2, L~_avg at a few models.
Lemma 1 predicts zeta^2, sigma^2 and L for a share p of shared data. Corollary I (``rates``) then predicts T(p), the
number of iterations to the accuracy epsilon = ||grad f||^2, up to a constant that cancels in T(p) / T(0). The steps per
round tau do not depend on p (equal work), so T(p) / T(0) is also the ratio of rounds.

The band is the minimum to maximum over all models of the probe, over two values of epsilon (each model's ||grad f||^2
and a tenth of it), and over the ends of the estimates' confidence intervals. It is not a confidence interval for the
outcome: the corollary is an upper bound, for full participation and the best step size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedcommons.convergence import lemma1, rates
from fedcommons.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and a prediction does not need it
    from fedcommons.convergence.laboratory import Estimate


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The parameters at one model; ``gradient_sq``: ||grad f||^2; sigma^2 is per sample."""

    gradient_sq: float
    zeta_sq: float
    sigma_sq: float
    sigma_pool_sq: float
    delta_sq: float
    L_max: float
    L_pool: float


@dataclass(frozen=True)
class LocalWork:
    """The work of a round: N participating clients, tau local steps per round, B samples per step."""

    n_clients: int
    tau: float
    batch_size: int


@dataclass(frozen=True)
class Prediction:
    """Rounds with a share p of shared data, divided by rounds without sharing, and the prediction's band."""

    p: float
    relative: float
    low: float
    high: float


def probed(estimates: "Mapping[str, Estimate]") -> list[Probed]:
    """Return the estimated parameters, then variants with one parameter at an end of its interval; all at least 0."""
    names = Probed.__dataclass_fields__
    central = Probed(**{name: max(estimates[name].value, 0.0) for name in names})
    uncertain = [name for name in names if estimates[name].standard_error]
    ends = [(name, end) for name in uncertain for end in estimates[name].interval]
    return [central, *(replace(central, **{name: max(end, 0.0)}) for name, end in ends)]


def relative_rounds(at: Probed, p: float, work: LocalWork, epsilon: float) -> float:
    """Return T(p) / T(0) to accuracy ``epsilon``."""
    return _iterations(at, p, work, epsilon) / _iterations(at, 0, work, epsilon)


def _iterations(at: Probed, p: float, work: LocalWork, epsilon: float) -> float:
    zeta_sq = lemma1.zeta_sq(p, at.zeta_sq)
    sigma_sq = lemma1.sigma_sq(p, at.sigma_sq, at.sigma_pool_sq, at.zeta_sq, at.delta_sq)
    smooth = lemma1.smoothness(p, at.L_max, at.L_pool)
    return rates.non_convex(epsilon, work.n_clients, work.tau, zeta_sq, sigma_sq / work.batch_size, smooth).total


def predict(probe: Sequence[Sequence[Probed]], shares: Iterable[float], work: LocalWork) -> list[Prediction]:
    """Return, for every share, the prediction at the probe's last model and its band; ``probe``: ``probed`` per model.

    Raises:
        UserError: at a model of the probe the gradient is zero, so no rounds can be saved.
    """
    if any(variants[0].gradient_sq <= 0 for variants in probe):
        raise UserError(
            "the probe found no gradient at one of its models: probe fewer rounds, or measure more samples."
        )
    models = [at for variants in probe for at in variants if at.gradient_sq > 0]
    predictions = []
    for p in shares:
        band = [relative_rounds(at, p, work, at.gradient_sq * factor) for at in models for factor in (1, 0.1)]
        last = probe[-1][0]
        predictions.append(Prediction(p, relative_rounds(last, p, work, last.gradient_sq), min(band), max(band)))
    return predictions
