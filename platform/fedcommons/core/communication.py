"""Bytes that cross the wire, counted from messages only.

All numbers are totals over clients: down and up in each round, and once for the exchange before the first round. For
Fedssyn with FedAvg and C = 1 the total is 2 N Ms + 2 R N Mc, with Ms the synthetic data of one client as uint8 images
and labels, Mc the model, R the rounds; the Fedssyn paper (arXiv:2306.13263, section 5) counts one client, so without N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean


@dataclass(frozen=True)
class Traffic:
    """Bytes, summed over clients.  ``lost``: those among ``down`` for which no reply came back."""

    down: int = 0
    up: int = 0
    once: int = 0
    lost: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.down + other.down, self.up + other.up, self.once + other.once, self.lost + other.lost)

    def metrics(self) -> dict[str, int]:
        """A round's bytes, by the names of their metrics."""
        return {"comm/down_bytes": self.down, "comm/up_bytes": self.up}

    @property
    def total(self) -> int:
        """Down, up and once together."""
        return self.down + self.up + self.once


def images_nbytes(n: int, shape: tuple[int, ...], itemsize: int = 1, label: int = 1) -> int:
    """Bytes of n examples of this shape; itemsize: of a number, 1 for uint8 images; label: of a label."""
    return n * (prod(shape) * itemsize + label)


def pool_nbytes(n_clients: int, synthetic: int) -> int:
    """Bytes of the shuffled pool:  2 N Ms.  Every client sends its images and receives as many of the pool."""
    return 2 * n_clients * synthetic


def round_nbytes(joined: int, model: int, control: int = 0) -> int:
    """Bytes of a round:  2 |S| (Mc + Mv).  |S| clients receive and send a model and a control variate."""
    return 2 * joined * (model + control)


@dataclass(frozen=True)
class UntilTarget:
    """What a run sends until it reaches the target accuracy, if every round costs the same."""

    once: float
    per_round: float
    rounds: float  # until the target, or all rounds if it was not reached
    censored: bool  # the target was not reached, so rounds and bytes are lower bounds


def sent(runs: Sequence[UntilTarget], once_unit: float = 1, round_unit: float = 1) -> tuple[float, bool]:
    """Mean over runs of  once/once_unit + R per_round/round_unit,  and whether it is a lower bound.

    For Fedssyn with FedAvg this is 2 N Ms + 2 R C N Mc over all clients; in the units N and C N it is the paper's
    2 Ms + 2 R Mc.
    """
    mean = fmean(r.once / once_unit + r.rounds * r.per_round / round_unit for r in runs)
    return mean, any(r.censored for r in runs)


def saved_percent(
    pool: Sequence[UntilTarget], vanilla: Sequence[UntilTarget], once_unit: float = 1, round_unit: float = 1
) -> str:
    """Traffic that the pool saves, in percent:  100 (1 - pool/vanilla).

    A bound (``>`` or ``<``) if one of them did not reach the target; ``-`` if neither did, or if there are no runs.
    """
    if not pool or not vanilla:
        return "-"
    (cost, high), (base, low) = (sent(runs, once_unit, round_unit) for runs in (pool, vanilla))
    sign = ">" if low else "<" if high else ""
    return "-" if low and high else f"{sign}{100 * (1 - cost / base):.1f}"
