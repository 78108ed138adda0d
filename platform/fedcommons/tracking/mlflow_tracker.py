"""A tracker that writes to MLflow at MLFLOW_TRACKING_URI (default: the folder ``mlflow/`` in the run folder)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcommons.tracking.tracker import Metric, numbers
from fedcommons.tracking.wandb_tracker import run_id


@dataclass
class MlflowTracker:
    """A tracker for MLflow. MLflow's experiment is ``tracking.project``, and its run has the run folder's name."""

    folder: Path
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without this variable, MLflow requires a database
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  (an extra)

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder / "mlflow").absolute().as_uri()
        self.client = MlflowClient(tracking_uri=uri)
        project = self.config["tracking.project"]
        experiment = self.client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(project)
        tags = {"fedcommons.run": run_id(self.folder)}
        same_run = f"tags.`fedcommons.run` = '{tags['fedcommons.run']}'"
        # A resumed run logs all rounds to a new MLflow run.
        for earlier in self.client.search_runs([experiment_id], same_run):
            self.client.delete_run(earlier.info.run_id)
        self.run = self.client.create_run(experiment_id, run_name=self.folder.name, tags=tags).info.run_id

    def log(self, round: int, metrics: Mapping[str, Metric]) -> None:
        for name, value in numbers(metrics).items():
            self.client.log_metric(self.run, name, value, step=round)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self.client.set_terminated(self.run, status="FINISHED" if summary is not None else "FAILED")
