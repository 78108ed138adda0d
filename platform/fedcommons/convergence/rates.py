"""Corollary I of Fedssyn: how many iterations FedAvg needs, T = R tau, up to constants.

epsilon  accuracy: of ||grad f||^2 on average over iterations (non-convex), of f - f* (strongly convex)
N, tau   clients, all of which take part in every round; local steps in a round
zeta, s  gradient dissimilarity and standard deviation of a step's gradient (a batch of B samples has sigma^2 / B)
L, mu    smoothness and strong convexity

                    noise               drift                                              descent
strongly convex  s^2 / (mu N epsilon) + sqrt(L / epsilon) (tau zeta + sqrt(tau) s) / mu + (L tau / mu) log(1/epsilon)
non-convex       L s^2 / (N epsilon^2) + L (tau zeta + sqrt(tau) s) / epsilon^(3/2)     + L tau / epsilon

Both are upper bounds, with the step size that is best for this epsilon.
Source: Fedssyn (Li et al., TMLR 2024), corollary I, after Koloskova et al., ICML 2020, arXiv:2003.10422.
"""

from dataclasses import dataclass
from math import log, sqrt


@dataclass(frozen=True)
class Iterations:
    """T, up to a constant: the iterations for noise, for drift between averages and for plain descent."""

    noise: float
    drift: float
    descent: float

    @property
    def total(self) -> float:
        """T."""
        return self.noise + self.drift + self.descent


def non_convex(epsilon: float, n: int, tau: float, zeta_sq: float, step_sq: float, smooth: float) -> Iterations:
    """T for any smooth f; ``step_sq``: s^2, ``smooth``: L."""
    drift = tau * sqrt(zeta_sq) + sqrt(tau * step_sq)
    return Iterations(smooth * step_sq / (n * epsilon**2), smooth * drift / epsilon**1.5, smooth * tau / epsilon)


def strongly_convex(
    epsilon: float, n: int, tau: float, zeta_sq: float, step_sq: float, smooth: float, mu: float
) -> Iterations:
    """T for a mu-strongly convex f; ``step_sq``: s^2, ``smooth``: L.

    Raises:
        ValueError: epsilon is not in (0, 1); for larger values the bound is empty.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must lie in (0, 1), got {epsilon:g}")
    drift = tau * sqrt(zeta_sq) + sqrt(tau * step_sq)
    return Iterations(
        step_sq / (mu * n * epsilon), sqrt(smooth / epsilon) * drift / mu, smooth * tau / mu * log(1 / epsilon)
    )
