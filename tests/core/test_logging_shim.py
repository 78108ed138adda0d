"""What a module logs is collected, and a module with a validation_step of its own is judged by it.

Numbers are averaged; torchmetrics objects cover a whole set, whatever the chunks and the number of workers.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, BinaryPrecision, BinaryRecall

from fedcommons import ClientError, Examples, RunData, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core import cuda_graphs, state_leaks
from fedcommons.core.evaluation import ModelTask, evaluate, evaluate_chunk
from fedcommons.testing import Federation, digits


class Module(LightningModule):
    """Two classes by the sign of the one feature; ``returned`` and what is logged are made by the test."""

    def __init__(self, judge: "Callable[[Any, Tensor, Tensor], Any]") -> None:
        super().__init__()
        self.judge = judge
        self.last = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([-x, x], 1) + 0 * self.last(x)

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


def judged(module: LightningModule, n_classes: int = 2, chunk: int = 1000, workers: int = 1) -> Mapping[str, float]:
    """The metrics of a set of 1,300 examples, which are evaluated as 1,000 and 300."""
    clients = digits().data.clients
    federation = Federation(RunData(clients, clients, {"test": SET}, n_classes=n_classes), lambda: deepcopy(module))
    return evaluate(Turns(federation, workers), ModelTask(federation.model, chunk=chunk), {"test": 1300})


LARGEST = (1000 * float(SET.x[999]) + 300) / 1300


LOGGED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Any], dict[str, float]]] = {
    "a loss that is returned": (lambda m, x, y: x.mean(), {"accuracy": 1.0, "loss": 0.0}),
    "another accuracy": (lambda m, x, y: m.log("accuracy", 0.25), {"accuracy": 0.25}),
    "of some chunks": (lambda m, x, y: m.log("rare", 7.0) if len(x) < 1000 else None, {"accuracy": 1.0, "rare": 7.0}),
    "of every chunk and returned": (
        lambda m, x, y: m.log_dict({"size": float(len(x)), "true": np.bool_(True)}) or {"largest": x.max()},
        {"accuracy": 1.0, "size": (1000**2 + 300**2) / 1300, "true": 1.0, "largest": LARGEST},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", LOGGED)
def test_numbers_of_a_validation_step_are_means_over_examples(how: str) -> None:
    """Accuracy is that of the logits where the step has none."""
    judge, expected = LOGGED[how]
    metrics = judged(Module(judge))
    if "some" in how:  # the others are judged as without a validation step
        assert 0 < metrics["test/loss"] < 1
        metrics = {name: value for name, value in metrics.items() if name != "test/loss"}
    assert metrics == pytest.approx({f"test/{name}": value for name, value in expected.items()}, abs=1e-6)


def test_accuracy_and_loss_are_those_of_the_logits_where_a_module_has_logits_and_no_step() -> None:
    plain = judged(Plain(lambda *_: None))
    assert plain["test/accuracy"] == 1.0
    assert 0 < plain["test/loss"] < 1
    codes = judged(Module(lambda module, x, y: {"error": x.abs().mean()}), n_classes=3)  # of two numbers
    assert list(codes) == ["test/error"]


class WithMetrics(Module):
    """Scores x + noise that the number of the example decides, judged by torchmetrics objects of many kinds."""

    def __init__(self) -> None:
        super().__init__(WithMetrics.look)  # pyright: ignore[reportArgumentType]
        self.f1, self.auc, self.largest, self.pearson = BinaryF1Score(), BinaryAUROC(), MaxMetric(), PearsonCorrCoef()
        self.many = MetricCollection([BinaryF1Score(0.6), BinaryAUROC()], prefix="many_")

    @staticmethod
    def scores(x: Tensor) -> Tensor:
        return ((x[:, 0] + (x[:, 0] * 1e4).sin()) / 4 + 0.5).clamp(0, 1)

    def look(self, x: Tensor, y: Tensor) -> None:
        scores = self.scores(x)
        for metric in (self.f1, self.auc, self.many):
            metric.update(scores, y)
        self.largest.update(scores)
        self.pearson.update(scores, y.float())
        for name in ("f1", "auc", "largest", "pearson"):
            self.log(name, getattr(self, name))
        self.log_dict(self.many)


def whole() -> dict[str, float]:
    """Compute the metrics of ``WithMetrics`` from the whole set at once."""
    module = WithMetrics()
    module.log, module.log_dict = (lambda *_: None), (lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
    module.look(SET.x, SET.y)
    single = {name: float(getattr(module, name).compute()) for name in ("f1", "auc", "largest", "pearson")}
    many = {name: float(value) for name, value in module.many.compute().items()}
    return {**single, **many}


@pytest.mark.parametrize(("chunk", "workers"), [(1000, 1), (170, 3)])
def test_torchmetrics_objects_cover_the_whole_set_whatever_its_chunks_and_workers(chunk: int, workers: int) -> None:
    metrics = judged(WithMetrics(), chunk=chunk, workers=workers)
    wanted = {f"test/{name}": value for name, value in whole().items()}
    assert metrics == pytest.approx({"test/accuracy": 1.0, **wanted}, abs=1e-6)
    chunks = zip(SET.x.split(1000), SET.y.split(1000), strict=True)
    by_chunk = [BinaryF1Score()(WithMetrics.scores(x), y) for x, y in chunks]
    assert abs(float(by_chunk[0] * 1000 + by_chunk[1] * 300) / 1300 - wanted["test/f1"]) > 0.01  # no mean of chunks


def test_a_metric_or_a_collection_may_be_returned_or_logged_before_its_update() -> None:
    """A collection updates one metric of those that share states, and the others when they are read."""

    def judge(module: WithMetrics, x: Tensor, y: Tensor) -> Mapping[str, Metric]:
        module.log_dict(module.many)
        module.many.update(module.scores(x), y)
        module.f1.update(module.scores(x), y)
        return {"accuracy": module.f1}

    def returned(module: WithMetrics, x: Tensor, y: Tensor) -> MetricCollection:
        module.many.update(module.scores(x), y)
        return module.many

    module = WithMetrics()
    module.many = MetricCollection([BinaryF1Score(), BinaryPrecision(), BinaryRecall()])
    module.many.update(module.scores(SET.x), SET.y)
    wanted = {f"test/{name}": float(value) for name, value in module.many.compute().items()}
    module.many.reset()
    for module.judge, accuracy in ((judge, whole()["f1"]), (returned, 1.0)):  # pyright: ignore[reportAttributeAccessIssue]
        assert judged(module) == pytest.approx({"test/accuracy": accuracy, **wanted})


def test_no_metric_outlives_its_use() -> None:
    """Not even how a collection has grouped its metrics by the first batch."""
    clients = digits().data.clients
    federation = Federation(RunData(clients, clients, {"test": SET}, n_classes=2), WithMetrics)
    worker, task = federation.build(FedAvg())(federation.data), ModelTask(federation.model)
    before = state_leaks.state(worker.work, worker.algorithm)
    first = worker.run(evaluate_chunk, task, ("test", 0))
    assert worker.run(evaluate_chunk, task, ("test", 1000)) == {}
    assert worker.run(evaluate_chunk, task, ("test", 0)) == first
    assert state_leaks.differing(before, state_leaks.state(worker.work, worker.algorithm))
    state_leaks.put_back(worker.work)
    assert state_leaks.differing(before, state_leaks.state(worker.work, worker.algorithm)) == set()


class Counting(Plain):
    """Also logs a torchmetrics object in training: the share of a class over the examples of all its steps."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.share = MeanMetric()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.share.update(batch[1].float())
        self.log("share", self.share)
        return super().training_step(batch, batch_idx)


def test_training_logs_means_over_steps_and_metrics_over_all_steps_of_a_client() -> None:
    clients = digits().data.clients
    store = Examples(clients.store.x.float().mean((1, 2, 3))[:, None] / 255, clients.store.y % 2)
    rows = type(clients)(store, list(clients.rows))
    federation = Federation(RunData(rows, rows, {}), Counting)
    ((_, facts),) = federation.run(FedAvg(), federation.plan(1))
    places = [sum(range(-(-n // 5))) / -(-n // 5) for n in rows.sizes]  # the mean place of a batch in its epoch
    assert facts["train/step"] == pytest.approx(sum(places) / len(places))
    assert facts["train/twice"] == pytest.approx(2 * facts["train/step"])
    assert facts["train/loss"] > 0
    shares = [float(part.y.float().mean()) for part in rows]
    assert facts["train/share"] == pytest.approx(sum(shares) / len(shares))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Module(lambda m, x, y: m.log("f1", BinaryF1Score())), "logs f1, .*no attribute"),
        (Module(lambda m, x, y: m.log("most", x.max(), reduce_fx=torch.max)), "logs most with reduce_fx max"),
        (Module(lambda m, x, y: m.log("words", {"a": 1})), "logs words, dict"),  # pyright: ignore[reportArgumentType]
        (Plain(lambda *_: None), r"returns \(2,\) for an example, no logits of 3 classes"),
    ],
    ids=["a metric that is no attribute", "a largest number", "a dict", "too few logits"],
)
def test_what_would_be_another_number_than_the_module_means_is_refused(module: Module, words: str) -> None:
    with pytest.raises(ClientError, match=words):
        judged(module, n_classes=3)


def test_training_as_a_tensor_function_refuses_metrics() -> None:
    assert "torchmetrics" in str(cuda_graphs.flaw(Work(Counting(), torch.device("cpu")), (SET.x[:2], SET.y[:2])))
