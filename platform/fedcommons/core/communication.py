"""Communication cost in bytes, counted from messages only.

All numbers are totals over clients: down and up in each round, and once for the exchange before the first round. For
Fedssyn with FedAvg and C = 1 the total is 2 N Ms + 2 R N Mc. Ms: bytes of one client's synthetic data as uint8 images
and labels;  Mc: bytes of the model;  R: rounds;  N: clients. The Fedssyn paper (arXiv:2306.13263, section 5) counts one
client, so its formula has no N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean


@dataclass(frozen=True)
class Traffic:
    """Bytes, summed over clients.  ``lost``: bytes in ``down`` that were sent to clients without a reply."""

    down: int = 0
    up: int = 0
    once: int = 0
    lost: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.down + other.down, self.up + other.up, self.once + other.once, self.lost + other.lost)

    def metrics(self) -> dict[str, int]:
        """Return a round's bytes by metric name."""
        return {"comm/down_bytes": self.down, "comm/up_bytes": self.up}

    @property
    def total(self) -> int:
        """Sum of down, up and once."""
        return self.down + self.up + self.once


def images_nbytes(n: int, shape: tuple[int, ...], itemsize: int = 1, label: int = 1) -> int:
    """Return the bytes of n examples. itemsize: bytes per number, 1 for uint8 images. label: bytes per label."""
    return n * (prod(shape) * itemsize + label)


def pool_nbytes(n_clients: int, synthetic: int) -> int:
    """Return the bytes of the shuffled pool:  2 N Ms.  Every client sends Ms bytes of images and receives Ms bytes."""
    return 2 * n_clients * synthetic


def round_nbytes(joined: int, model: int, control: int = 0) -> int:
    """Return the bytes of a round:  2 |S| (Mc + Mv).  |S| clients receive and send a model and a control variate."""
    return 2 * joined * (model + control)


@dataclass(frozen=True)
class UntilTarget:
    """Traffic of a run until it reaches the target accuracy, if every round costs the same."""

    once: float
    per_round: float
    rounds: float  # until the target, or all rounds if it was not reached
    censored: bool  # the target was not reached, so rounds and bytes are lower bounds


def sent(runs: Sequence[UntilTarget], once_unit: float = 1, round_unit: float = 1) -> tuple[float, bool]:
    """Return the mean over runs of  once/once_unit + R per_round/round_unit,  and whether it is a lower bound.

    For Fedssyn with FedAvg this is 2 N Ms + 2 R C N Mc over all clients; in the units N and C N it is the paper's
    2 Ms + 2 R Mc.
    """
    mean = fmean(r.once / once_unit + r.rounds * r.per_round / round_unit for r in runs)
    return mean, any(r.censored for r in runs)


def saved_percent(
    pool: Sequence[UntilTarget], vanilla: Sequence[UntilTarget], once_unit: float = 1, round_unit: float = 1
) -> str:
    """Return the traffic that the pool of synthetic images saves, in percent:  100 (1 - pool/vanilla).

    The result is a bound (``>`` or ``<``) if only ``pool`` or only ``vanilla`` missed the target accuracy. The result
    is ``-`` if both missed the target, or if there are no runs.
    """
    if not pool or not vanilla:
        return "-"
    (cost, is_bound), (base, is_base_bound) = (sent(runs, once_unit, round_unit) for runs in (pool, vanilla))
    sign = ">" if is_base_bound else "<" if is_bound else ""
    return "-" if is_base_bound and is_bound else f"{sign}{100 * (1 - cost / base):.1f}"
