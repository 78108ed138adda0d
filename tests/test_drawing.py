"""A module that samples in every mode, as a VAE does: a stop in between and Ray actors change no byte of its run."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override
from fedcommons.runs.experiment import run

SAMPLES = """
import torch
from torch import nn
from torch.nn import functional as F
from pytorch_lightning import LightningModule


class Samples(LightningModule):
    def __init__(self, lr, n_classes):
        super().__init__()
        self.lr, self.first, self.last = lr, nn.Linear(64, 16), nn.Linear(16, n_classes)

    def forward(self, x):
        codes = self.first(x.flatten(1) / 255)
        return self.last(codes + torch.randn_like(codes))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)
"""


def quiet(text: str) -> None: ...


@pytest.fixture
def config(tmp_path: Path) -> Experiment:
    (tmp_path / "samples.py").write_text(SAMPLES)
    values = {
        "model.name": f"{tmp_path / 'samples.py'}:Samples", "federation.rounds": 4, "federation.checkpoint_every": 1,
        "client.epochs": 1, "measure.every": 3, "measure.clients": True, "measure.smoothness": True,
        "data.limit": 60, "tracking.wandb": "off",
    }  # fmt: skip
    return presets.experiment("smoke", values=values)


def lines(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("rounds.jsonl", "clients.jsonl", "summary.json")]


@pytest.mark.long
def test_a_stop_in_between_changes_no_bit(config: Experiment, tmp_path: Path) -> None:
    run(config, tmp_path / "whole", say=quiet)

    def stop(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "stopped", say=quiet, on_round=stop)
    run(config, tmp_path / "stopped", resume=True, say=quiet)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")


@pytest.mark.ray
def test_actors_give_the_bits_of_one_process(config: Experiment, tmp_path: Path, ray_session: None) -> None:
    run(config, tmp_path / "one", say=quiet)
    two = override(config, {"federation.executor": "ray_actors", "federation.actors": 2})
    run(two, tmp_path / "two", say=quiet)
    assert lines(tmp_path / "two")[:2] == lines(tmp_path / "one")[:2]
