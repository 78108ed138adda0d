"""Modules as people have them: trained as a bare loop trains them, judged by their own metrics, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import MeanMetric

from fedcommons import Clients, Experiment, LocalSGD, RunData, UserError, experiment, load_runs
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.runs.build import build, load, module_of
from fedcommons.runs.experiment import run
from fedcommons.testing import Federation

NETS = """
import torch
from pytorch_lightning import Callback, LightningModule
from torch import nn
from torch.nn import functional as F


class Net(LightningModule):
    def __init__(self, shape, n_classes, lr):
        super().__init__()
        self.lr, self.last = lr, nn.Linear(64, n_classes)

    def forward(self, x):
        return self.last(x.flatten(1) / 255)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


{more}
"""


def settled(folder: Path, more: str, **values: object) -> Experiment:
    (folder / "own.py").write_text(NETS.format(more=more))
    few = {"data.limit": 40, "client.epochs": 1, "client.batch_size": 64, "federation.rounds": 2, "measure.every": 0,
           "partition.name": "iid", "partition.n_clients": 1, "tracking.wandb": "off"}  # fmt: skip
    return experiment("smoke", values={**few, "model.name": f"{folder}/own.py:Own", **values})


def module(body: str) -> str:
    """Return the source of a Net with these lines in it."""
    return "class Own(Net):\n" + "\n".join(f"    {line}" for line in body.splitlines())


def optimizers(returned: str) -> str:
    sgd = "sgd = torch.optim.SGD(self.parameters(), self.lr)"
    return module(f"def configure_optimizers(self):\n    {sgd}\n    {returned}")


def built(lines: str, more: str = "") -> str:
    """Return the source of a Net that does this when it is built."""
    body = "\n".join(f"    {line}" for line in lines.splitlines())
    return module(
        f"def __init__(self, shape, n_classes, lr):\n    super().__init__(shape, n_classes, lr)\n{body}\n{more}"
    )


def step(line: str) -> str:
    return module(f"def training_step(self, batch, batch_idx):\n    loss = super().training_step(batch, 0)\n    {line}")


def scheduled(options: str) -> str:
    return optimizers(f"return [sgd], [{{'scheduler': torch.optim.lr_scheduler.StepLR(sgd, 1), {options}}}]")


def forward(value: str) -> str:
    return f"def forward(self, x):\n    x = x.flatten(1)\n    return {value}"


STEP = "def training_step(self, batch, batch_idx):\n"
COUNTS = module(
    "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):\n"
    "    optimizer.step(closure=optimizer_closure)"
)
LOSS, COMPILED, REDUCE = "training_step must return the loss", "is compiled by torch.compile", "ReduceLROnPlateau(sgd)"
REFUSED: dict[str, tuple[str, str, dict[str, object]]] = {
    "an empty dict": (optimizers("return {}"), "configure_optimizers: .*one torch optimizer.* got NoneType", {}),
    "a plateau": (
        optimizers(f"return [sgd], [torch.optim.lr_scheduler.{REDUCE}]"), "ReduceLROnPlateau needs a metric", {}
    ),
    "an interval": (scheduled("'interval': 'round'"), "interval .* must be epoch or step, got 'round'", {}),
    "a frequency": (scheduled("'frequency': 0"), "frequency .* must be at least 1, got 0", {}),
    "two": (optimizers("return sgd, sgd"), "configure_optimizers gives 2 optimizers", {}),
    "LBFGS": (optimizers("return torch.optim.LBFGS(self.parameters())"), "LBFGS needs a closure", {}),
    "a frozen one that moves": (
        built("self.last.bias.requires_grad = False",
              f"{STEP}    self.last.bias.data.add_(1)\n    return super().training_step(batch, 0)"),
        "training changes last.bias, which has requires_grad = False", {},
    ),
    "manual": (built("self.automatic_optimization = False"), "automatic_optimization = False is not supported", {}),
    "no loss": (step("return None"), LOSS, {}),
    "too few outputs": (
        built("self.last = nn.Linear(64, n_classes - 1)"), "returns 9 outputs, and the data have 10 classes",
        {"data.limit": 200},  # the first two of these examples have labels below 9
    ),
    "without a gradient": (step("return loss.detach()"), LOSS, {}),
    "its trainer": (step("return loss / self.trainer.max_epochs"), r"own.py, line \d+ in training_step", {}),
    "compiled in place": (built("self.compile()"), COMPILED, {}),
    "lazy": (built("self.last = nn.LazyLinear(n_classes)"), "last.weight has no shape before the first batch", {}),
    "shared memory": (
        built("self.other = nn.Linear(64, n_classes)\nself.other.weight.data = self.last.weight.data"),
        "last.weight and other.weight share their memory", {},
    ),
    "complex": (built("self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))"), "torch.complex64", {}),
    "mixed": (built("self.last.bias.data = self.last.bias.data.double()"), "some are torch.float64", {}),
    "meta": (built("self.to('meta')"), "last.weight is on the meta device", {}),
    "arguments": ("class Own(Net):\n    def __init__(self, width):\n        pass", "parameter width", {}),
    "of evaluation": (module("def on_validation_start(self): ..."), "on_validation_start", {}),
    "callbacks": (module("def configure_callbacks(self):\n    return [Callback()]"), "configure_callbacks .*Call", {}),
    "no function": (module("on_train_start = None"), "on_train_start is no function", {}),
    "no scheduler": (optimizers("return [sgd], [3]"), "one of torch.optim.lr_scheduler, got int", {}),
    "set": (step("self.trainer.accumulate_grad_batches = 4; return loss"), "accumulate_grad_batches", {}),
    "dp": (
        optimizers("self.on_after_backward = lambda: None; return sgd"), "dp.local .*on_after_bac", {"dp.local": True}
    ),
    "dp and gradients": (
        built("self.last.weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))"),
        "dp.local .*last.weight", {"dp.local": True},
    ),
    "batched": (COUNTS, "client.batched .*optimizer_step", {"client.batched": True}),
    "feddm": (COUNTS, "optimizer_step.*FedDM", {"algorithm": "feddm"}),
}  # fmt: skip
"""Modules that are refused: the source, words of the message, and fields of the experiment."""


@pytest.mark.filterwarnings("ignore:.*training_step.*:UserWarning", "ignore:.*configure_optimizers.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules.*:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.long
def test_a_module_that_cannot_be_trained_as_it_says_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    more, words, values = REFUSED[name]
    clients = {} if not values else {"partition.n_clients": 2}
    with pytest.raises(UserError, match=words):
        build(settled(tmp_path, more, **{**clients, **values}))


def test_setup_alone_goes_with_differential_privacy(tmp_path: Path) -> None:
    more = module("def setup(self, stage):\n    self.ready = True")
    assert build(settled(tmp_path, more, **{"dp.local": True})).dataset.n_classes == 10


RIGHT = {
    "tied": built(
        "self.code = nn.Linear(64, 64, bias=False)\nself.back = nn.Linear(64, 64)\nself.back.weight = self.code.weight",
        forward("self.last(self.back(torch.tanh(self.code(x / 255))))"),
    ),
    "frozen": built(
        "self.body = nn.Linear(64, 64).requires_grad_(False)", forward("self.last(torch.tanh(self.body(x / 255)))")
    ),
    "made in hooks, without the batch's number": module(
        "def setup(self, stage):\n    self.width = 16\n"
        "def configure_model(self):\n    self.body = nn.Linear(64, self.width)\n    self.last = nn.Linear(16, 10)\n"
        f"{forward('self.last(torch.tanh(self.body(x / 255)))')}\n"
        "def training_step(self, batch):\n    return F.cross_entropy(self(batch[0]), batch[1])"
    ),
    "only its head": optimizers("return torch.optim.SGD([self.last.bias], self.lr)"),
    "double": built("self.double()", forward("self.last(x.double() / 255)")),
    "a counter": built(
        "self.register_buffer('seen', torch.zeros((), dtype=torch.int64))",
        f"{STEP}    self.seen += 1\n    return super().training_step(batch, 0) / self.seen",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_module_that_is_taken_trains_as_a_bare_loop_trains_it(tmp_path: Path, name: str) -> None:
    """One client, one batch in each round: its optimizer and its counters begin anew in every round."""
    config = settled(tmp_path, RIGHT[name])
    dataset = load(config.data)
    clients = Clients(dataset.train, [np.arange(len(dataset.train))])
    federation = Federation(RunData(clients, clients), lambda: module_of(config)(dataset), LocalSGD(1, 64))
    trained = federation.run(FedAvg(), federation.plan(2))[-1][0].model
    bare = module_of(config)(dataset).train()
    buffers = {n: b.clone() for n, b in bare.named_buffers()}
    bare.log = bare.log_dict = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(2):
        for n, buffer in bare.named_buffers():
            buffer.copy_(buffers[n])
        optimizer = bare.configure_optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        loss = bare.training_step((dataset.train.x, dataset.train.y), 0)
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = {n: p for n, p in bare.named_parameters() if p.requires_grad}
    assert list(trained) == list(expected)
    for n, parameter in expected.items():
        torch.testing.assert_close(trained[n], parameter.detach(), rtol=1e-5, atol=1e-6)


class Coder(LightningModule):
    """An autoencoder with a code of three numbers, judged by its error alone, or as ``kind`` says."""

    def __init__(self, lr: float, kind: str = "error") -> None:
        super().__init__()
        self.lr, self.kind, self.metrics = lr, kind, {"mean": [MeanMetric()]}
        self.first, self.last = nn.Linear(64, 3), nn.Linear(3, 64)

    def forward(self, x: Tensor) -> Tensor:
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
            case "listed":
                self.metrics["mean"][0].update(batch[0])
                self.log("mean", self.metrics["mean"][0].compute())
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def _experiment(kind: str, **values: Any) -> Experiment:
    here = {"model.name": f"{__file__}:Coder", "measure.every": 0, "tracking.wandb": "off", "data.limit": 60}
    return experiment("smoke", values={**here, "coder.kind": kind, **values})


@pytest.mark.long
def test_a_run_may_be_judged_by_other_metrics_than_accuracy(tmp_path: Path) -> None:
    config = _experiment("error", **{"federation.rounds": 2, "measure.clients": True})
    summary = run(config, tmp_path / "run", say=lambda _: None)
    assert summary["last_accuracy"] is summary["rounds_to_target"] is summary["validation_accuracy"] is None
    (row,) = load_runs(tmp_path).to_dict("records")
    assert 0 < row["test/error"] < 1
    assert row["train/weight"] == 2 + config.client.epochs + (config.client.epochs - 1) / 2  # epochs are counted on
    assert "test/accuracy" not in row


@pytest.mark.parametrize(
    ("kind", "words"),
    [("nothing", r"returns \(3,\) .*no logits of 10 classes"),
     ("listed", r"updates a metric \(MeanMetric\) that is not one"),
     ("late", r"updates a metric \(MeanMetric\) that its steps have made"), ("size", "it logs n, a name")],
)  # fmt: skip
@pytest.mark.long
def test_a_module_that_cannot_be_judged_is_refused_before_any_work(kind: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(_experiment(kind))


@pytest.mark.long
def test_numbers_that_may_be_no_means_are_named_where_a_set_has_several_chunks() -> None:
    """The largest set has 359 examples."""
    for chunk in (358, 359):
        notes = build(_experiment("root", **{"evaluate.chunk": chunk, "data.limit": None})).notes
        assert ["rmse" in note for note in notes] == [True] * (chunk < 359)
