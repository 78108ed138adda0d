"""Under DP whatever carries data from a client's steps to later ones is named, and then nothing is covered."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fedcommons.accounting.privacy import OUTLIVED, Ledger
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import parts
from fedcommons.config.parts import KINDS
from fedcommons.core import watched
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.core.written import STEERED, WRITTEN
from fedcommons.seeds import set_default_generator
from fedcommons.testing import Federation, digits
from lightning_modules import Classifier
from lightning_modules.networks import Linear

DP = DPSGD(2.0, 1.0)
PRIVATE = LocalSGD(1, 5, dp=DP)


class OfItsOwn(torch.optim.SGD):
    """Keeps a number that its step has seen."""

    last = 0.0

    def step(self, closure: Any = None) -> Any:
        self.last = float(self.param_groups[0]["params"][0].detach().sum())
        return super().step(closure)


class Plain(Classifier):
    """Softmax regression; ``see`` gets the module and the mean pixel of every batch."""

    def __init__(
        self, begin: Callable[[Any], object] | None = None, see: Callable[[Any, Tensor], object] | None = None
    ) -> None:
        set_default_generator("initial weights of the tests")
        super().__init__(Linear((1, 8, 8), 10), lr=0.1, momentum=0.5)
        self.see, self.table = see, None
        self.optimizer_class: Any = torch.optim.SGD
        if begin:
            begin(self)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        if self.see:
            self.see(self, batch[0].float().mean() / 255)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters(), 0.1, momentum=0.5)


def _weight(module: Any) -> nn.Parameter:
    return next(module.network.parameters())


def _queue(module: Any) -> None:
    module.register_buffer("queue", torch.zeros(4), persistent=False)


def _enqueue(module: Any, x: Tensor) -> None:
    module.queue = torch.cat([module.queue[1:], x.view(1)])


def _group(module: Any) -> dict[str, Any]:
    return module.optimizers(False).param_groups[0]


def _steer_momentum(module: Any, x: Tensor) -> None:
    for state in module.optimizers(False).state.values():
        state["momentum_buffer"].data.mul_(1 + x)


def _write(module: Any, x: Tensor) -> None:
    with torch.no_grad():
        _weight(module).mul_(1 + x)


PLANTS: dict[str, tuple[Callable[[Any], object] | None, Callable[[Any, Tensor], object] | None, str, str]] = {
    "a buffer that is replaced": (_queue, _enqueue, "module state (queue)", OUTLIVED),
    "the optimizer's attribute": (
        lambda m: setattr(m, "optimizer_class", OfItsOwn), None, "optimizer state (last)", OUTLIVED
    ),
    "the optimizer's group": (
        None, lambda m, x: _group(m).update(weight_decay=float(x)), "optimizer state (0.weight_decay)", STEERED.why
    ),
    "the learning rate": (None, lambda m, x: _group(m).update(lr=0.1 + 1e-3 * float(x)), "", STEERED.why),
    "momentum": (None, _steer_momentum, "", STEERED.why),
    "weights": (None, _write, "", WRITTEN.why),
}  # fmt: skip
"""What a step may leave its batch in: how the module begins, what it does with a batch; the name, and why."""


def _ledger(federation: Federation, module: Callable[[], LightningModule], rounds: int = 2) -> Ledger:
    there = replace(federation, module=module)
    return there.play(FedAvg(), there.plan(rounds))[-1][0].ledger


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_module_keeps_is_named_and_nothing_is_covered(plant: str) -> None:
    begin, see, name, why = PLANTS[plant]
    loop = replace(PRIVATE, epochs=2, schedule=(lambda round: 1 / round) if "group" in plant else None)
    ledger = _ledger(digits((7, 9)).training(loop), partial(Plain, begin, see))
    assert not name or name in ledger.uncovered, ledger.uncovered
    assert not ledger.updates.covered
    assert f"delta ({why})" in ledger.uncovered
    if not name:
        assert ledger.uncovered == {f"delta ({why})": 4}
    assert ledger.of_all(0, 1e-5) is None
    assert ledger.largest_of_rounds(1e-5) is ledger.of_rounds(0, 1e-5) is None


class Honest(Plain):
    """It holds much, and training changes none of it but weights, dropout and what it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.names, self.rate = [torch.arange(4), np.ones(3)], {"a": {1, 2}}, float("nan")
        self.others, self.draw = [self], torch.Generator()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.log("pixels", batch[0].float().mean())
        return self.drop(super().training_step(batch, batch_idx))


class Tensors(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), torch.tensor(0.1), amsgrad=True, foreach=False)


@pytest.mark.parametrize("module", [Honest, Tensors])
def test_an_honest_module_is_not_blamed(module: Callable[[], LightningModule]) -> None:
    ledger = _ledger(digits((7, 9)).training(replace(PRIVATE, epochs=2)), module)
    assert not ledger.uncovered
    assert len(ledger.updates.covered) == 2


def test_what_is_named_once_counts_for_all_later_rounds() -> None:
    """Earlier rounds keep what they have; without DP nothing is compared."""
    assert _ledger(digits(), partial(Plain, _queue, _enqueue)).uncovered == {"delta": 10}

    def see(module: Any, x: Tensor) -> None:
        if module.trainer.round == 2:
            _enqueue(module, x)

    federation = replace(digits().training(PRIVATE), module=partial(Plain, _queue, see))
    first, *rest = (now.ledger for now, _ in federation.play(FedAvg(), federation.plan(3)))
    assert first.updates.covered == rest[0].updates.covered == rest[1].updates.covered
    assert first.uncovered == {}
    assert [ledger.outlived for ledger in rest] == [("module state (queue)",)] * 2
    assert rest[1].updates.uncovered == {f"delta ({OUTLIVED})": 10}


def _each_step(sgd: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler) -> Any:
    return [sgd], [{"scheduler": scheduler, "interval": "step"}]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda sgd: sgd,
    "momentum too": lambda sgd: _each_step(sgd, lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=99)),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_learning_rate_that_changes_is_not_taken_for_state_of_a_client(scheduler: str) -> None:
    """The release and its count are those at a constant rate: two steps of each client in a round."""

    def scheduled() -> LightningModule:
        module = Plain()
        made = SCHEDULERS[scheduler](torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
        module.configure_optimizers = lambda: made
        return module

    loop = LocalSGD(1, 2, dp=replace(DP, at_once=2 if scheduler == "none" else 1), schedule=lambda round: 1 / round)
    ledger = _ledger(digits(sizes=(4, 4)).training(loop), scheduled, rounds=3)
    assert not ledger.uncovered
    covered = {i: list(events.items()) for i, events in ledger.updates.covered.items()}
    assert covered == {0: [((0.5, 2.0), 6)], 1: [((0.5, 2.0), 6)]}


def test_values_are_compared_and_not_objects() -> None:
    work = digits().training(PRIVATE).work()
    module: Any = work.module

    def changes(before: Any, after: Any) -> set[str]:
        module.held = before
        first = watched.state(work, FedAvg())
        module.held = after
        found = watched.differing(first, watched.state(work, FedAvg()))
        del module.held
        return found

    round_about: list[Any] = [1]
    round_about.append(round_about)
    for same, other in (([torch.ones(2)], [torch.ones(2)]), (float("nan"),) * 2, (round_about,) * 2, (sys.stdout,) * 2):
        assert not changes(same, other)
    for one, two in (
        (torch.ones(2), torch.ones(2).double()), (torch.zeros(2), torch.zeros(1, 2)), (0.0, -0.0), (1, True),
        ([1, 2], [2, 1]), ({1}, {2}), ("a", "b"), (None, 0), ([[1], 2], [[1, 2]]),
    ):  # fmt: skip
        assert changes(one, two) == {"module state (held)"}, (one, two)


@pytest.mark.parametrize("name", KINDS["algorithm"].known)
@pytest.mark.long
def test_no_method_of_ours_keeps_anything(name: str, quick: Callable[[str], Algorithm]) -> None:
    constants = {"feddm": {"init": "noise", "iterations": 2, "least": 1, "ipc": 1}, "feddpms": {"quota": 2, "tries": 2}}
    method = parts.make("algorithm", name, constants[name]) if name in constants else quick(name)
    loop = replace(PRIVATE, schedule=lambda round: 1 / round)
    federation = digits(sizes=(9, 16, 12), method=method, dropout=0.3).training(loop)
    ledger = federation.play(method, federation.plan(2, participation=0.7))[-1][0].ledger
    assert ledger.outlived == ()
    sends_no_noise = name in ("fedproto", "one_shot", "fedcvae")
    assert ledger.commons.covered or ledger.updates.covered or sends_no_noise
