"""Communication cost in bytes, counted from messages only.

All numbers are sums over clients: ``down`` (server to clients) and ``up`` (clients to server) in the rounds, and
``once`` for the exchange before round 1. For Fedssyn with FedAvg the total is  2 N Ms + 2 R C N Mc.  N: number of
clients;  Ms: bytes of one client's synthetic images (uint8) and labels;  R: number of rounds;  C: share of clients that
take part in a round;  Mc: bytes of the model. The Fedssyn paper (arXiv:2306.13263, section 5) counts the bytes of one
client, so the paper's formula has no N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import fmean


@dataclass(frozen=True)
class Traffic:
    """Numbers of bytes, summed over clients.

    down: server to clients. up: clients to server. once: exchange before round 1. lost: bytes in ``down`` that were
    sent to clients whose reply did not arrive.
    """

    down: int = 0
    up: int = 0
    once: int = 0
    lost: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.down + other.down, self.up + other.up, self.once + other.once, self.lost + other.lost)

    def metrics(self) -> dict[str, int]:
        """Return the numbers of bytes ``down`` and ``up`` of a round, by metric name."""
        return {"comm/down_bytes": self.down, "comm/up_bytes": self.up}

    @property
    def total(self) -> int:
        """Sum of the bytes ``down``, ``up`` and ``once``."""
        return self.down + self.up + self.once


def images_nbytes(n: int, shape: tuple[int, ...], itemsize: int = 1, label: int = 1) -> int:
    """Return the number of bytes of n examples of this shape. itemsize: bytes per pixel. label: bytes per label."""
    return n * (prod(shape) * itemsize + label)


@dataclass(frozen=True)
class UntilTarget:
    """Bytes that a run sends until it reaches the target accuracy, if every round sends the same number of bytes."""

    once: float
    per_round: float
    rounds: float  # number of rounds until the target accuracy; number of all rounds if the run missed the target
    censored: bool  # whether the run missed the target, so that rounds and bytes are lower bounds


def sent(runs: Sequence[UntilTarget], once_unit: float = 1, round_unit: float = 1) -> tuple[float, bool]:
    """Return the mean over runs of  once/once_unit + R per_round/round_unit,  and whether the mean is a lower bound.

    once, per_round: a run's bytes before round 1 and bytes per round, over all clients. R: number of rounds until the
    target accuracy. If both units are 1, the mean is the bytes of all N clients. With ``once_unit`` N and
    ``round_unit`` C N (C: share of clients per round), the mean is the bytes of one client, as in the Fedssyn paper.
    """
    mean = fmean(r.once / once_unit + r.rounds * r.per_round / round_unit for r in runs)
    return mean, any(r.censored for r in runs)


def saved_percent(
    pool: Sequence[UntilTarget], vanilla: Sequence[UntilTarget], once_unit: float = 1, round_unit: float = 1
) -> str:
    """Return the traffic that the pool of synthetic images saves, in percent, as text:  100 (1 - b_pool/b_vanilla).

    pool, vanilla: runs with and without the pool. b_pool, b_vanilla: mean numbers of bytes of these runs (``sent``).
    The text begins with ``<`` if a run in ``pool`` missed the target accuracy, and with ``>`` if a run in ``vanilla``
    missed it. The text is ``-`` if runs in both missed it, or if ``pool`` or ``vanilla`` is empty.
    """
    if not pool or not vanilla:
        return "-"
    (cost, is_bound), (base, is_base_bound) = (sent(runs, once_unit, round_unit) for runs in (pool, vanilla))
    sign = ">" if is_base_bound else "<" if is_bound else ""
    return "-" if is_base_bound and is_bound else f"{sign}{100 * (1 - cost / base):.1f}"
