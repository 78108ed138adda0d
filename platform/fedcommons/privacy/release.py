"""Releases: entries of the privacy ledger. A release states which data left a client and what protects the data.

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
"""The mechanism of Mironov et al. (2019): the sum of bounded vectors over a Poisson sample, plus Gaussian noise."""

SIGMAS = (1e-4, 1e6)
MOST_STEPS = 10**12
"""Smallest and largest noise multiplier sigma, and largest number of steps.

Beyond these limits, the accountant overflows or rounds the cost of a step to 0.
"""


@accepts_old_names(seen="n_disclosed", why="reason", of="with_names")
@dataclass(frozen=True)
class Release:
    """A release: data that left a client, and the privacy mechanism that protects them (default: none).

    A release is covered if its epsilon can be computed; else it is uncovered, that is, without a privacy guarantee.

    client: the client's number. A method omits the number in replies, because the engine sets the number.
    what: names of the tensors of a reply, or of data that a client shared.
    mechanism: ``SAMPLED_GAUSSIAN``, or None for no protection.
    n_disclosed: number of the client's examples that were disclosed, directly or by data computed from the examples.
        It is 0 for an update of the model, which every run sends.
    commons: True for data that clients share (a commons), such as all data sent before round 1; False for updates.
    reason: why the release has no privacy guarantee, for the ledger's report.
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
        """Return this release with ``what`` as the names of the tensors.

        The named tensors must be computed only from the protected result and the client's messages and memory.
        """
        return uncovered(what) if self is UNCOVERED else replace(self, what=what)

    @property
    def named(self) -> tuple[str, ...]:
        """Return the names of the data as the ledger records them: "NAME (reason)" if a reason or ``flaw`` exists."""
        reason = self.reason or self.flaw
        return tuple(f"{name} ({reason})" for name in self.what) if reason else self.what

    @property
    def covered(self) -> bool:
        """Return whether an epsilon can be computed: known mechanism, sigma > 0, finite sensitivity and no ``flaw``."""
        stated = self.mechanism == SAMPLED_GAUSSIAN and not self.flaw
        return stated and self.sigma > 0 and self.sensitivity < inf

    @property
    def flaw(self) -> str:
        """Return an error message for the first of q, sigma, sensitivity and steps that is out of range, or "".

        sigma = 0 (no noise) and sensitivity = inf are in range, but then the release has no privacy guarantee.
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
    """Return ``value`` if it is a real number; nan for other values, such as a bool or a tensor."""
    return value if isinstance(value, Real) and not isinstance(value, bool) else nan


UNCOVERED = Release()
"""A privacy ledger entry (release) that states no privacy mechanism and no names of data."""


@lru_cache(64)
def uncovered(what: tuple[str, ...], commons: bool = False) -> Release:
    """Return a release of the data ``what`` without a privacy guarantee; equal calls may return the same object."""
    return Release(what=what, commons=commons)
