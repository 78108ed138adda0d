"""The interface of everything that records a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Metric = float | Sequence[int] | None
"""A number, numbers of clients, or no value."""


class Tracker(Protocol):
    """Gets each round's metrics in order, then the summary. Of a resumed run W&B gets the earlier rounds again."""

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of one round."""
        ...

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the record; ``summary`` is None if the run was stopped before its end."""
        ...
