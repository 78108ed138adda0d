"""A tracker of somebody's own beside the run folder: its failures are told, and stop neither the run nor its record."""

from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fedcommons.config import parts
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import taken
from fedcommons.config.flat import flat_dict
from fedcommons.errors import sentence
from fedcommons.tracking.tracker import Metric, Tracker


class OwnTracker:
    """The tracker that ``tracking.tracker`` names, made with what it asks for of ``folder`` and ``config``.

    folder: that of the run. config: dotted names to values. ``say`` is told in one sentence what the tracker raises;
    after that nothing more is told to it.
    """

    def __init__(self, folder: Path, config: Experiment, say: Callable[[str], None]) -> None:
        self.name, self.say, self.tracker = str(config.tracking.tracker), say, None
        try:
            self.tracker = _made(folder, config)
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


def _made(folder: Path, config: Experiment) -> Tracker:
    part = parts.find("tracker", str(config.tracking.tracker))
    offered = {"folder": folder, "config": flat_dict(config)}
    return part(**taken(part, offered), **config.tracking.constants)
