"""A wrapper of a user-defined tracker, whose failures are reported but do not stop the run."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar

from fedcommons.errors import ClientError, UserError, Warned, sentence, user_code_context
from fedcommons.tracking.tracker import Metric, Tracker

T = TypeVar("T")


class OwnTracker:
    """A user-defined tracker that is not called again after it raised an error.

    name: import path of the tracker. make: creates the tracker. say: called with one sentence if ``make`` or the
    tracker raises an error.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self.name, self.say, self.tracker = name, say, None
        self.tracker = self._done(make)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """Call the tracker's ``log`` (see ``Tracker``); values that are not finite become None."""
        if tracker := self.tracker:
            finite_metrics = {n: None if isinstance(v, float) and not isfinite(v) else v for n, v in metrics.items()}
            self._done(lambda: tracker.log(round, finite_metrics))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Call the tracker's ``finish`` with a copy of the summary (see ``Tracker``)."""
        if tracker := self.tracker:
            self._done(lambda: tracker.finish(None if summary is None else dict(summary)))

    def _done(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call of user code; None if the call fails."""
        try:
            with user_code_context(f"tracking.tracker {self.name}"):
                return call()
        except (UserError, ClientError) as error:
            self.tracker = None
            self.say(Warned(f"{sentence(error)}; the run goes on without this tracker."))
        return None
