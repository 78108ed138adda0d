"""Releases: records of data that leave a client. The code that creates a release states its protection (default: none).

q: sampling rate;  sigma: noise multiplier, the noise's standard deviation over the sensitivity;  sensitivity: largest
change, in L2 norm, that one example makes to the value before noise;  steps: how often the mechanism ran.
"""

from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from math import inf, nan
from numbers import Integral, Real
from typing import Any

from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import quote

SAMPLED_GAUSSIAN = "sampled gaussian"
"""The mechanism of Mironov et al. (2019): a Poisson sample with rate q, a sum of bounded norm, Gaussian noise."""

SIGMAS = (1e-4, 1e6)
MOST_STEPS = 10**12
"""The accountant's limits: outside of them it overflows, or rounds the cost of a step to zero."""


@accepts_old_names(seen="n_disclosed", why="reason", of="with_names")
@dataclass(frozen=True)
class Release:
    """A release: data that left a client, and their protection. Default: no protection; nor if a number has a ``flaw``.

    client: the client's number. A method omits it: the engine fills it in, unless the ledger counts only names
        (``uncovered``).
    what: names of the tensors of a reply, or of a client's contributions to a commons.
    mechanism: ``SAMPLED_GAUSSIAN``, or None for no protection.
    seen: number of the client's examples that were disclosed, directly or by data computed from the examples. It is 0
        for an update of the model, which every run sends.
    commons: True for contributions to a commons, such as all data that clients send before round 1; False for updates.
    why: the reason why a release with some protection is uncovered; the ledger reports it.
    """

    client: int = -1
    what: tuple[str, ...] = ()
    _: KW_ONLY
    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0
    n_disclosed: int = 0
    commons: bool = False
    reason: str = ""

    def with_names(self, *what: str) -> "Release":
        """Return this release with other names, which must be computed from its result, messages and memory only."""
        return uncovered(what) if self is UNCOVERED else replace(self, what=what)

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names as the ledger records them, with the reason why the release is uncovered."""
        reason = self.reason or self.flaw
        return tuple(f"{name} ({reason})" for name in self.what) if reason else self.what

    @property
    def covered(self) -> bool:
        """Return whether an epsilon can be computed: the mechanism is known, has noise and a bound, and no ``flaw``."""
        stated = self.mechanism == SAMPLED_GAUSSIAN and not self.flaw
        return stated and self.sigma > 0 and self.sensitivity < inf

    @property
    def flaw(self) -> str:
        """Return a message about the first number of the mechanism that is impossible; empty if there is none.

        No noise (sigma 0) and no bound (sensitivity inf) are possible numbers: such a release is uncovered.
        """
        if self.mechanism != SAMPLED_GAUSSIAN:
            return ""
        q, sigma, bound, steps = (_number(x) for x in (self.q, self.sigma, self.sensitivity, self.steps))
        least, most = SIGMAS
        if not 0 < q <= 1:
            return f"its q must be in (0, 1], got {quote(self.q)}"
        if not (sigma == 0 or least <= sigma <= most):
            return f"its sigma must be 0 or in [{least:g}, {most:g}], got {quote(self.sigma)}"
        if not bound > 0:
            return f"its sensitivity must be above 0, got {quote(self.sensitivity)}"
        if not (0 < steps <= MOST_STEPS and isinstance(steps, Integral)):
            return f"its steps must be a whole number in [1, {MOST_STEPS:g}], got {quote(self.steps)}"
        return ""


def _number(value: Any) -> Any:
    """Return a real number unchanged, and nan for other values, such as a bool or a tensor."""
    return value if isinstance(value, Real) and not isinstance(value, bool) else nan


UNCOVERED = Release()
"""A release without protection."""


@lru_cache(64)
def uncovered(what: tuple[str, ...], commons: bool = False) -> Release:
    """Return a release of these names without protection and without disclosed examples.

    The ledger counts only its names, not clients. All clients share one object, because most releases of a round
    are this release.
    """
    return Release(what=what, commons=commons)
