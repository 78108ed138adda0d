"""A tracker that uses trackio: a local database in the folder TRACKIO_DIR, without a server or a login."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from fedcommons.tracking.tracker import Metric, numbers


@dataclass
class TrackioTracker:
    """A tracker for trackio. The project is ``tracking.project``, and the trackio run has the run folder's name.

    A resumed run becomes a second trackio run, because it logs its earlier rounds again. No data leave the machine.
    """

    folder: Path
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  (an extra)

        with redirect_stdout(StringIO()):  # trackio prints instructions on stdout
            self.run = trackio.init(
                project=self.config["tracking.project"], name=self.folder.name, resume="never", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        self.run.log(numbers(metrics), step=round)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        with redirect_stdout(StringIO()):
            trackio.finish()
