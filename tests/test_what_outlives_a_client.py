"""Under DP whatever carries data from a client's steps to later ones is named, and then nothing is covered."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
import torchvision
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fedcommons.accounting.privacy import OUTLIVED, Ledger
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import parts, presets
from fedcommons.config.parts import KINDS
from fedcommons.core import watched
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.written import STEERED, WRITTEN
from fedcommons.errors import UserError
from fedcommons.runs.checks import schedule_of
from fedcommons.runs.experiment import run
from fedcommons.seeds import set_default_generator
from fedcommons.testing.elsewhere import Apart
from lightning_modules import Classifier
from lightning_modules.networks import Linear

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]

DP = DPSGD(2.0, 1.0)
PRIVATE = LocalSGD(1, 5, dp=DP)
SEEDS = range(2)
SEEN: list[float] = []


class Plain(Classifier):
    """Softmax regression; ``see`` is shown every batch."""

    def __init__(self) -> None:
        set_default_generator("initial weights of the tests")
        super().__init__(Linear((1, 8, 8), 10), lr=0.1)

    def see(self, x: Tensor) -> None: ...

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.see(batch[0].float().mean() / 255)
        return super().training_step(batch, batch_idx)


class Queue(Plain):
    """The last inputs, in a buffer that is in no checkpoint, as MoCo's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4), persistent=False)

    def see(self, x: Tensor) -> None:
        self.queue = torch.cat([self.queue[1:], x.view(1)])


class InPlace(Queue):
    def see(self, x: Tensor) -> None:
        self.get_buffer("queue")[0] = x


class Whole(Plain):
    """In a buffer of whole numbers; there are no statistics, so nothing loads it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pixels", torch.zeros(1, dtype=torch.uint8))

    def see(self, x: Tensor) -> None:
        self.get_buffer("pixels")[0] = (255 * x).to(torch.uint8)


class Listed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.rows = {"last": deque[float](maxlen=3)}

    def see(self, x: Tensor) -> None:
        self.rows["last"].append(float(x))


class Deep(Plain):
    """In an array in an object in a list, on a part of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.network.last.held = [SimpleNamespace(rows=np.zeros(2))]  # pyright: ignore

    def see(self, x: Tensor) -> None:
        self.network.last.held[0].rows[1] = float(x)  # pyright: ignore


class Teacher(Plain):
    """A mean of the weights, in a network that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = (nn.Linear(1, 1, bias=False),)

    def see(self, x: Tensor) -> None:
        self.teachers[0].weight.data.mul_(0.9).add_(0.1 * x)


class Hooked(Plain):
    """In the variable of a function that is a hook."""

    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []
        self.network.register_forward_hook(lambda module, inputs, outputs: kept.append(inputs[0].detach()))


class Shared(Plain):
    """On the class."""

    rows: ClassVar[list[float]] = []

    def see(self, x: Tensor) -> None:
        self.rows.append(float(x))


class Default(Plain):
    """In the default value of an argument."""

    def see(self, x: Tensor, rows: list[float] = []) -> None:  # noqa: B006
        rows.append(float(x))


class Global(Plain):
    """In a variable of its file."""

    def see(self, x: Tensor) -> None:
        SEEN.append(float(x))


class Elsewhere(Plain):
    """The weights are another tensor from now on, so that none of what a client loads reaches them."""

    def see(self, x: Tensor) -> None:
        weight = next(self.network.parameters())
        weight.data = weight.data + x


class OnAWeight(Plain):
    """As an attribute of a parameter."""

    def see(self, x: Tensor) -> None:
        next(self.network.parameters()).seen = float(x)  # pyright: ignore


class InTheOptimizer(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        made = super().configure_optimizers()
        self.groups = (lambda groups: lambda: groups)(made.param_groups)
        return made

    def see(self, x: Tensor) -> None:
        self.groups()[0]["weight_decay"] = float(x)


class OfItsOwn(torch.optim.SGD):
    last = 0.0

    def step(self, closure: Any = None) -> Any:
        self.last = float(self.param_groups[0]["params"][0].detach().sum())
        return super().step(closure)


class WithAnOptimizer(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OfItsOwn(self.parameters(), 0.1)


PLANTS: dict[str, type[Plain]] = {
    "module state (queue)": Queue,
    "module state (queue), in place": InPlace,
    "module state (pixels)": Whole,
    "module state (rows)": Listed,
    "module state (network.last.held)": Deep,
    "module state (teachers)": Teacher,
    "module state (network._forward_hooks)": Hooked,
    "class state (Shared.rows)": Shared,
    "class state (Default.see)": Default,
    f"global state ({__name__}.SEEN)": Global,
    f"delta ({WRITTEN.why})": Elsewhere,
    "module state (network.last.weight), an attribute": OnAWeight,
    "optimizer state (0.weight_decay)": InTheOptimizer,
    "optimizer state (last)": WithAnOptimizer,
}


def _ledger(federation: "Federation", module: Callable[[], LightningModule], rounds: int = 2) -> Ledger:
    there = replace(federation, module=module)
    return there.play(FedAvg(), there.plan(rounds))[-1][0].ledger


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.long
def test_what_a_module_keeps_is_named_and_nothing_is_covered(name: str, digits: "Digits") -> None:
    federation = digits().training(PRIVATE)
    ledger = _ledger(federation, PLANTS[name])
    assert name.partition(",")[0] in ledger.uncovered, ledger.uncovered
    assert not ledger.updates.covered
    why = {InTheOptimizer: STEERED.why, Elsewhere: WRITTEN.why}.get(PLANTS[name], OUTLIVED)
    assert f"delta ({why})" in ledger.uncovered
    assert ledger.of_all(0, 1e-5) is None
    assert ledger.largest_of_rounds(1e-5) is ledger.of_rounds(0, 1e-5) is None


class Honest(Plain):
    """It holds much, and training changes none of it but weights, dropout and what it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.names, self.rate = [torch.arange(4), np.ones(3)], {"a": {1, 2}}, float("nan")
        self.others, self.draw = [self], torch.Generator()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.log("pixels", batch[0].float().mean())
        return self.drop(super().training_step(batch, batch_idx))


class Lazy(Plain):
    """It makes a table when it first needs it, so that each worker does so in its first client."""

    def see(self, x: Tensor) -> None:
        if not hasattr(self, "table"):
            self.table = torch.arange(8)


@pytest.mark.parametrize("module", [Lazy, Queue])
def test_the_ledger_does_not_depend_on_the_workers(module: Callable[[], LightningModule], digits: "Digits") -> None:
    federation = replace(digits().training(PRIVATE), module=module)
    plan = federation.plan(3, participation=0.6, blocks=3)
    executors = (federation.serial(FedAvg()), Apart(federation, FedAvg()))
    one, two = (federation.play(FedAvg(), plan, executor)[-1][0].ledger for executor in executors)
    assert one == two
    assert not one.updates.covered


def test_an_honest_module_is_not_blamed(digits: "Digits") -> None:
    for loop in (PRIVATE, replace(PRIVATE, epochs=2)):
        federation = digits().training(loop)
        for module in (Honest, Plain, federation.module):
            ledger = _ledger(federation, module)
            assert not ledger.uncovered
            assert len(ledger.updates.covered) == 5


def test_without_dp_nothing_is_compared(digits: "Digits") -> None:
    assert _ledger(digits(), Queue).uncovered == {"delta": 10}


def test_what_is_found_once_counts_for_all_later_rounds(digits: "Digits") -> None:
    """And earlier rounds keep what they have."""

    class Late(Queue):
        def see(self, x: Tensor) -> None:
            if self.trainer.round == 2:  # pyright: ignore[reportAttributeAccessIssue]
                super().see(x)

    federation = replace(digits().training(PRIVATE), module=Late)
    first, *rest = (now.ledger for now, _ in federation.play(FedAvg(), federation.plan(3)))
    assert first.updates.covered == rest[0].updates.covered == rest[1].updates.covered
    assert first.uncovered == {}
    assert [ledger.outlived for ledger in rest] == [("module state (queue)",)] * 2
    assert rest[1].updates.uncovered == {"delta (something beside messages and memory outlived a client)": 10}


# Learning rates that change are no data

SCHEDULES = {name: schedule_of(name, {"warmup": 2}, 3) for name in KINDS["schedule"].known}
SCHEDULES |= {"none": None, "one's own": lambda round: 1 / round}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda sgd: sgd,
    "epoch": lambda sgd: {"optimizer": sgd, "lr_scheduler": lr_scheduler.StepLR(sgd, 1, gamma=0.5)},
    "step": lambda sgd: _each_step(sgd, lr_scheduler.CosineAnnealingLR(sgd, 9)),
    "momentum too": lambda sgd: _each_step(sgd, lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=99)),
    "cyclic": lambda sgd: _each_step(sgd, lr_scheduler.CyclicLR(sgd, 0.01, 0.1, 3)),
    "one after another": lambda sgd: _each_step(
        sgd,
        lr_scheduler.SequentialLR(
            sgd, [lr_scheduler.LinearLR(sgd, 0.1, total_iters=2), lr_scheduler.ExponentialLR(sgd, 0.9)], [2]
        ),
    ),
    "several": lambda sgd: (
        [sgd],
        [
            lr_scheduler.LambdaLR(sgd, lambda n: 1 / (1 + n)),
            {"scheduler": lr_scheduler.StepLR(sgd, 1), "interval": "step"},
        ],
    ),
}


def _each_step(sgd: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> Any:
    return [sgd], [{"scheduler": scheduler, "interval": "step"}]


def _scheduled(scheduler: str) -> LightningModule:
    module = Plain()
    sgd = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    made = SCHEDULERS[scheduler](sgd)
    module.configure_optimizers = lambda: made
    return module


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_learning_rate_that_changes_is_not_taken_for_state_of_a_client(
    name: str, scheduler: str, digits: "Digits"
) -> None:
    """What was released, and how often, is what it is at a constant rate: two steps of each client in a round."""
    loop = LocalSGD(1, 2, dp=replace(DP, at_once=2 if name == "cosine" else 1), schedule=SCHEDULES[name])
    ledger = _ledger(digits(sizes=(4, 4)).training(loop), partial(_scheduled, scheduler), rounds=3)
    assert not ledger.uncovered
    assert {i: list(events.items()) for i, events in ledger.updates.covered.items()} == {
        0: [((0.5, 2.0), 6)],
        1: [((0.5, 2.0), 6)],
    }


def test_what_else_a_step_changes_in_the_optimizer_is_named_at_every_rate(digits: "Digits") -> None:
    loop = replace(PRIVATE, schedule=lambda round: 1 / round)
    assert "optimizer state (0.weight_decay)" in _ledger(digits().training(loop), InTheOptimizer).outlived


# Weights that are written


class Writes(Plain):
    def see(self, x: Tensor) -> None:
        next(self.network.parameters()).data.add_(1e-3 * x)


class WritesInPlace(Plain):
    def see(self, x: Tensor) -> None:
        with torch.no_grad():
            next(self.network.parameters()).mul_(1 + x)


@pytest.mark.parametrize("module", [Writes, WritesInPlace])
def test_weights_that_a_step_writes_are_not_covered(module: Callable[[], LightningModule], digits: "Digits") -> None:
    ledger = _ledger(digits().training(PRIVATE), module)
    assert ledger.uncovered == {"delta (the loss or add_to_grad writes the weights)": 10}
    assert not ledger.updates.covered


def test_weights_that_a_hook_of_the_method_writes_are_not_covered(digits: "Digits") -> None:
    class Adds(FedAvg):
        def client(self, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
            def add_to_grad(params: Any) -> None:
                next(iter(params.values())).data.add_(data.x.float().mean())

            right = work.local
            work.local = lambda *args, **more: right(*args, **more, add_to_grad=add_to_grad)
            try:
                return super().client(work, message, memory, data, round, seed)
            finally:
                del work.local

    federation = digits().training(PRIVATE)
    ledger = federation.play(Adds(), federation.plan(1))[-1][0].ledger
    assert ledger.uncovered == {"delta (the loss or add_to_grad writes the weights)": 5}


def test_weights_that_are_not_numbers_are_not_taken_for_written(digits: "Digits") -> None:
    class Diverges(Plain):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=float("inf"))

    federation = replace(digits().training(PRIVATE), module=Diverges)
    work = federation.work()
    trained = work.local(federation.model, federation.data.clients[0], 0)
    assert not trained.model.buffer.isfinite().all()
    assert trained.spent.covered


# The comparison itself


def test_values_are_compared_and_not_objects(digits: "Digits") -> None:
    work = digits().training(PRIVATE).work()
    module: Any = work.module

    def changes(before: Any, after: Any) -> set[str]:
        module.held = before
        first = watched.state(work, FedAvg())
        module.held = after
        found = watched.differing(first, watched.state(work, FedAvg()))
        del module.held
        return found

    nested = {"a": [torch.ones(2), (1, "b")], 3: np.arange(2)}
    alike = {"a": [torch.ones(2), (1, "b")], 3: np.arange(2)}
    round_about: list[Any] = [1]
    round_about.append(round_about)
    for same, other in ((nested, alike), (float("nan"), float("nan")), (torch.tensor(-0.0), torch.tensor(-0.0))):
        assert not changes(same, other)
    assert not changes(round_about, round_about)
    for one, two in (
        (torch.ones(2), torch.ones(2).double()), (torch.zeros(2), torch.zeros(1, 2)), (0.0, -0.0), (1, True),
        ([1, 2], [2, 1]), ({1}, {2}), ("a", "b"), (nested, {**alike, "a": [torch.zeros(2), (1, "b")]}),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)), (None, 0), ([[1], 2], [[1, 2]]),
    ):  # fmt: skip
        assert changes(one, two) == {"module state (held)"}, (one, two)


# Of ours nobody is blamed


@pytest.mark.parametrize("name", KINDS["algorithm"].known)
@pytest.mark.long
def test_no_method_of_ours_keeps_anything(name: str, digits: "Digits") -> None:
    constants = {"feddm": {"init": "noise", "iterations": 2, "least": 1, "ipc": 1}, "feddpms": {"quota": 2, "tries": 2}}
    method = parts.make("algorithm", name, constants.get(name, {}))
    loop = replace(PRIVATE, schedule=lambda round: 1 / round)
    federation = digits(sizes=(9, 16, 12), method=method, dropout=0.3).training(loop)
    for seed in SEEDS:
        ledger = federation.play(method, federation.plan(3, participation=0.7, seed=seed))[-1][0].ledger
        assert ledger.outlived == ()
        assert (
            ledger.commons.covered or ledger.updates.covered or name in ("fedproto", "one_shot", "fedcvae")
        )  # they send nothing with noise


EXAMPLES = Path(__file__).parent.parent / "examples"
HONEST = {name: {} for name in KINDS["model"].known if name not in ("resnet18", "vgg11")} | {
    f"{EXAMPLES}/{file}": fields
    for file, fields in {
        "own_model.py:Perceptron": {},
        "fine_tuning.py:Body": {},
        "two_nn.py:TwoNN": {},
        "autoencoder.py:BetaVAE": {"data.name": f"{EXAMPLES}/autoencoder.py:unlabelled", "partition.name": "iid"},
    }.items()
}
HONEST[f"{__file__}:Residual"] = {}


class Residual(LightningModule):
    """torchvision's network, with hyperparameters, a criterion, transforms and a scheduler."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        resnet = torchvision.models.resnet
        norm = partial(nn.GroupNorm, 2)
        self.net = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], n_classes, norm_layer=norm, width_per_group=64)
        self.net.conv1 = nn.Conv2d(shape[0], 64, 3)
        self.criterion, self.scale = nn.CrossEntropyLoss(), torchvision.transforms.Normalize(0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.scale(x.float() / 255))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.criterion(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [sgd], [lr_scheduler.CosineAnnealingLR(sgd, 10)]


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.long
def test_no_model_of_ours_keeps_anything(name: str, tmp_path: Path) -> None:
    fields = {"dp.local": True, "model.name": name, "data.limit": 40, "client.epochs": 1, "federation.rounds": 1}
    fields |= {"measure.every": 0, "tracking.wandb": "off", **HONEST[name]}
    config = presets.experiment("smoke", "digits", fields)
    try:
        said = run(config, tmp_path / "run", say=lambda _: None)["privacy"]
    except UserError as error:
        assert "BatchNorm" in str(error)  # noqa: PT017
        return
    assert said["epsilon_of_messages_if_secret"] > 0


# What a step reads in the optimizer


class Steers(Plain):
    """Its learning rate, momentum or the like follow the loss; they are as before when the training ends."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        made = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        self.steer = (lambda optimizer: lambda x: self.change(optimizer, x))(made)
        return made

    def change(self, optimizer: torch.optim.Optimizer, x: float) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 + 1e-3 * x

    def see(self, x: Tensor) -> None:
        self.steer(float(x))


class SteersMomentum(Steers):
    def change(self, optimizer: torch.optim.Optimizer, x: float) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].data.mul_(1 + x)


class SteersAnother(Steers):
    def change(self, optimizer: torch.optim.Optimizer, x: float) -> None:
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


@pytest.mark.parametrize("module", [Steers, SteersMomentum, SteersAnother])
def test_an_optimizer_that_follows_the_loss_is_not_covered(module: Any, digits: "Digits") -> None:
    ledger = _ledger(digits().training(replace(PRIVATE, epochs=2)), module)
    assert not ledger.updates.covered
    assert "delta (the loss or add_to_grad changes the optimizer)" in ledger.uncovered


def test_a_tensor_as_learning_rate_and_every_schedule_are_no_change(digits: "Digits") -> None:
    class Tensors(Plain):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), torch.tensor(0.1), amsgrad=True, foreach=False)

    assert not _ledger(digits().training(replace(PRIVATE, epochs=2)), Tensors).uncovered
