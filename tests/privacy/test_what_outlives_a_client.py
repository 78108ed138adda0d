"""What carries data from a client's steps to later ones: each kind of store is named, and then DP covers nothing."""

import contextvars
import importlib
import logging
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fedcommons import Algorithm, LocalSGD, set_default_generator
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import registry
from fedcommons.config.registry import KINDS
from fedcommons.core import state_leaks
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.ledger import OUTLIVED, Ledger
from fedcommons.privacy.weight_guard import STEERED, WRITTEN
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
        next(module.network.parameters()).mul_(1 + x)


PLANTS: dict[str, tuple[Callable[[Any], object] | None, Callable[[Any, Tensor], object] | None, str, str]] = {
    "a buffer that is replaced": (_queue, _enqueue, "module state (queue)", OUTLIVED),
    "the optimizer's attribute": (lambda m: setattr(m, "optimizer_class", OfItsOwn), None, "optimizer state (last)",
                                  OUTLIVED),
    "the optimizer's group": (None, lambda m, x: _group(m).update(weight_decay=float(x)),
                              "optimizer state (0.weight_decay)", STEERED.reason),
    "the learning rate": (None, lambda m, x: _group(m).update(lr=0.1 + 1e-3 * float(x)), "", STEERED.reason),
    "momentum": (None, _steer_momentum, "", STEERED.reason), "weights": (None, _write, "", WRITTEN.reason),
}  # fmt: skip
"""What a step may leave its batch in: how the module begins, what it does with a batch; the name, and why."""


def _ledger(federation: Federation, module: Callable[[], LightningModule], rounds: int = 2) -> Ledger:
    there = replace(federation, module=module)
    return there.run(FedAvg(), there.plan(rounds))[-1][0].ledger


@pytest.mark.parametrize("plant", PLANTS)
def test_data_that_a_step_leaves_in_a_module_is_reported_and_no_release_is_covered(plant: str) -> None:
    begin, see, name, why = PLANTS[plant]
    loop = replace(PRIVATE, epochs=2, schedule=(lambda round: 1 / round) if "group" in plant else None)
    ledger = _ledger(digits((7, 9)).training(loop), partial(Plain, begin, see))
    assert not name or name in ledger.uncovered, ledger.uncovered
    assert not ledger.updates.covered
    assert f"delta ({why})" in ledger.uncovered
    if not name:
        assert ledger.uncovered == {f"delta ({why})": 4}
    assert ledger.epsilon_of_all(0, 1e-5) is None
    assert ledger.largest_epsilon_of_rounds(1e-5) is ledger.epsilon_of_rounds(0, 1e-5) is None


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
    first, *rest = (now.ledger for now, _ in federation.run(FedAvg(), federation.plan(3)))
    assert first.updates.covered == rest[0].updates.covered == rest[1].updates.covered
    assert first.uncovered == {}
    assert [ledger.outlived for ledger in rest] == [("module state (queue)",)] * 2
    assert rest[1].updates.uncovered == {f"delta ({OUTLIVED})": 10}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda sgd: sgd,
    "momentum too": lambda sgd: (
        [sgd],
        [{"scheduler": lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=99), "interval": "step"}],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_learning_rate_that_changes_is_not_taken_for_state_of_a_client(scheduler: str) -> None:
    """The release and its count are those at a constant rate: two steps of each client in a round."""

    def scheduled() -> LightningModule:
        module = Plain()
        optimizers = SCHEDULERS[scheduler](torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
        module.configure_optimizers = lambda: optimizers
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
        module.extra = before
        first = state_leaks.state(work, FedAvg())
        module.extra = after
        names = state_leaks.differing(first, state_leaks.state(work, FedAvg()))
        del module.extra
        return names

    round_about: list[Any] = [1]
    round_about.append(round_about)
    for same, other in (([torch.ones(2)], [torch.ones(2)]), (float("nan"),) * 2, (round_about,) * 2, (sys.stdout,) * 2):
        assert not changes(same, other)
    for value, other in (
        (torch.ones(2), torch.ones(2).double()), (torch.zeros(2), torch.zeros(1, 2)), (0.0, -0.0), (1, True),
        ([1, 2], [2, 1]), ({1}, {2}), ("a", "b"), (None, 0), ([[1], 2], [[1, 2]]),
    ):  # fmt: skip
        assert changes(value, other) == {"module state (extra)"}, (value, other)


@pytest.mark.parametrize("name", KINDS["algorithm"].components)
@pytest.mark.long
def test_no_method_of_ours_keeps_anything(name: str, quick: Callable[[str], Algorithm]) -> None:
    constants = {"feddm": {"init": "noise", "iterations": 2, "least": 1, "ipc": 1}, "feddpms": {"quota": 2, "tries": 2},
                 "fedlap": {"classes": "all", "steps": 2, "server_steps": 2}}  # fmt: skip
    method = registry.make("algorithm", name, constants[name]) if name in constants else quick(name)
    loop = replace(PRIVATE, schedule=lambda round: 1 / round)
    federation = digits(sizes=(9, 16, 12), method=method, dropout=0.3).training(loop)
    ledger = federation.run(method, federation.plan(2, participation=0.7))[-1][0].ledger
    assert ledger.outlived == ()
    sends_no_noise = name in ("fedproto", "one_shot", "fedcvae", "ifca", "qfedavg")
    assert ledger.commons.covered or ledger.updates.covered or sends_no_noise


# Kinds of stores and their places

CONTEXT: contextvars.ContextVar[list[float]] = contextvars.ContextVar("CONTEXT")

FEDERATION = digits().training(PRIVATE)


class Slots:
    __slots__ = ("__dict__", "__weakref__", "row")

    def __init__(self) -> None:
        self.row = 0.0


REFERRED = Slots()


def _closure(rows: list[float]) -> Any:
    return lambda: rows


def _generator() -> Iterator[float]:
    rows = [0.0, 1.0]
    yield from rows


def _fill(x: torch.Tensor) -> None:
    x.detach().fill_(1.0)


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda x: setattr(x, name, value)


def _new(make: Callable[[], Any], value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return a kind whose store cannot change: the attribute is set to another value."""
    return make, lambda _: ("new", value)


STORES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "memoryview": (lambda: memoryview(bytearray(2)), lambda x: x.__setitem__(0, 1)),
    # tensors and arrays
    "array's view": (lambda: np.zeros(4)[:2], lambda x: x.base.__setitem__(3, 1.0)),
    "array of objects": (lambda: np.array([[0.0], None], dtype=object), lambda x: x[0].append(1.0)),
    "tensor": (lambda: torch.zeros(2), _fill),
    "tensor's attribute": (lambda: torch.zeros(2), _set("row", 1.0)),
    "tensor's hook": (lambda: nn.Parameter(torch.zeros(2)), lambda x: x.register_hook(lambda g: g)),
    "tensor's gradient": (lambda: nn.Parameter(torch.zeros(2)), _set("grad", torch.ones(2))),
    "tensor's memory beyond a view": (lambda: torch.zeros(4)[:2], lambda x: x.as_strided((4,), (1,)).fill_(1.0)),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda x: x._values().fill_(2.0)),
    "compressed sparse tensor": (lambda: torch.eye(2).to_sparse_csr(), lambda x: x.values().fill_(2.0)),
    "sparse columns": (lambda: torch.eye(2).to_sparse_csc(), lambda x: x.values().fill_(2.0)),
    "nested tensor": (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), lambda x: _fill(x[0])),
    "tensor with a graph": (lambda: torch.zeros(2, requires_grad=True) * 2, _fill),
    "quantised tensor": (
        lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8), lambda x: x.copy_(torch.ones(2))
    ),
    # containers
    "deque": (deque, lambda x: x.append(1.0)),
    # objects
    "slot": (Slots, _set("row", 1.0)),
    "class": (lambda: type("Made", (), {"row": 0.0}), _set("row", 1.0)),
    "module that is no file": (lambda: types.ModuleType("made"), _set("row", 1.0)),
    "logger": (lambda: logging.getLogger("of the tests"), _set("row", 1.0)),
    # functions and iterators
    "function's attribute": (lambda: lambda: None, _set("row", 1.0)),
    "closure": (lambda: _closure([]), lambda x: x().append(1.0)),
    "function's constant": _new(lambda: eval("lambda: 0.5"), eval("lambda: 0.25")),
    "iterator": (lambda: iter([1.0, 2.0]), lambda x: next(x)),
    "generator": (_generator, lambda x: next(x)),
    "weak reference": (lambda: weakref.ref(REFERRED), lambda x: setattr(REFERRED, "row", 1.0)),
    "context variable": (lambda: CONTEXT, lambda x: x.set([1.0])),
    # generators of random numbers
    "numpy's generator": (lambda: np.random.default_rng(0), lambda x: x.random()),
    # what cannot be read is named
    "file": (lambda: Path(os.devnull).open("w", encoding="utf-8"), lambda x: x.close()),  # noqa: SIM115
}  # fmt: skip

UNKNOWN = {"tensor with a graph", "file"}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.filterwarnings("ignore")  # of kinds that torch deprecates, and a file that is not closed
def test_a_store_that_changes_is_named_and_one_that_does_not_is_not(kind: str) -> None:
    (make, change), work = STORES[kind], FEDERATION.work()
    extra: Any = make()
    vars(work.module)["extra"] = extra
    before = state_leaks.state(work, FedAvg())
    same = state_leaks.differing(before, state_leaks.state(work, FedAvg()))
    if isinstance(new := change(extra), tuple) and new[:1] == ("new",):
        vars(work.module)["extra"] = new[1]
    names = state_leaks.differing(before, state_leaks.state(work, FedAvg()))
    assert any(name.startswith("module state (extra)") for name in names)
    assert any("cannot tell" in name for name in same) == bool(same) == (kind in UNKNOWN), same


FILES = {
    "one.py": """
import torch
from pytorch_lightning import LightningModule
from lightning_modules import Classifier
from lightning_modules.networks import Linear
import two as other
HANDLE = [lambda: ROWS]
ROWS = ()
class Module(Classifier):
    def __init__(self):
        super().__init__(Linear((1, 8, 8), 10), lr=0.1)
    def forward(self, x):
        import package.three
        from package import four
        return super().forward(x)
""",
    "two.py": "from collections import deque\nQUEUE = deque()\n",
    "package/__init__.py": "",
    "package/three.py": "ROWS = []\n",
    "package/four.py": "def cached(x, rows=[]):\n    rows.append(x)\n",
}

PLACES: dict[str, str] = {
    "global state (one.ROWS)": "one.ROWS = (0.5,)", "global state (two.QUEUE)": "two.QUEUE.append(0.5)",
    "global state (package.three.ROWS)": "three.ROWS.append(0.5)",
    "global state (package.four.cached)": "four.cached(0.5)", "class state (Module.seen)": "one.Module.seen = 0.5",
    "work (names)": "work.seen = 0.5", "optimizer state (seen)": "work.optimizer.seen = 0.5",
    "module state (network.last.seen)": "work.module.network.last.seen = 0.5",
    "method state (seen)": "method.seen = 0.5", "class state (Method.rows)": "Method.rows.append(0.5)",
    "commons": "commons.append(0.5)",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, types.ModuleType]]:
    root = tmp_path_factory.mktemp("files")
    (root / "package").mkdir()
    for name, text in FILES.items():
        (root / name).write_text(text, encoding="utf-8")
    sys.path.insert(0, str(root))
    try:
        names = ("one", "two", "package", "package.three", "package.four")
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(root))
        for name in names:
            del sys.modules[name]


@pytest.mark.parametrize("place", PLACES)
def test_a_store_is_named_wherever_it_stands(place: str, folder: Any) -> None:
    class Method(FedAvg):
        rows: ClassVar[list[float]] = []

    work, method, commons = replace(FEDERATION, module=folder["one"].Module).work(), Method(), list[float]()
    before = state_leaks.state(work, method, {"commons": commons})
    assert not state_leaks.differing(before, state_leaks.state(work, method, {"commons": commons}))
    exec(PLACES[place], {**folder, "work": work, "method": method, "Method": Method, "commons": commons})
    assert place in state_leaks.differing(before, state_leaks.state(work, method, {"commons": commons}))
