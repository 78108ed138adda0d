"""Advice from the table's rows: the Pareto front of accuracy and a cost, and the best methods under each of ``LIMITS``.

All functions take plain numbers. Two methods differ significantly where Student's 95 % interval of their accuracy
difference, paired by seed, excludes 0; with one seed no difference is significant.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedcommons.reports.intervals import student

ROUNDING = 1e-9
"""Width up to which an interval counts as 0 wide: rounding makes equal differences unequal by at most this much."""

FEW_COPIES = 0.05
"""Largest share of near-copies at which a pool counts as free of raw copies of training images."""


@dataclass(frozen=True)
class Row:
    """The results of a way (a method with a sharing strategy) for one partition of the data.

    best: test accuracy by seed, in [0, 1], in the round of the best validation accuracy. mb: 10^6 bytes that all
    clients send and receive; pool_mb: 10^6 bytes before round 1. rounds: number of rounds in which clients took part.
    disclosed: share of all examples that was disclosed without an epsilon. raw: share that was sent unchanged.
    near_copies: share of near-copies of training images among the images that clients send. epsilon: privacy guarantee
    of the shared data, if the noise were secret, or None. bound: the way is an upper bound, for comparison only.
    """

    way: str
    best: Mapping[int, float]
    mb: float
    pool_mb: float
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
    """Return the indices of the Pareto front of points (cost, accuracy), in the order of cost."""
    beaten = [
        any(c <= cost and a >= accuracy and (c, a) != (cost, accuracy) for c, a in points) for cost, accuracy in points
    ]
    return sorted((i for i, is_beaten in enumerate(beaten) if not is_beaten), key=lambda i: points[i])


def is_ahead(first: Row, second: Row) -> bool:
    """Return whether ``first`` is significantly more accurate than ``second`` on the seeds that both have.

    If the accuracy differences are equal in all seeds, their interval has width 0 and the result is False: on a finite
    test set, a few seeds can have equal differences by chance.
    """
    interval = student([first.best[seed] - second.best[seed] for seed in first.best if seed in second.best])
    return interval is not None and interval[0] > 0 and interval[1] - interval[0] > ROUNDING


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
"""Limits on disclosure or rounds, in words; each has a function that returns whether a row satisfies the limit."""


@dataclass(frozen=True)
class Advice:
    """The advised row (``best``), which satisfies ``limit``.

    alike: rows within the limit that need at most the bytes of ``best`` and are not significantly worse.
    """

    limit: str
    best: Row
    alike: tuple[Row, ...]


def guide(rows: Sequence[Row]) -> list[Advice]:
    """Return for each limit the row with the fewest bytes, then each row that is better than the last returned row.

    A row is better if it is significantly more accurate and needs more bytes. With one seed no difference is
    significant, so the most accurate row is returned instead. Upper bounds are excluded.
    """
    advice = []
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
            advice.append(Advice(limit, best, tuple(row for row in affordable if not is_ahead(best, row))))
            last = best
    return advice


def in_words(advice: Advice) -> str:
    """Return the advice as text: the bytes, the limit, the best row, and the rows that are not significantly worse."""
    message = f"If you may send {advice.best.mb:.3g} MB in all and {advice.limit}: {named(advice.best)}."
    if not advice.alike:
        return message
    return f"{message} Not significantly different: {'; '.join(named(row) for row in advice.alike)}."


def named(row: Row) -> str:
    """Return a row's method with its accuracy in percent and its bytes in MB, as text."""
    return f"{row.way} ({100 * row.accuracy:.1f} %, {row.mb:.3g} MB)"
