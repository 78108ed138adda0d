"""What listens to a run."""

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Told each round's facts in order, then the summary. On resumption it is told the earlier rounds again."""

    def log(self, round: int, metrics: Mapping[str, float | None]) -> None:
        """Facts of one round."""
        ...

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over; None where it was broken off."""
        ...
