"""Modules that are judged by other metrics than accuracy, or are refused before any work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, SumMetric
from torchmetrics.classification import BinaryAUROC

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.reports.frames import load_runs
from fedcommons.reports.tables import compared, percent
from fedcommons.runs import build
from fedcommons.runs.experiment import run


class Coder(LightningModule):
    """An autoencoder with a code of three numbers, judged by its error alone, or as ``kind`` says."""

    def __init__(self, lr: float, kind: str = "error") -> None:
        super().__init__()
        self.lr, self.kind, self.metrics = lr, kind, {"mean": [MeanMetric()]}
        self.first, self.last, self.calls = nn.Linear(64, 10 if kind == "calls" else 3), nn.Linear(3, 64), SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "calls":  # logits
            self.calls.update(len(x))
        return self.first(x.flatten(1) / 255)

    def error(self, x: Tensor) -> Tensor:
        return (self.last(self(x)[:, :3]) - x.flatten(1) / 255).square().mean()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.log("weight", float(self.trainer.round + self.current_epoch))  # pyright: ignore[reportAttributeAccessIssue]
        if self.kind == "late":
            self.mean = MeanMetric()
            self.mean.update(batch[0])
        return self.error(batch[0])

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        match self.kind:
            case "error" | "late":
                return {"error": self.error(batch[0])}
            case "root":  # no mean over examples
                return {"rmse": self.error(batch[0]).sqrt()}
            case "size":
                self.log("n", float(len(batch[1])))
            case "calls":
                self(batch[0])
                self.log("calls", self.calls)
            case "listed":
                self.metrics["mean"][0].update(batch[0])
                self.log("mean", self.metrics["mean"][0].compute())
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class OverridesLog(Coder):
    def log(self, name: str, *args: Any, **options: Any) -> None:
        super().log(f"mine_{name}", *args, **options)


class NeedsMany(SumMetric):
    """Cannot be computed of the two examples of a trial."""

    def compute(self) -> Tensor:
        if self.sum_value < 10:
            raise RuntimeError("too few")
        return super().compute()


class Accepted(Coder):
    """Its metrics need many examples, store scores that have a graph in training, or are made and forgotten."""

    templates = (MeanMetric(),)

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.many, self.curve, self.each = NeedsMany(), BinaryAUROC(), CatMetric()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        scores = self(batch[0])[:, 0]
        self.many.update(len(scores))
        self.curve.update(scores, batch[1] % 2)
        self.each.update(scores)
        self.log_dict({"many": self.many, "curve": self.curve})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        metric = self.templates[0].clone()
        metric.update(batch[0])
        self.log("mean", metric.compute())


def _experiment(name: str, kind: str = "", **values: Any) -> Experiment:
    here = {"model.name": f"{__file__}:{name}", "measure.every": 0, "tracking.wandb": "off", "data.limit": 60}
    here |= {f"{name.lower()}.kind": kind} if kind and name == "Coder" else {}
    return presets.experiment("smoke", values={**here, **values})


@pytest.mark.long
def test_a_run_may_be_judged_by_other_metrics_than_accuracy(tmp_path: Path) -> None:
    config = _experiment("Coder", **{"federation.rounds": 2, "measure.clients": True})
    summary = run(config, tmp_path / "run", say=lambda _: None)
    assert summary["last_accuracy"] is summary["rounds_to_target"] is summary["validation_accuracy"] is None
    (row,) = load_runs(tmp_path).to_dict("records")
    assert 0 < row["test/error"] < 1
    assert row["train/weight"] == 2 + config.client.epochs + (config.client.epochs - 1) / 2  # epochs are counted on
    assert "test/accuracy" not in row
    (cell,) = compared(load_runs(tmp_path))
    assert percent(cell, "last_accuracy") == "-"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("Coder", "nothing", r"returns \(3,\) .*no logits of 10 classes"),
        ("Coder", "listed", r"updates a metric \(MeanMetric\) that is not one"),
        ("Coder", "late", r"updates a metric \(MeanMetric\) that its steps have made"),
        ("Coder", "size", "it logs n, which"),
        ("Coder", "calls", "its forward updates a metric, and is called once more"),
        ("OverridesLog", "error", "it overrides log"),
    ],
)
def test_a_module_that_cannot_be_judged_is_refused_before_any_work(name: str, kind: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build.prepare(_experiment(name, kind))


@pytest.mark.long
def test_metrics_that_need_many_examples_store_scores_or_are_forgotten_are_accepted() -> None:
    build.prepare(_experiment("Accepted"))


@pytest.mark.parametrize(("chunk", "is_noted"), [(358, True), (359, False)])
@pytest.mark.long
def test_numbers_that_may_be_no_means_are_named_where_a_set_has_several_chunks(chunk: int, is_noted: bool) -> None:
    """The largest set has 359 examples."""
    notes = build.prepare(_experiment("Coder", "root", **{"evaluate.chunk": chunk, "data.limit": None})).notes
    assert [("rmse" in note, "evaluate.chunk to 359" in note) for note in notes] == [(True, True)] * is_noted
