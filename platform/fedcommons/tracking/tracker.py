"""The interface of trackers, which record the metrics of a run, and a wrapper that survives their errors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedcommons.config import registry
from fedcommons.config.fields import select_arguments
from fedcommons.errors import ClientError, UserError, Warned, sentence, user_code_context
from fedcommons.tracking import record_schema

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


def for_trackers(line: Mapping[str, Metric | str], seconds: Mapping[str, float]) -> dict[str, Metric]:
    """Return the metrics of a round as trackers get them, without the texts and lists that only the run folder has.

    line: the round's line of rounds.jsonl. seconds: its line of timing.jsonl; names get the prefix ``seconds/``.
    """
    left_out = ("round", "participants", "rejected_clients")
    metrics: dict[str, Metric] = {
        name: v for name, v in line.items() if not isinstance(v, str) and name not in left_out
    }
    return metrics | {f"seconds/{name}": v for name, v in seconds.items() if name != "round"}


def finite(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics with None for values that are not finite."""
    return {name: None if isinstance(v, float) and not isfinite(v) else v for name, v in metrics.items()}


def replayed(folder: Path) -> Iterator[tuple[int, dict[str, Metric]]]:
    """Yield (round, metrics as trackers get them) of the rounds that the run folder records."""
    seconds = {line["round"]: line for line in record_schema.lines(folder / "timing.jsonl")[0]}
    for line in record_schema.lines(folder / "rounds.jsonl")[0]:
        yield line["round"], for_trackers(line, seconds.get(line["round"], {}))


def build_tracker(name: str, constants: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> Tracker:
    """Create the tracker ``name`` for the run in ``folder``. config: dotted name -> value."""
    part = registry.find("tracker", name)
    arguments = select_arguments(part, {"folder": folder, "config": config})
    return registry.build_part("tracker", name, partial(part, **arguments, **constants))


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
