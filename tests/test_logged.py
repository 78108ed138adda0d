"""What a module logs is collected, and a module with a validation_step of its own is judged by it.

Numbers are averaged; torchmetrics objects cover a whole set, whatever the chunks and the number of workers.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryConfusionMatrix,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
    MulticlassF1Score,
)
from torchmetrics.wrappers import ClasswiseWrapper

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.convergence.per_sample import gradients
from fedcommons.core import batched, graphs, watched
from fedcommons.core.logged import Logged
from fedcommons.core.work import Work
from fedcommons.core.worker import RunData
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.evaluation import ModelTask, evaluate, evaluate_chunk
from fedcommons.reports.frames import load_runs
from fedcommons.reports.tables import compared, percent
from fedcommons.runs import build
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


class Turns:
    """An executor of several workers in this process, which take the jobs in turns."""

    def __init__(self, federation: Federation, workers: int) -> None:
        self.workers = [federation.build(FedAvg())(federation.data) for _ in range(workers)]

    def map(self, function: Any, shared: Any, jobs: Sequence[Any]) -> list[Any]:
        return [self.workers[i % len(self.workers)].run(function, shared, job) for i, job in enumerate(jobs)]

    def close(self) -> None:
        pass


def judged(
    module: LightningModule, digits: "Callable[..., Digits]", n_classes: int = 2, chunk: int = 1000, workers: int = 1
) -> Mapping[str, float]:
    """The metrics of a set of 1,300 examples, which are evaluated as 1,000 and 300."""
    clients = digits().data.clients
    federation = Federation(RunData(clients, clients, {"test": SET}, n_classes=n_classes), lambda: deepcopy(module))
    return evaluate(Turns(federation, workers), ModelTask(federation.model, chunk=chunk), {"test": 1300})


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
    steps = facts["train/steps"] / federation.loop.epochs
    assert facts["train/step"] == pytest.approx((steps - 1) / 2, abs=0.5)  # 0, 1, ... in each epoch of each client
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


def test_a_number_that_some_chunks_log_is_a_mean_over_their_examples(digits: "Callable[..., Digits]") -> None:
    def judge(module: Module, x: Tensor, y: Tensor) -> None:
        if len(x) < 1000:
            module.log("rare", 7.0)

    assert judged(Module(judge), digits)["test/rare"] == 7.0


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


class MeanOfMeans(Metric):
    """The mean of all values, by a state that torchmetrics merges by a mean of its own."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("n", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.n = self.n + len(x)
        self.mean = self.mean + (x.mean() - self.mean) * len(x) / self.n

    def compute(self) -> Tensor:
        return self.mean


class WithMetrics(Module):
    """Scores x + noise that the number of the example decides, judged by torchmetrics objects of many kinds."""

    def __init__(self) -> None:
        super().__init__(WithMetrics.look)  # pyright: ignore[reportArgumentType]
        self.f1, self.auc, self.largest, self.pearson = BinaryF1Score(), BinaryAUROC(), MaxMetric(), PearsonCorrCoef()
        self.each = ClasswiseWrapper(MulticlassF1Score(2, average=None))
        self.many = MetricCollection([BinaryF1Score(0.6), BinaryAUROC()], prefix="many_")
        self.mean = MeanOfMeans()

    @staticmethod
    def scores(x: Tensor) -> Tensor:
        return ((x[:, 0] + (x[:, 0] * 1e4).sin()) / 4 + 0.5).clamp(0, 1)

    def look(self, x: Tensor, y: Tensor) -> None:
        scores = self.scores(x)
        for metric in (self.f1, self.auc, self.many):
            metric.update(scores, y)
        self.largest.update(scores)
        self.mean.update(scores)
        self.pearson.update(scores, y.float())
        self.each.update((scores > 0.5).long(), y)
        for name in ("f1", "auc", "largest", "pearson", "each", "mean"):
            self.log(name, getattr(self, name))
        self.log_dict(self.many)


def whole() -> dict[str, float]:
    """What the objects of ``WithMetrics`` say when they see the whole set at once."""
    module = WithMetrics()
    module.log, module.log_dict = (lambda *_: None), (lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
    module.look(SET.x, SET.y)
    one = {name: float(getattr(module, name).compute()) for name in ("f1", "auc", "largest", "pearson", "mean")}
    many = {name: float(value) for name, value in module.many.compute().items()}
    return {**one, **many, **{f"each_{name}": float(value) for name, value in module.each.compute().items()}}


@pytest.mark.parametrize(("chunk", "workers"), [(1000, 1), (1000, 3), (170, 2), (5000, 1)])
def test_torchmetrics_objects_cover_the_whole_set_whatever_its_chunks_and_workers(
    chunk: int, workers: int, digits: "Callable[..., Digits]"
) -> None:
    found = judged(WithMetrics(), digits, chunk=chunk, workers=workers)
    wanted = {f"test/{name}": value for name, value in whole().items()}
    assert found == pytest.approx({"test/accuracy": 1.0, **wanted}, abs=1e-6)
    by_chunk = [
        BinaryF1Score()(WithMetrics.scores(x), y) for x, y in zip(SET.x.split(1000), SET.y.split(1000), strict=True)
    ]
    assert abs(float(by_chunk[0] * 1000 + by_chunk[1] * 300) / 1300 - wanted["test/f1"]) > 0.01  # no mean of chunks


def test_a_torchmetrics_object_may_be_the_accuracy_and_may_be_returned(digits: "Callable[..., Digits]") -> None:
    def judge(module: WithMetrics, x: Tensor, y: Tensor) -> Mapping[str, Metric]:
        module.f1.update(module.scores(x), y)
        return {"accuracy": module.f1}

    module = WithMetrics()
    module.judge = judge  # pyright: ignore[reportAttributeAccessIssue]
    assert judged(module, digits) == pytest.approx({"test/accuracy": whole()["f1"]})


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_collection_may_be_returned_or_logged_before_its_update(
    is_logged: bool, digits: "Callable[..., Digits]"
) -> None:
    """It updates one metric of those that share states, and the others when they are read."""

    def judge(module: WithMetrics, x: Tensor, y: Tensor) -> MetricCollection | None:
        if is_logged:
            module.log_dict(module.many)
        module.many.update(module.scores(x), y)
        return None if is_logged else module.many

    module = WithMetrics()
    module.many = MetricCollection([BinaryF1Score(), BinaryPrecision(), BinaryRecall()])
    module.judge = judge  # pyright: ignore[reportAttributeAccessIssue]
    module.many.update(module.scores(SET.x), SET.y)
    wanted = {f"test/{name}": float(value) for name, value in module.many.compute().items()}
    module.many.reset()
    assert judged(module, digits) == pytest.approx({"test/accuracy": 1.0, **wanted})


def test_no_metric_outlives_its_use(digits: "Callable[..., Digits]") -> None:
    """Not even how a collection has grouped its metrics by the first batch, or what an estimator's vmap has left."""
    clients = digits().data.clients
    federation = Federation(RunData(clients, clients, {"test": SET}, n_classes=2), WithMetrics)
    worker, task = federation.build(FedAvg())(federation.data), ModelTask(federation.model)
    before = watched.state(worker.work, worker.algorithm)
    first = worker.run(evaluate_chunk, task, ("test", 0))
    assert worker.run(evaluate_chunk, task, ("test", 1000)) == {}
    assert worker.run(evaluate_chunk, task, ("test", 0)) == first
    assert watched.differing(before, watched.state(worker.work, worker.algorithm))
    watched.put_back(worker.work)
    assert watched.differing(before, watched.state(worker.work, worker.algorithm)) == set()


class Counting(Plain):
    """Logs a torchmetrics object in training: the mean, over the examples of all its steps, of a class's share."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.share = MeanOfMeans()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.share.update(batch[1].float())
        self.log("share", self.share)
        return self.last(batch[0]).square().mean()


def test_in_training_a_metric_covers_all_steps_of_one_client(digits: "Callable[..., Digits]") -> None:
    clients = digits().data.clients
    store = Examples(clients.store.x.float().mean((1, 2, 3))[:, None] / 255, clients.store.y % 2)
    rows = type(clients)(store, list(clients.rows))
    federation = Federation(RunData(rows, rows, {}), Counting)
    shares = [float(part.y.float().mean()) for part in rows]
    ((_, facts),) = federation.play(FedAvg(), federation.plan(1))
    assert facts["train/share"] == pytest.approx(sum(shares) / len(shares))
    (worker,) = Turns(federation, 1).workers
    module: Any = worker.work.module
    assert gradients(module, rows[0].columns)[0].isfinite().all()  # by vmap
    assert int(module.share.n) == 0


def _unowned(module: Module, x: Tensor, y: Tensor) -> None:
    metric = BinaryF1Score()
    metric.update(x[:, 0].sigmoid(), y)
    module.log("f1", metric)


def _largest(module: Module, x: Tensor, y: Tensor) -> None:
    module.log("largest", x.max(), reduce_fx=torch.max)


def _matrix(module: Any, x: Tensor, y: Tensor) -> None:
    module.confusion.update(x[:, 0].sigmoid(), y)
    module.log("confusion", module.confusion)


@pytest.mark.parametrize(
    ("judge", "said"),
    [(_unowned, "logs f1, a torchmetrics object that is not one"), (_largest, "logs largest with reduce_fx max"),
     (_matrix, r"logs confusion, whose compute gives a tensor \(2, 2\)")],
)  # fmt: skip
def test_what_would_be_another_number_than_the_module_means_is_refused(
    judge: Any, said: str, digits: "Callable[..., Digits]"
) -> None:
    module = Module(judge)
    module.confusion = BinaryConfusionMatrix()
    with pytest.raises(ClientError, match=said):
        judged(module, digits)


@pytest.mark.parametrize("flaw", [batched.flaw, graphs.flaw])
def test_training_as_a_tensor_function_refuses_metrics(flaw: Any) -> None:
    work = Work(Counting(), torch.device("cpu"))
    assert "torchmetrics" in flaw(work, (SET.x[:2], SET.y[:2]))


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


class Rooted(Coder):
    """Logs a root, which is no mean over examples."""

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Any:
        return {"rmse": (self.last(self(batch[0])) - batch[0].flatten(1) / 255).square().mean().sqrt()}


class Judged(Coder):
    """Logs the mean of the examples as a number; a subclass says which object computes it."""

    def metric(self) -> Metric:
        raise NotImplementedError

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        metric = self.metric()
        metric.update(batch[0])
        self.log("mean", metric.compute())


class Listed(Judged):
    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.metrics = {"mean": [MeanMetric()]}

    def metric(self) -> Metric:
        return self.metrics["mean"][0]


class OfClass(Judged):
    mean = MeanMetric()

    def metric(self) -> Metric:
        return self.mean


class Late(Judged):
    def metric(self) -> Metric:
        if not hasattr(self, "mean"):
            self.mean = MeanMetric()
        return self.mean


class LateInTraining(Late):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.metric().update(batch[0])
        return super().training_step(batch, batch_idx)


OF_FILE = MeanMetric()


IN_FILE = {"a": MetricCollection([MeanMetric()]), "b": SimpleNamespace(one=MeanMetric())}


class InDict(Judged):
    def metric(self) -> Metric:
        return IN_FILE["a"]["MeanMetric"]


class InNamespace(Judged):
    def metric(self) -> Metric:
        return IN_FILE["b"].one


class CountsExamples(Judged):
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("n", float(len(batch[1])))


class LogsText(Judged):
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log("words", {"a": 1})  # pyright: ignore[reportArgumentType]


class OfFile(Judged):
    def metric(self) -> Metric:
        return OF_FILE


class Temporary(Judged):
    """A fresh object in each step is a plain number; a template in the class is not updated."""

    templates = (MeanMetric(),)

    def metric(self) -> Metric:
        return self.templates[0].clone()


class LogsNumpy(Judged):
    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.log_dict({"truth": np.bool_(True), "array": np.array(2.0)})  # pyright: ignore[reportArgumentType]


class OverridesLog(Coder):
    def log(self, name: str, *args: Any, **options: Any) -> None:
        super().log(f"mine_{name}", *args, **options)


class CountsCalls(Coder):
    """Its forward returns logits, and counts its examples."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.calls, self.wide = SumMetric(), nn.Linear(3, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.update(len(x))
        return self.wide(super().forward(x))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self(batch[0])
        self.log("calls", self.calls)


class NeedsMany(Metric):
    """Cannot be computed of the two examples of a trial."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("n", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.n = self.n + len(x)

    def compute(self) -> Tensor:
        if self.n < 10:
            raise RuntimeError("too few")
        return torch.as_tensor(self.n)


class CountsMany(Coder):
    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.many = NeedsMany()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.many.update(batch[0])
        self.log("many", self.many)
        return super().training_step(batch, batch_idx)


class StoresScores(Coder):
    """Its metrics store what they are updated with: in training tensors that have a graph."""

    def __init__(self, lr: float) -> None:
        super().__init__(lr)
        self.curve, self.each = BinaryAUROC(), CatMetric()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        scores = self(batch[0])[:, 0]
        self.curve.update(scores, batch[1] % 2)
        self.each.update(scores)
        self.log("curve", self.curve)
        return super().training_step(batch, batch_idx)


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
        *[(name, {}, "it updates a metric \\(MeanMetric\\) that")
          for name in ("Listed", "OfClass", "Late", "LateInTraining", "OfFile", "InDict", "InNamespace")],
        ("CountsExamples", {}, "it logs n, which"),
        ("LogsText", {}, "it logs words, dict"),
        ("OverridesLog", {}, "it overrides log, which is replaced"),
        ("CountsCalls", {}, "its forward updates a metric, and is called once more"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_judged_or_stepped_is_refused_before_any_work(
    name: str, values: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        run(_experiment(name, **values), tmp_path / "run", say=lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["Temporary", "CountsMany", "StoresScores", "LogsNumpy"])
def test_a_metric_that_is_temporary_stores_scores_or_needs_many_is_accepted(name: str) -> None:
    build.prepare(_experiment(name))


def test_numbers_that_may_be_no_means_are_named_before_the_run_and_one_chunk_makes_them_right(tmp_path: Path) -> None:
    values, found, said = {"federation.rounds": 1, "measure.clients": False, "measure.every": 0}, {}, {}
    for chunk in (1000, 100, 359):
        said[chunk] = []
        run(_experiment("Rooted", **values, **{"evaluate.chunk": chunk}), tmp_path / f"{chunk}", say=said[chunk].append)
        (found[chunk],) = load_runs(tmp_path / f"{chunk}")["test/rmse"]
    assert found[1000] == found[359] != found[100]
    notes = {chunk: [text for text in each if "evaluate.chunk to 359" in text] for chunk, each in said.items()}
    assert [len(each) for each in notes.values()] == [0, 1, 0]
    assert "logs rmse as numbers" in notes[100][0]
    assert not build.prepare(_experiment("Coder", **{"evaluate.chunk": 100})).notes  # its error is a mean
