"""The interface of trackers, which record the metrics of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Metric = float | Sequence[int] | None
"""The value of a metric: a number, a list of client numbers, or None if there is no value."""


class Tracker(Protocol):
    """The interface of a tracker, which records the metrics of each round in order, then the summary.

    A resumed run logs its earlier rounds again.

    A user-defined tracker is a class, or a function that returns a tracker. It may have the parameters ``folder`` (the
    run folder) and ``config`` (dotted name -> value). If the tracker raises an error, the error is reported in one
    sentence, and the run continues without the tracker.
    """

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics (name -> value) of one round; round 0 is the untrained model."""
        ...

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the record. summary: content of summary.json; None if the run stopped before its end."""
        ...


def numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the metrics whose values are numbers. Lists of clients are recorded in the run folder only."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
