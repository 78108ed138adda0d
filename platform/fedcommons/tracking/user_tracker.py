"""A tracker of somebody's own beside the run folder: its failures are told, and stop neither the run nor its record."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeVar

from fedcommons.errors import ClientError, UserError, Warned, sentence, user_code_context
from fedcommons.tracking.tracker import Metric, Tracker

T = TypeVar("T")


class OwnTracker:
    """The tracker ``name`` that ``make`` gives.

    ``say`` is told in one sentence what it raises, also while it is made; after that nothing more is told to it.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self.name, self.say, self.tracker = name, say, None
        self.tracker = self._done(make)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """See ``Tracker``; values that are not finite are None, as in the run folder."""
        if tracker := self.tracker:
            known = {n: None if isinstance(v, float) and not isfinite(v) else v for n, v in metrics.items()}
            self._done(lambda: tracker.log(round, known))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        if tracker := self.tracker:
            self._done(lambda: tracker.finish(None if summary is None else dict(summary)))

    def _done(self, call: Callable[[], T]) -> T | None:
        """What a call of somebody's gives; None where it fails."""
        try:
            with user_code_context(f"tracking.tracker {self.name}"):
                return call()
        except (UserError, ClientError) as error:
            self.tracker = None
            self.say(Warned(f"{sentence(error)}; the run goes on without it."))
        return None
