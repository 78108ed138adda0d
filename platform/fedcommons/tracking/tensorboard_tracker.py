"""A tracker that writes TensorBoard events into the run folder; ``tensorboard --logdir runs`` shows all runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcommons.tracking.tracker import Metric, numbers


@dataclass
class TensorBoardTracker:
    """A tracker that writes numbers by round to the folder tensorboard/ in the run folder ``folder``."""

    folder: Path

    def __post_init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run logs its earlier rounds again, so TensorBoard must discard the events written before.
        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=0)

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        for name, value in numbers(metrics).items():
            self.writer.add_scalar(name, value, round)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.writer.close()
