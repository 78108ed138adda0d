"""The interface of everything that records a run."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Gets each round's metrics in order, then the summary. Of a resumed run W&B gets the earlier rounds again."""

    def log(self, round: int, metrics: Mapping[str, float | None]) -> None:
        """Record the metrics of one round; None: no value."""
        ...

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the record; ``summary`` is None if the run was stopped before its end."""
        ...
