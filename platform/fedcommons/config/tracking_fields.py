"""The section ``tracking`` of an experiment's configuration: W&B and other trackers."""

from dataclasses import dataclass
from typing import Annotated

from fedcommons.config.section import Section


@dataclass(frozen=True)
class Tracking(Section):
    """Weights & Biases (W&B) and other trackers, in addition to the run folder, which is always written."""

    wandb: Annotated[str, "online | offline | off"] = "offline"
    """Weights & Biases: online (uploads; without a login: offline), offline (files in the run folder) or off"""
    project: str = "fedcommons"
    """project of the run in W&B, MLflow or trackio"""
    group: str | None = None
    """group of the run in W&B; null: WANDB_RUN_GROUP, the sweep's name, or data set and partition"""
    preset: str | None = None
    """name of the preset, shown as a tag of the run in W&B; --preset sets it"""
    notes: str | None = None
    """notes on the run in W&B"""
    model: bool = False
    """upload the last model to W&B, as an artifact"""
    system: bool | None = None
    """record the load of CPU, GPU, memory and disk in W&B; null: only with tracking.wandb online"""
    tracker: str | None = None
    """further trackers, separated by commas, that record the metrics of each round, in addition to the run folder and
    W&B (null: none); at most one of them is user-defined"""
