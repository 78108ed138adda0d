"""A user-defined tracker: a CSV file in the run folder, with some metrics of every round.

A resumed run logs the earlier rounds to the tracker again, so this tracker overwrites the file at the start. If a
tracker raises an error, the engine reports the error in one sentence and continues without the tracker. A tracker
changes neither the results nor the name of a run.

python examples/own_tracker.py        runs two rounds and prints the file
python sweeps/run.py --tracking.tracker examples/own_tracker.py:CsvTracker --csvtracker.prefix test/
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedcommons import experiment, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 0, "wandb": "off"}
FILE = "metrics.csv"


@dataclass
class CsvTracker:
    """A tracker that writes one CSV line (round, name, value) per metric and round."""

    folder: Path  # the run folder, passed by the engine; a tracker may also declare a field ``config``
    prefix: str = ""
    """only metrics whose names start with this prefix are written"""

    def __post_init__(self) -> None:
        (self.folder / FILE).write_text("round,name,value\n", encoding="utf-8")

    def log(self, round: int, metrics: Mapping[str, float | Sequence[int] | None]) -> None:
        with open(self.folder / FILE, "a", encoding="utf-8", newline="") as file:
            rows = [(round, name, value) for name, value in metrics.items() if name.startswith(self.prefix)]
            csv.writer(file, lineterminator="\n").writerows(rows)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Do nothing at the end of a run; ``summary`` is None if the run was stopped early."""


if __name__ == "__main__":
    chosen = {"tracking.tracker": f"{__file__}:CsvTracker", "tracking.prefix": "test/"}
    with TemporaryDirectory() as folder:
        run(experiment("smoke", values={**QUICK, **chosen}), folder, say=lambda text: None)
        print((Path(folder) / FILE).read_text(encoding="utf-8"), end="")
