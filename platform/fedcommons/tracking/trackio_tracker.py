"""trackio: a local data base in the folder that TRACKIO_DIR names, without a server or a login."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from fedcommons.tracking.tracker import Metric, numbers


@dataclass
class TrackioTracker:
    """Logs metrics by round; the project is tracking.project, the run has the folder's name.

    A run that was resumed is one more run there, as its earlier rounds are told again. Nothing is sent anywhere.
    """

    folder: Path
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  (an extra)

        with redirect_stdout(StringIO()):  # it says on stdout where to look
            self.run = trackio.init(
                project=self.config["tracking.project"], name=self.folder.name, resume="never", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        """See ``Tracker``."""
        self.run.log(numbers(metrics), step=round)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """See ``Tracker``."""
        import trackio  # pyright: ignore[reportMissingImports]

        with redirect_stdout(StringIO()):
            trackio.finish()
