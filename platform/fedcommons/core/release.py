"""What leaves a client, as events. Whoever makes an event states what protects it; without that it is uncovered.

q: sampling rate;  sigma: noise multiplier, the noise's standard deviation over the sensitivity;  sensitivity: largest
change, in L2 norm, that one example makes to the value before noise;  steps: how often the mechanism ran.
"""

from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from math import inf

SAMPLED_GAUSSIAN = "sampled gaussian"
"""The mechanism of Mironov et al. (2019): a Poisson sample with rate q, a sum of bounded norm, Gaussian noise."""


@dataclass(frozen=True)
class Release:
    """Something that left a client, and what protects it; by default nothing.

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
        return tuple(f"{name} ({self.why})" for name in self.what) if self.why else self.what

    @property
    def covered(self) -> bool:
        """Whether an epsilon can be computed: the mechanism is known, has noise, and its sensitivity is bounded."""
        is_gaussian = self.mechanism == SAMPLED_GAUSSIAN and 0 < self.q <= 1 and self.steps >= 0
        return is_gaussian and 0 < self.sigma < inf and 0 < self.sensitivity < inf


UNCOVERED = Release()
"""Nothing protects it."""


@lru_cache(64)
def uncovered(what: tuple[str, ...], commons: bool = False) -> Release:
    """Nothing protects these names, and no examples were given away: then only names are counted, not clients.

    The same object for all clients, as most events of a round are this one.
    """
    return Release(what=what, commons=commons)
