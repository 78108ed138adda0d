"""The interface of trackers, which record the metrics of a run, and a wrapper that survives their errors."""

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol, TypeVar

from fedcommons.errors import ClientError, UserError, Warned, sentence, user_code_context

T = TypeVar("T")

Metric = float | Sequence[int] | None
"""The value of a metric: a number, a list of client numbers, or None if there is no value."""

Prepare = Callable[[Mapping[str, Metric]], Mapping[str, Metric]]


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


def without_texts(metrics: Mapping[str, Metric | str]) -> dict[str, Metric]:
    """Return the metrics without hashes, which are recorded in the run folder only."""
    return {name: value for name, value in metrics.items() if not isinstance(value, str)}


def finite(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with None for values that are not finite."""
    return {name: None if isinstance(v, float) and not isfinite(v) else v for name, v in metrics.items()}


class GuardedTracker:
    """A tracker that is not called again after it raised an error.

    label: the tracker in messages. make: creates the tracker. say: called with one sentence if ``make`` or the tracker
    raises an error. prepare: returns a round's metrics as the tracker gets them.
    """

    def __init__(
        self, label: str, make: Callable[[], Tracker], say: Callable[[str], None], prepare: Prepare = finite
    ) -> None:
        self.label, self.say, self.prepare, self.tracker = label, say, prepare, None
        self.tracker = self._done(make)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        if tracker := self.tracker:
            self._done(lambda: tracker.log(round, self.prepare(metrics)))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if tracker := self.tracker:
            self._done(lambda: tracker.finish(None if summary is None else dict(summary)))

    def _done(self, call: Callable[[], T]) -> T | None:
        try:
            with user_code_context(self.label):
                return call()
        except (UserError, ClientError) as error:
            self.tracker = None
            self.say(Warned(f"{sentence(error)}; the run goes on without this tracker."))
        return None
