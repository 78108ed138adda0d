"""What leaves a client, as events: who made it says what protects it, and what nobody declares is uncovered.

q: sampling rate;  sigma: noise multiplier, the noise's standard deviation over the sensitivity;  sensitivity: how far
one example moves what is noised, in L2 norm;  steps: how often the mechanism ran.
"""

from dataclasses import dataclass
from math import inf, isfinite

SAMPLED_GAUSSIAN = "sampled gaussian"
"""The mechanism that Mironov et al. (2019) bound: a Poisson sample with rate q, a sum of bounded norm, normal noise."""


@dataclass(frozen=True)
class Release:
    """Something that left a client, and what protects it; by itself nothing does.

    client: whose; of a reply's the engine says it. what: names of a reply's tensors, or of what a client contributes
    to a commons. mechanism: ``SAMPLED_GAUSSIAN``, or None: nothing.
    """

    client: int = -1
    what: tuple[str, ...] = ()
    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0

    def of(self, *what: str) -> "Release":
        """The same event for these names: made from its result, from messages and memory, and from nothing else."""
        return Release(self.client, what, self.mechanism, self.q, self.sigma, self.sensitivity, self.steps)

    @property
    def covered(self) -> bool:
        """Whether an epsilon can be stated of it: it has a mechanism we can account for, with noise and a bound."""
        known = self.mechanism == SAMPLED_GAUSSIAN and 0 < self.q <= 1 and self.steps >= 0
        return known and isfinite(self.sigma) and self.sigma > 0 and isfinite(self.sensitivity) and self.sensitivity > 0
