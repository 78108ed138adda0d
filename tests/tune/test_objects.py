"""Classes, functions, objects and data as fields of an experiment, and what identifies them.

``cells`` plays a notebook, whose classes are in ``__main__``.
"""

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
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
from fedcommons.config import live_objects, registry
from fedcommons.errors import UserError
from fedcommons.tune.sweep import cell

pytestmark = pytest.mark.filterwarnings("ignore:.*is not from a module")
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


def cells(*texts: str) -> dict[str, Any]:
    """Return the variables of a notebook in which cells with these texts have run."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    for text in texts:
        exec(text, variables)
    return variables


def make(**fields: Any) -> Experiment:
    return experiment("smoke", **{"model": "linear", "data": (X, Y), **QUICK, **fields})


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live_objects, "objects", {})
    return live_objects.objects.clear


def test_a_class_trains_to_the_same_bits_from_a_cell_as_from_a_file(tmp_path: Path) -> None:
    lab = cells(LAB)
    (tmp_path / "lab.py").write_text(LAB, encoding="utf-8")
    of_cell = make(algorithm=lab["Mine"](mu=0.5), model=partial(lab["Net"], width=3))
    of_file = make(algorithm="lab.py:Mine", model="lab.py:Net", **{"mine.mu": 0.5, "model.width": 3})
    assert (of_cell.algorithm, of_cell.constants, of_cell.model.constants) == (
        "__main__:Mine",
        {"mu": 0.5},
        {"width": 3},
    )
    first, second = run(of_cell, say=quiet), run(of_file, "two", say=quiet)
    for name in ("rounds.jsonl", "model.safetensors"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    kinds = {path.suffix for path in first.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".yaml", ".safetensors"}  # no pickle
    assert first.model(torch.zeros(1, 4)).shape == (1, 2)
    assert make(algorithm=FedProx(mu=0.3)) == make(algorithm="fedprox", **{"fedprox.mu": 0.3})


def test_code_of_a_notebook_runs_once_and_is_never_taken_for_other_code(new_process: Callable[[], None]) -> None:
    """Equal or not, as no hash of its source would cover all that it uses, such as SCALE."""
    lab, messages = cells(LAB), list[str]()
    with pytest.warns(UserWarning, match=r"Mine is not from a module"):
        wanted = make(algorithm=lab["Mine"](), model=lab["Net"])
    first = run(wanted, "run", say=messages.append)
    assert "resume" in messages[0]
    lab["SCALE"] = 2.0
    for again in (lambda: run(wanted, "run", say=quiet), lambda: sweep([wanted], ".")):
        Path(cell(wanted, {}).name).symlink_to("run")
        with pytest.raises(UserError, match=r"holds a run.*not from a module"):
            again()
        Path(cell(wanted, {}).name).unlink()
    other = make(model=cells(LAB.replace("* (1 - mu)", ""))["Net"])
    assert other.source["model"] != wanted.source["model"]
    for stale in (lambda: first.model, lambda: run(wanted, "other", say=quiet)):
        with pytest.raises(UserError, match=r"Net.* (was defined again|is not the code)"):
            stale()
    new_process()
    with pytest.raises(UserError, match=r"__main__:Net.*object of the Python process"):
        load("run", may_run=["__main__:Net"]).model  # noqa: B018


def test_a_class_of_a_module_has_the_modules_name_unless_the_module_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closure of the module, or a function that wraps a class, is no object that the module's name stands for."""
    (tmp_path / "lab_of_objects.py").write_text(LAB + "\n\ndef of(w):\n    class Inner(Net): pass\n    return Inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    lab = import_module("lab_of_objects")
    assert make(model=lab.Net).model.name == "lab_of_objects:Net"
    names = {make(model=lab.of(3)).model.name, make(model=lab.of(30)).model.name}
    assert names == {"__main__:Inner"}

    @wraps(registry.find("model", "linear"), updated=())
    def net(shape: Any, n_classes: int) -> Any:
        return lab.Net(shape, n_classes)

    assert make(data=lambda: (X, Y)).data.name == "__main__:lambda_data"  # its test examples depend on its name
    assert make(model=net).model.name != "linear"


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
    ({"data": pd.concat([FRAME, FRAME[["a"]]], axis=1)}, "same name"),
    ({"model": partial(Rows, noise=Rows)}, "noise holds"),  # pyright: ignore[reportArgumentType]
    ({"generator.name": lambda: None, "sharing": "shuffled_synthetic"}, "generator.name .*must come from a module"),
    ({"data": FRAME[["a", "b"]]}, "column y or label or target"), ({"data": (FRAME, "lable")}, "'label'"),
    ({"model": torch.nn.Linear(4, 2)}, "model.name takes a class"), ({"model": partial(torch.nn.Linear, 4)}, "by name"),
    ({"algorithm": FedProx(mu=0.1), "fedprox.mu": 0.1}, "fedprox.mu is set twice"),
]  # fmt: skip
OUTSIDE = "import itertools\ncount = itertools.count()"
OF_OBJECT = {
    "table: object = None|table=[{}]": "attribute table holds a dict",
    "share: float = 0.5|": "constant share",
    "check: bool = True|": "constant check",
    "participants: int = 3|": "constant participants",
    "personal: bool = False|": "constant personal",
    "n: int = 1\n    def __post_init__(self): self.__dict__['n'] = self.n + 1|": "differs from this one",
    "n: int = 1\n    def __post_init__(self): self.__dict__['bag'] = next(count)|": "differs from this one",
}
"""A field of an algorithm, and the constants of an object -> words of the error."""


def test_what_a_config_cannot_state_is_refused_in_a_sentence() -> None:
    for fields, words in REFUSED:
        with pytest.raises(UserError, match=words):
            make(**fields)
    for text, words in OF_OBJECT.items():
        field, constants = text.split("|")
        variables = cells(
            LAB, f"{OUTSIDE}\n@dataclass(frozen=True)\nclass It(FedAvg):\n    {field}\nit = It({constants})"
        )
        with pytest.raises(UserError, match=words):
            make(algorithm=variables["it"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_objects_reach_actors_and_trials(tmp_path: Path) -> None:
    lab = cells(LAB, "it = lambda shape, n_classes: Net(shape, n_classes, 3)")
    fields = {"algorithm": lab["Mine"](), "model": lab["it"], "evaluate.new_clients": 0.4, "data.client_test": 0.2}
    first, second = (run(make(**fields, **{"federation.executor": e}), say=quiet) for e in ("serial", "ray_actors"))
    assert (first.folder / "rounds.jsonl").read_bytes() == (second.folder / "rounds.jsonl").read_bytes()
    frame = sweep([make(**fields, seed=seed) for seed in (0, 1)], tmp_path / "sweep")
    assert frame["last_accuracy"].iloc[0] == first.summary["last_accuracy"]
