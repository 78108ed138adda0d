"""What a module logs is collected, and a module with a validation_step of its own is judged by it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.core.logged import Logged
from fedcommons.core.worker import RunData
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.evaluation import ModelTask, evaluate
from fedcommons.reports.frames import load_runs
from fedcommons.reports.tables import compared, percent
from fedcommons.runs.experiment import run
from fedcommons.testing.federations import Federation

if TYPE_CHECKING:
    from conftest import Federation as Digits


class Module(LightningModule):
    """Two classes by the sign of the one feature; ``returned`` and what is logged are made by the test."""

    def __init__(self, judge: "Callable[[Module, Tensor, Tensor], Any]", logits: bool = True) -> None:
        super().__init__()
        self.judge, self.logits = judge, logits
        self.last = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([-x, x], 1) + 0 * self.last(x) if self.logits else x[:, 0]

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.log("step", batch_idx)
        self.log_dict({"twice": torch.tensor(2.0 * batch_idx)})
        return self.last(batch[0]).square().mean()

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        return self.judge(self, batch[0], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Plain(Module):
    validation_step = LightningModule.validation_step


SET = Examples(torch.linspace(-1, 1, 1300)[:, None], (torch.arange(1300) >= 650).long())


def judged(module: LightningModule, digits: "Callable[..., Digits]", n_classes: int = 2) -> Mapping[str, float]:
    """The metrics of a set of 1,300 examples, which are evaluated as 1,000 and 300."""
    clients = digits().data.clients
    federation = Federation(RunData(clients, clients, {"test": SET}, n_classes=n_classes), lambda: module)
    return evaluate(federation.serial(FedAvg()), ModelTask(federation.model), {"test": 1300})


def test_scalars_are_means_over_their_calls_and_dropped_at_other_times() -> None:
    module = Plain(lambda *_: None)
    logged, batch = Logged(module), (SET.x[:4], SET.y[:4])
    module.training_step(batch, 9)
    with logged:
        for step in (1, 2, 6):
            module.training_step(batch, step)
    assert logged.means == {"step": 3.0, "twice": torch.tensor(6.0)}
    module.training_step(batch, 9)
    with logged:
        pass
    assert logged.means == {}


def test_what_training_logs_is_a_metric_of_the_round(digits: "Callable[..., Digits]") -> None:
    clients = digits().data.clients
    store = Examples(clients.store.x.float().mean((1, 2, 3))[:, None] / 255, clients.store.y % 2)
    rows = type(clients)(store, list(clients.rows))
    federation = Federation(RunData(rows, rows, {}), lambda: Plain(lambda *_: None))
    ((_, facts),) = federation.play(FedAvg(), federation.plan(1))
    steps = facts["train/steps"]
    assert facts["train/step"] == pytest.approx((steps - 1) / 2, abs=0.5)  # 0, 1, ..., K - 1 of each client
    assert facts["train/twice"] == pytest.approx(2 * facts["train/step"])
    assert facts["train/loss"] > 0


def test_metrics_of_a_validation_step_are_means_over_examples(digits: "Callable[..., Digits]") -> None:
    def judge(module: Module, x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        module.log("accuracy", 0.25)
        module.log("size", float(len(x)))
        return {"largest": x.max()}

    found = judged(Module(judge), digits)
    assert found == pytest.approx(
        {"test/accuracy": 0.25, "test/size": (1000**2 + 300**2) / 1300,
         "test/largest": (1000 * float(SET.x[999]) + 300) / 1300}
    )  # fmt: skip


def test_accuracy_is_that_of_the_logits_where_the_step_has_none(digits: "Callable[..., Digits]") -> None:
    found = judged(Module(lambda module, x, y: x.mean()), digits)
    assert found == pytest.approx({"test/accuracy": 1.0, "test/loss": 0.0}, abs=1e-6)
    plain = judged(Plain(lambda *_: None), digits)
    assert plain["test/accuracy"] == 1.0
    assert 0 < plain["test/loss"] < 1


def test_what_is_no_logits_needs_a_metric_of_its_own(digits: "Callable[..., Digits]") -> None:
    with pytest.raises(
        ClientError, match=r"returns \(\) for an example, no logits of 2 classes, and its validation_step"
    ):
        judged(Plain(lambda *_: None, logits=False), digits)


def test_what_is_two_dimensional_but_not_as_wide_as_the_classes_has_no_accuracy(
    digits: "Callable[..., Digits]",
) -> None:
    """Codes of two numbers are no logits of three classes, though a largest one can be found among them."""
    with pytest.raises(ClientError, match=r"returns \(2,\) for an example, no logits of 3 classes"):
        judged(Plain(lambda *_: None), digits, n_classes=3)
    found = judged(Module(lambda module, x, y: {"error": x.abs().mean()}), digits, n_classes=3)
    assert list(found) == ["test/error"]


class Coder(LightningModule):
    """An autoencoder with a code of three numbers; it is judged by its error alone."""

    def __init__(self, lr: float, code: int = 3, logs: bool = True) -> None:
        super().__init__()
        self.lr, self.logs = lr, logs
        self.first, self.last = nn.Linear(64, code), nn.Linear(code, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x.flatten(1) / 255)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.log("weight", float(self.trainer.round + self.current_epoch))  # pyright: ignore[reportAttributeAccessIssue]
        return (self.last(self(batch[0])) - batch[0].flatten(1) / 255).square().mean()

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        return {"error": self.training_step(batch, batch_idx)} if self.logs else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class TwoOptimizers(Coder):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()]


def _experiment(name: str, **values: Any) -> Experiment:
    here = {"model.name": f"{__file__}:{name}", "measure.clients": True, "tracking.wandb": "off"}
    return presets.experiment("smoke", values={**here, **values})


def test_a_run_may_be_judged_by_other_metrics_than_accuracy(tmp_path: Path) -> None:
    summary = run(_experiment("Coder"), tmp_path / "run", say=lambda _: None)
    assert summary["last_accuracy"] is summary["rounds_to_target"] is summary["validation_accuracy"] is None
    (row,) = load_runs(tmp_path).to_dict("records")
    assert 0 < row["test/error"] < 1
    assert row["train/weight"] > summary["rounds"]  # epochs are counted on
    assert row["rounds"] == summary["rounds"]
    assert "test/accuracy" not in row
    (cell,) = compared(load_runs(tmp_path))
    assert percent(cell, "last_accuracy") == "-"


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            "Coder",
            {"coder.logs": False},
            r"its forward returns \(3,\) for an example, no logits of 10 classes, and its",
        ),
        ("TwoOptimizers", {}, "configure_optimizers gives 2 optimizers"),
    ],
)
def test_a_module_that_cannot_be_judged_or_stepped_is_refused_before_any_work(
    name: str, values: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        run(_experiment(name, **values), tmp_path / "run", say=lambda _: None)
    assert not (tmp_path / "run").exists()
