"""The interface of trackers, which record the metrics of a run, and a wrapper of user-defined trackers."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol, TypeVar

from fedcommons.errors import ClientError, UserError, Warned, sentence, user_code_context

T = TypeVar("T")

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


class OwnTracker:
    """A user-defined tracker that is not called again after it raised an error.

    name: import path of the tracker. make: creates the tracker. say: called with one sentence if ``make`` or the
    tracker raises an error.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self.name, self.say, self.tracker = name, say, None
        self.tracker = self._done(make)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        if tracker := self.tracker:
            finite_metrics = {n: None if isinstance(v, float) and not isfinite(v) else v for n, v in metrics.items()}
            self._done(lambda: tracker.log(round, finite_metrics))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if tracker := self.tracker:
            self._done(lambda: tracker.finish(None if summary is None else dict(summary)))

    def _done(self, call: Callable[[], T]) -> T | None:
        try:
            with user_code_context(f"tracking.tracker {self.name}"):
                return call()
        except (UserError, ClientError) as error:
            self.tracker = None
            self.say(Warned(f"{sentence(error)}; the run goes on without this tracker."))
        return None
