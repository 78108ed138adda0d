"""A tracker that writes metrics.csv into the run folder, with one line per round and metric."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcommons.tracking.tracker import Metric, numbers

FILE = "metrics.csv"


@dataclass
class CsvTracker:
    """A tracker that writes metrics.csv with the columns round, name and value. folder: the run folder."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / FILE).unlink(missing_ok=True)
        (self.folder / FILE).write_text("round,name,value\n", encoding="utf-8")

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        with open(self.folder / FILE, "a", newline="", encoding="utf-8") as file:
            rows = [(round, name, repr(value)) for name, value in numbers(metrics).items()]
            csv.writer(file, lineterminator="\n").writerows(rows)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Do nothing: all lines are already written."""
