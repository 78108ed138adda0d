"""A tracker of somebody's own beside the run folder: its failures are told, and stop neither the run nor its record."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from fedcommons.errors import sentence
from fedcommons.tracking.tracker import Metric, Tracker


class OwnTracker:
    """The tracker ``name`` that ``make`` gives.

    ``say`` is told in one sentence what it raises, also while it is made; after that nothing more is told to it.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        self.name, self.say, self.tracker = name, say, None
        try:
            self.tracker = make()
        except Exception as error:  # whatever somebody's tracker raises, here and below
            self._give_up(error)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """See ``Tracker``; values that are not finite are None, as in the run folder."""
        if self.tracker is None:
            return
        try:
            known = {n: None if isinstance(v, float) and not isfinite(v) else v for n, v in metrics.items()}
            self.tracker.log(round, known)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        if self.tracker is None:
            return
        try:
            self.tracker.finish(None if summary is None else dict(summary))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.tracker = None
        self.say(f"tracking.tracker {self.name}: {sentence(error)}; the run goes on without it.")
