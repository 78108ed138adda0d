"""Classes, functions, objects and data of a notebook as fields of an experiment, and the identity of their code.

``Cells`` plays a notebook: Python knows the source of each cell, as in a kernel, and the classes are in ``__main__``.
"""

import linecache
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from report_runs import quiet
from torch.utils.data import Dataset, TensorDataset

from fedcommons import Experiment, experiment, load, run, sweep
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.config import live_objects
from fedcommons.errors import UserError

X = np.random.default_rng(0).normal(size=(300, 4))
Y = (X[:, 0] > 0).astype(int)
QUICK = {"wandb": "off", "partition": "iid", "federation.rounds": 2, "client.epochs": 1, "measure.every": 0}
LAB = """
from dataclasses import dataclass
from torch import nn
from fedcommons import flat, scale
from fedcommons.algorithms.fedavg import FedAvg


def factor(mu):
    return SCALE * (1 - mu)


SCALE = 1.0


@dataclass(frozen=True)
class Mine(FedAvg):
    mu: float = 0.25

    def merge(self, executor, state, total, replies, round, seed):
        state = super().merge(executor, state, total, replies, round, seed)
        return {**state, "model": scale(flat(state, "model"), factor(self.mu))}


class Net(nn.Module):
    def __init__(self, shape, n_classes, width: int = 8):
        super().__init__()
        self.first, self.last = nn.Linear(shape[0], width), nn.Linear(width, n_classes)

    def forward(self, x):
        return self.last(self.first(x).relu())
"""


class Cells(dict[str, Any]):
    """The variables of a notebook in which some cells have run."""

    def __init__(self, *cells: str, has_source: bool = True) -> None:
        super().__init__(__name__="__main__")
        for text in cells:
            self.run(text, has_source)

    def run(self, text: str, has_source: bool) -> None:
        name = f"<cell {abs(hash(text))}>" if has_source else "<string>"
        if has_source:
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
        exec(compile(text, name, "exec"), self)


def make(**fields: Any) -> Experiment:
    return experiment("smoke", **{"model": "linear", "data": (X, Y), **QUICK, **fields})


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live_objects, "objects", {})
    return live_objects.objects.clear


def test_a_class_trains_to_the_same_bits_from_a_cell_as_from_a_file(tmp_path: Path) -> None:
    lab = Cells(LAB)
    (tmp_path / "lab.py").write_text(LAB, encoding="utf-8")
    of_cell = make(algorithm=lab["Mine"](mu=0.5), model=partial(lab["Net"], width=3))
    of_file = make(algorithm="lab.py:Mine", model="lab.py:Net", **{"mine.mu": 0.5, "model.width": 3})
    assert (of_cell.algorithm, of_cell.constants, of_cell.model.constants) == (
        "__main__:Mine",
        {"mu": 0.5},
        {"width": 3},
    )
    one, two = run(of_cell, say=quiet), run(of_file, "two", say=quiet)
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()
    kinds = {path.suffix for path in one.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".yaml", ".safetensors"}  # no pickle
    assert one.model(torch.zeros(1, 4)).shape == (1, 2)
    assert make(algorithm=FedProx(mu=0.3)) == make(algorithm="fedprox", **{"fedprox.mu": 0.3})


def test_a_run_resumes_with_the_same_source_in_another_process(new_process: Callable[[], None]) -> None:
    def of(text: str, rounds: int) -> Experiment:
        new_process()
        lab = Cells("pass", f"\n\n{text}")
        return make(algorithm=lab["Mine"](), model=lab["Net"], rounds=rounds)

    run(of(LAB, 2), "run", say=quiet)
    assert run(of(LAB, 3), "run", say=quiet).rounds["round"].tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"another source\.algorithm .*Mine changed"):
        run(of(LAB.replace("SCALE = 1.0", "SCALE = 2.0"), 3), "run", say=quiet)
    new_process()
    with pytest.raises(UserError, match=r"__main__:Net.*object of the Python process"):
        load("run", may_run=["__main__:Net"]).model  # noqa: B018


CHANGES = [
    ("k = 1\ndef it(shape): return k", "k = 1", "k = 2"),
    ("k = 1\ndef it(shape, width=k): return width", "k = 1", "k = 2"),
    ("def enclose(k):\n    def it(shape): return k\n    return it\nit = enclose(1)", "(1)", "(2)"),
    ("def wrap(f):\n    def inner(shape): return f()\n    return inner\n@wrap\ndef it(): return 1", "f()", "-f()"),
    (
        "def wrap(f):\n    def inner(shape): return f()\n    return inner\n@wrap\ndef it(): return 1",
        "return 1",
        "return 2",
    ),
    ("class Base:\n    def f(self): return 1\nclass it(Base): pass", "return 1", "return 2"),
    ("k = 1\nclass it:\n    rate = k", "k = 1", "k = 2"),
    ("class it:\n    def __init__(self, shape): self.f = lambda: 1", "lambda: 1", "lambda: 2"),
    ("import torch\nk = torch.ones(3)\nit = lambda shape: k", "ones", "zeros"),
    ("class Other: pass\nk = Other()\nk.a = [1]\nit = lambda shape: k", "[1]", "[2]"),
    ("from typing import NamedTuple\nclass k(NamedTuple):\n    a: int = 1\ndef it(shape): return k", "= 1", "= 2"),
    ("import lab_helper as h\nit = lambda shape: h.VALUE", "lab_helper", "lab_other"),
]
"""A cell, and what another cell changes, mostly outside of the source of the component ``it``."""


@pytest.mark.parametrize(("text", "old", "new"), CHANGES)
def test_the_hash_of_code_covers_what_the_code_uses(tmp_path: Path, text: str, old: str, new: str) -> None:
    for name, value in (("lab_helper", 1), ("lab_other", 2)):
        (tmp_path / f"{name}.py").write_text(f"VALUE = {value}\n", encoding="utf-8")
    pytest.MonkeyPatch().syspath_prepend(tmp_path)
    cells = [Cells(text), Cells(f"other = 1\n\n{text}"), Cells(text.replace(old, new))]
    first, again, changed = (make(model=cell["it"]).source["model"] for cell in cells)
    assert first == again
    assert first != changed


def test_an_experiment_does_not_run_with_changed_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Cells(LAB)
    old, lambdas = make(algorithm=lab["Mine"]()), Cells("it = [lambda shape: 1, lambda shape: 1 + 1]")["it"]
    lab["SCALE"] = 2.0
    with pytest.raises(UserError, match=r"Mine.*not what it was"):
        run(old, say=quiet)
    assert len({make(model=one).model.name for one in lambdas}) == 2  # both begin in the same line
    (tmp_path / "near.py").write_text("def f(): return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    cell = Cells("import near\nit = lambda shape: near.f()")
    make(model=cell["it"])
    (tmp_path / "near.py").write_text("def f(): return 2\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"near\.py has changed"):
        make(model=cell["it"])


def test_code_without_source_runs_and_says_that_it_has_no_name(tmp_path: Path) -> None:
    lab, said = Cells("\n\n\n\n" + LAB, has_source=False), list[str]()
    with pytest.warns(UserWarning, match=r"Mine has no source.*no name"):
        wanted = make(algorithm=lab["Mine"]())
    assert run(wanted, "run", say=said.append).summary["rounds"] == 2
    assert "no name" in said[0]
    with pytest.raises(UserError, match=r"run holds a run.*no source"):
        run(wanted, "run", say=quiet)


class Rows(Dataset):
    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(X[i]) + self.noise * torch.rand(4), int(Y[i])


FRAME = pd.DataFrame(X, columns=list("abcd")).assign(label=Y)


def test_equal_examples_are_one_data_set_in_every_form() -> None:
    x, y = X.copy(), Y.copy()
    forms = (x, y), (torch.from_numpy(x), y), Rows(), TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), FRAME
    names = {make(data=form).data.name for form in (*forms, (FRAME.rename(columns={"label": "price"}), "price"))}
    assert len(names) == 1
    wanted = make(data=(x, y))
    x *= 0  # the experiment has a copy
    assert names == {wanted.data.name} != {make(data=(x, y)).data.name}
    assert run(wanted, say=quiet).dataset.test.x.any()
    by_group = make(data=FRAME.assign(group=list("uvw") * 100), partition="by_group")
    assert run(by_group, say=quiet).summary["n_clients"] == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": Rows(noise=1.0)}, "random transform"), ({"data": FRAME.assign(a="red")}, "column 'a' contains str"),
    ({"data": FRAME.assign(a=[np.nan] + [0.0] * 299)}, "NaN.* in column 'a'"),
    ({"data": FRAME.assign(a=pd.array([None] + [1] * 299, dtype="Int64"))}, "NaN.* in column 'a'"),
    ({"data": FRAME.assign(label="yes")}, "labels must be numbers"),
    ({"data": FRAME[["a", "b"]]}, "column y or label or target"), ({"data": (FRAME, "lable")}, "'label'"),
    ({"model": torch.nn.Linear(4, 2)}, "model.name takes a class"), ({"model": partial(torch.nn.Linear, 4)}, "by name"),
    ({"algorithm": FedProx(mu=0.1), "fedprox.mu": 0.1}, "fedprox.mu is set twice"),
]  # fmt: skip
OUTSIDE = "import itertools, threading\nlock, count = threading.Lock(), itertools.count()"
OF_OBJECT = {
    "table: object = None|table=[{}]": "attribute table holds a dict",
    "share: float = 0.5|": "constant share",
    "check: bool = True|": "constant check",
    "participants: int = 3|": "constant participants",
    "personal: bool = False|": "constant personal",
    "n: int = 1\n    def __post_init__(self): self.__dict__['n'] = self.n + 1|": "n does not follow",
    "n: int = 1\n    def __post_init__(self): self.__dict__['bag'] = next(count)|": "bag does not follow",
    "n: int = 1\n    def f(self): return lock|": "uses lock, a lock",
}
"""A field of an algorithm, and the constants of an object -> words of the error."""


def test_what_a_config_cannot_state_is_refused_in_a_sentence() -> None:
    for fields, words in REFUSED:
        with pytest.raises(UserError, match=words):
            make(**fields)
    for text, words in OF_OBJECT.items():
        field, constants = text.split("|")
        cells = Cells(LAB, f"{OUTSIDE}\n@dataclass(frozen=True)\nclass It(FedAvg):\n    {field}\nit = It({constants})")
        with pytest.raises(UserError, match=words):
            make(algorithm=cells["it"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_objects_reach_actors_and_trials(tmp_path: Path) -> None:
    lab = Cells(LAB, "it = lambda shape, n_classes: Net(shape, n_classes, 3)")
    fields = {"algorithm": lab["Mine"](), "model": lab["it"]}
    one, two = (run(make(**fields, **{"federation.executor": e}), say=quiet) for e in ("serial", "ray_actors"))
    assert (one.folder / "rounds.jsonl").read_bytes() == (two.folder / "rounds.jsonl").read_bytes()
    frame = sweep([make(**fields, seed=seed) for seed in (0, 1)], tmp_path / "sweep")
    assert frame["last_accuracy"].iloc[0] == one.summary["last_accuracy"]
