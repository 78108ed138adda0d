"""What leaves a client, as events. Whoever makes an event states what protects it; without that it is uncovered.

q: sampling rate;  sigma: noise multiplier, the noise's standard deviation over the sensitivity;  sensitivity: largest
change, in L2 norm, that one example makes to the value before noise;  steps: how often the mechanism ran.
"""

from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from math import inf, nan
from numbers import Integral, Real
from typing import Any

from fedcommons.errors import shown

SAMPLED_GAUSSIAN = "sampled gaussian"
"""The mechanism of Mironov et al. (2019): a Poisson sample with rate q, a sum of bounded norm, Gaussian noise."""

SIGMAS = (1e-4, 1e6)
MOST_STEPS = 10**12
"""What the accountant can take: outside of these it overflows, or rounds the cost of a step to nothing."""


@dataclass(frozen=True)
class Release:
    """Something that left a client, and what protects it: by default nothing, nor where a number has a ``flaw``.

    client: the client's number. A method leaves it out: the engine fills it in, unless only names are counted
        (``uncovered``).
    what: names of the tensors of a reply, or of what a client contributes to a commons.
    mechanism: ``SAMPLED_GAUSSIAN``, or None for no protection.
    seen: how many of the client's examples were given away, as they are or in what was made from them. It is 0 for an
        update of the model, which every run sends.
    commons: True for what clients put into a commons, as all that leaves them before round 1; False for updates.
    why: the reason why an uncovered release is not covered although something was done to protect it; the ledger
        says it.
    """

    client: int = -1
    what: tuple[str, ...] = ()
    _: KW_ONLY
    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0
    seen: int = 0
    commons: bool = False
    why: str = ""

    def of(self, *what: str) -> "Release":
        """The same event for these names, which must be made from its result, messages and memory only."""
        return uncovered(what) if self is UNCOVERED else replace(self, what=what)

    @property
    def named(self) -> tuple[str, ...]:
        """The names as the ledger has them."""
        why = self.why or self.flaw
        return tuple(f"{name} ({why})" for name in self.what) if why else self.what

    @property
    def covered(self) -> bool:
        """Whether an epsilon can be computed: the mechanism is known, has noise and a bound, and no ``flaw``."""
        stated = self.mechanism == SAMPLED_GAUSSIAN and not self.flaw
        return stated and self.sigma > 0 and self.sensitivity < inf

    @property
    def flaw(self) -> str:
        """The first of a stated mechanism's numbers that cannot be true; empty if there is none.

        No noise (sigma 0) and no bound (sensitivity inf) are statements, and true: such a release is uncovered.
        """
        if self.mechanism != SAMPLED_GAUSSIAN:
            return ""
        q, sigma, bound, steps = (_number(x) for x in (self.q, self.sigma, self.sensitivity, self.steps))
        least, most = SIGMAS
        if not 0 < q <= 1:
            return f"its q must be in (0, 1], got {shown(self.q)}"
        if not (sigma == 0 or least <= sigma <= most):
            return f"its sigma must be 0 or in [{least:g}, {most:g}], got {shown(self.sigma)}"
        if not bound > 0:
            return f"its sensitivity must be above 0, got {shown(self.sensitivity)}"
        if not (0 < steps <= MOST_STEPS and isinstance(steps, Integral)):
            return f"its steps must be a whole number in [1, {MOST_STEPS:g}], got {shown(self.steps)}"
        return ""


def _number(value: Any) -> Any:
    """One real number as it is, else nan: neither a bool nor a tensor is one."""
    return value if isinstance(value, Real) and not isinstance(value, bool) else nan


UNCOVERED = Release()
"""Nothing protects it."""


@lru_cache(64)
def uncovered(what: tuple[str, ...], commons: bool = False) -> Release:
    """Nothing protects these names, and no examples were given away: then only names are counted, not clients.

    The same object for all clients, as most events of a round are this one.
    """
    return Release(what=what, commons=commons)
