"""fedcommons from Python: runs, sweeps, arguments that are refused, and a process that is afterwards as before."""

import ast
import os
import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch

import fedcommons as fc
from fedcommons import experiment, run, sweep
from fedcommons.errors import UserError
from fedcommons.runs import inputs
from fedcommons.tensors import flatten

FIELDS = {"wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "data.limit": 80}


def quiet(text: str) -> None: ...


def test_type_checkers_see_the_names_where_they_stand() -> None:
    tree = ast.parse(Path(fc.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {(a.name, node.module) for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert sorted(name for name, _ in seen) == sorted(fc.__all__)
    assert set(fc.__all__) <= set(dir(fc))
    assert all(getattr(import_module(str(module)), name) is getattr(fc, name) for name, module in seen)
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        fc.runn  # noqa: B018


def test_a_result_has_summary_rounds_and_the_model_that_was_evaluated(tmp_path: Path) -> None:
    wanted = experiment("smoke", values={**FIELDS, "model.batch_norm": True})
    result = run(wanted, str(tmp_path / "run"), say=quiet)
    test = inputs.load(wanted.data).test
    with torch.no_grad():
        right = (result.model(test.x).argmax(1) == test.y).float().mean().item()
    assert right == pytest.approx(result.summary["last_accuracy"], abs=1e-6)
    assert result.rounds["round"].tolist() == [0, 1, 2]
    rounds: list[int] = []
    again = run(wanted, tmp_path / "run", say=quiet, on_round=lambda number, _: rounds.append(number))
    assert (again.summary, rounds) == (result.summary, [])  # a finished folder is read
    with pytest.raises(UserError, match=r"another client\.lr"):
        run(experiment("smoke", values={**FIELDS, "lr": 0.5, "model.batch_norm": True}), tmp_path / "run", say=quiet)
    assert result.model is not result.model
    for path in (tmp_path / "run" / "checkpoints").glob("round-000002*"):
        path.unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no checkpoint of round 2"):
        result.model  # noqa: B018


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    matplotlib.use("svg")
    torch.set_num_threads(2)

    def settings() -> list[object]:
        return [
            matplotlib.get_backend(), torch.get_num_threads(), torch.get_rng_state().tolist(),
            torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd(),
            str(np.random.get_state()),  # noqa: NPY002
            *(signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)),
        ]  # fmt: skip

    try:
        before = settings()
        run(experiment("smoke", values=FIELDS), tmp_path / "run", say=quiet).model.eval()
        assert settings() == before
    finally:
        torch.set_num_threads(1)


@pytest.mark.ray
def test_a_sweep_is_its_runs_side_by_side(tmp_path: Path) -> None:
    wanted = [experiment("smoke", values={**FIELDS, "alpha": a, "seed": s}) for a in (0.1, 1.0) for s in (0, 1)]
    frame = sweep(wanted, tmp_path / "sweep")
    assert list(zip(frame["alpha"], frame["seed"], strict=True)) == [(0.1, 0), (0.1, 1), (1.0, 0), (1.0, 1)]
    alone = run(wanted[3], tmp_path / "alone", say=quiet)
    assert frame["last_accuracy"].iloc[3] == alone.summary["last_accuracy"]
    assert sweep(wanted, str(tmp_path / "sweep")).equals(frame)  # read, not run


def two_runs() -> pd.DataFrame:
    rows = [{"run": f"r{seed}", "status": "finished", "seed": seed, "algorithm": "fedavg", "data.name": "digits",
             "rounds": 3, "last_accuracy": 0.5 + seed / 10, "MB": 1.0} for seed in (0, 1)]  # fmt: skip
    return pd.DataFrame(rows)


def test_arguments_may_be_of_any_form_that_can_mean_one_thing_only() -> None:
    for one in ("last_accuracy", ["last_accuracy"], {"last_accuracy"}, np.array(["last_accuracy"])):
        means = fc.means(two_runs(), one, say=pytest.fail)  # pyright: ignore[reportArgumentType]
        assert means["last_accuracy"].tolist() == [0.55]
        assert list(means) == ["seeds", "last_accuracy", "last_accuracy_sd"]
    whole = flatten({"ab": torch.ones(2), "a": torch.zeros(1)})
    for names in ("ab", iter(["ab"])):
        part = fc.select(whole, names)  # pyright: ignore[reportArgumentType]
        assert (part.layout.names, part.buffer.tolist()) == (("ab",), [1, 1])
    given = {"alpha": np.float64(0.5), "seed": np.int64(3), "model.channels": [8, np.int32(16)], "data.dir": Path("x")}
    plain = {"alpha": 0.5, "seed": 3, "model.channels": (8, 16), "data.dir": "x"}
    assert experiment("smoke", values=given) == experiment("smoke", values=plain)


one = experiment("smoke")
CALLS: dict[str, Callable[[Any], object]] = {
    "columns, got None": lambda _: fc.means(two_runs(), None),  # type: ignore
    "frame of load_runs, got 'runs'": lambda _: fc.means("runs", "MB"),  # type: ignore
    "unknown column 'MBs'; did you mean 'MB'": lambda _: fc.means(two_runs(), "MBs"),
    "a folder is .*got \\['a', 'b'\\]": lambda _: fc.load_runs(["a", "b"]),  # type: ignore
    "an experiment, got {'seed': 1}": lambda folder: run({"seed": 1}, folder),  # type: ignore
    "experiments, got 3": lambda folder: sweep([one, 3], folder),  # type: ignore
    "at least one": lambda folder: sweep([], folder),
    "at most 10,000 cells": lambda folder: sweep((one for _ in range(10**9)), folder),
    "names of fields .*got \\['seed'\\]": lambda _: experiment(values=["seed"]),  # type: ignore
}


def test_a_wrong_argument_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for words, call in CALLS.items():
        with pytest.raises(UserError, match=words):
            call(tmp_path / "out")
    assert not (tmp_path / "out").exists()
