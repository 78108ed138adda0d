"""Every kind of store in which a client's data could outlive it differs when it has changed, or is named as unknown."""

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
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core import watched
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.local import LocalSGD
from fedcommons.testing import digits

CONTEXT: contextvars.ContextVar[list[float]] = contextvars.ContextVar("CONTEXT")

FEDERATION = digits().training(LocalSGD(1, 5, dp=DPSGD(2.0, 1.0)))


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


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # of kinds that torch deprecates, and a file that is not closed
def test_a_store_that_changes_is_named_and_one_that_does_not_is_not(kind: str) -> None:
    (make, change), work = KINDS[kind], FEDERATION.work()
    held: Any = make()
    vars(work.module)["held"] = held
    before = watched.state(work, FedAvg())
    same = watched.differing(before, watched.state(work, FedAvg()))
    if isinstance(new := change(held), tuple) and new[:1] == ("new",):
        vars(work.module)["held"] = new[1]
    names = watched.differing(before, watched.state(work, FedAvg()))
    assert any(name.startswith("module state (held)") for name in names)
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
    "global state (one.ROWS)": "one.ROWS = (0.5,)",
    "global state (two.QUEUE)": "two.QUEUE.append(0.5)",
    "global state (package.three.ROWS)": "three.ROWS.append(0.5)",
    "global state (package.four.cached)": "four.cached(0.5)",
    "class state (Module.seen)": "one.Module.seen = 0.5",
    "work (names)": "work.seen = 0.5",
    "optimizer state (seen)": "work.optimizer.seen = 0.5",
    "module state (network.last.seen)": "work.module.network.last.seen = 0.5",
    "method state (seen)": "method.seen = 0.5",
    "class state (Method.rows)": "Method.rows.append(0.5)",
    "commons": "commons.append(0.5)",
}


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
    before = watched.state(work, method, {"commons": commons})
    assert not watched.differing(before, watched.state(work, method, {"commons": commons}))
    exec(PLACES[place], {**folder, "work": work, "method": method, "Method": Method, "commons": commons})
    assert place in watched.differing(before, watched.state(work, method, {"commons": commons}))
