"""The interface of everything that records a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Metric = float | Sequence[int] | None
"""A number, numbers of clients, or no value."""


class Tracker(Protocol):
    """Gets each round's metrics in order, then the summary. A resumed run tells it the earlier rounds again.

    A tracker of somebody's own is a class, or a function that makes one. It gets what it asks for of ``folder``, that
    of the run, and ``config``, dotted names to values. What it raises is told in one sentence, and the run goes on
    without it.
    """

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of one round."""
        ...

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the record; ``summary`` is None if the run was stopped before its end."""
        ...


def numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Those metrics that are numbers: lists of clients stay in the run folder."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
