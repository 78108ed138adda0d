"""What follows from the rows: who is on the front of accuracy against a cost, and which way to choose under what limit.

Everything here is a function of plain numbers. Two ways are told apart where Student's 95 % interval of the difference
of their accuracies, seed by seed, excludes 0; of one seed nothing is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedcommons.reports.intervals import student

ROUNDING = 1e-9
"""A wider interval is not of equal gaps alone."""

FEW_COPIES = 0.05
"""A pool with a larger share of near-copies gives images away as raw copies do."""


@dataclass(frozen=True)
class Row:
    """A way in one federation. best: test accuracy by seed, in [0, 1], in the round of the best validation accuracy.

    mb: all bytes of all clients, both ways, in 10^6; once: those before round 1; rounds: in which clients took part.
    disclosed: share of all examples that was given away uncovered, raw: as it is; near_copies: share of the images that
    left clients which all but repeat a training image; epsilon: of the commons, were its noise secret; None: none.
    bound: it is there to compare with.
    """

    way: str
    best: Mapping[int, float]
    mb: float
    once: float
    rounds: float
    disclosed: float
    raw: float
    near_copies: float = 0.0
    epsilon: float | None = None
    bound: bool = False

    @property
    def accuracy(self) -> float:
        return fmean(self.best.values())


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points (cost, accuracy) that no other one beats: none has a lower cost without being worse, or the reverse.

    In the order of their cost. Equal points are on it together.
    """
    beaten = [
        any(c <= cost and a >= accuracy and (c, a) != (cost, accuracy) for c, a in points) for cost, accuracy in points
    ]
    return sorted((i for i, is_beaten in enumerate(beaten) if not is_beaten), key=lambda i: points[i])


def is_ahead(one: Row, other: Row) -> bool:
    """Whether ``one`` is more accurate than ``other`` beyond what their common seeds leave open.

    Gaps that are equal in all seeds have an interval of no width, which tells nothing: few seeds of a finite test set
    agree by chance.
    """
    found = student([one.best[seed] - other.best[seed] for seed in one.best if seed in other.best])
    return found is not None and found[0] > 0 and found[1] - found[0] > ROUNDING


LIMITS: Mapping[str, Callable[[Row], bool]] = {
    "disclose whatever helps": lambda row: True,
    f"disclose nothing raw, nor more than {100 * FEW_COPIES:g} % near-copies": lambda row: (
        row.raw == 0 and row.near_copies <= FEW_COPIES
    ),
    "put nothing into a commons that no epsilon covers": lambda row: row.disclosed == 0,
    "have clients in one round at most": lambda row: row.rounds <= 1,
    "have clients in one round at most and disclose nothing that no epsilon covers": lambda row: (
        row.rounds <= 1 and row.disclosed == 0 and row.epsilon is not None
    ),
}
"""What somebody may be bound to, and the rows that keep to it."""


@dataclass(frozen=True)
class Advice:
    """Under a limit and with ``mb`` to send: the best way, and those that cannot be told from it."""

    limit: str
    mb: float
    best: Row
    alike: tuple[Row, ...]


def guide(rows: Sequence[Row]) -> list[Advice]:
    """For each limit the best way for the least bytes, then each that is told to be better for more.

    Bounds are left out. ``alike``: what keeps to the limit, needs no more bytes and is not told to be worse. Of one
    seed nothing is told apart: the most accurate way stands alone, beside all others.
    """
    found = []
    for limit, keeps in LIMITS.items():
        allowed = [row for row in rows if keeps(row) and not row.bound]
        by_cost = sorted(allowed, key=lambda row: (row.mb, -row.accuracy))
        best_of_all = [max(allowed, key=lambda row: (row.accuracy, -row.mb))] if allowed else []
        several = any(len(row.best) > 1 for row in allowed)
        last: Row | None = None
        for best in by_cost if several else best_of_all:
            if last is not None and not is_ahead(best, last):
                continue
            affordable = [row for row in allowed if row.mb <= best.mb and row is not best]
            found.append(Advice(limit, best.mb, best, tuple(row for row in affordable if not is_ahead(best, row))))
            last = best
    return found


def in_words(advice: Advice) -> str:
    """A line of the guide."""
    said = f"If you may send {advice.mb:.3g} MB in all and {advice.limit}: {named(advice.best)}."
    if not advice.alike:
        return said
    return f"{said} Cannot be told apart from it: {'; '.join(named(row) for row in advice.alike)}."


def named(row: Row) -> str:
    """A way with the numbers that support it."""
    return f"{row.way} ({100 * row.accuracy:.1f} %, {row.mb:.3g} MB)"
