"""fedcommons from Python: runs, sweeps, and arguments that are refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ray import tune
from report_runs import quiet

import fedcommons as fc
from fedcommons import experiment, run, sweep
from fedcommons.errors import UserError

FIELDS = {"wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "data.limit": 80}


def test_every_name_can_be_imported_and_a_wrong_one_is_refused() -> None:
    assert all(getattr(fc, name) is not None for name in fc.__all__)
    assert set(fc.__all__) <= set(dir(fc))
    with pytest.raises(AttributeError, match="runn"):
        getattr(fc, "runn")  # noqa: B009


def test_all_unknown_fields_are_named_in_one_message() -> None:
    with pytest.raises(UserError, match=r"'lrr'.*client\.lr.*'fraction_fit'.*federation\.participation"):
        experiment("smoke", values={"lrr": 1, "fraction_fit": 1})


def test_a_result_has_summary_rounds_and_the_model_that_was_evaluated(tmp_path: Path) -> None:
    wanted = experiment("smoke", values={**FIELDS, "model.batch_norm": True})
    result = run(wanted, str(tmp_path / "run"), say=quiet)
    test = result.dataset.test
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


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_users_own_tuner_gets_the_metrics_of_every_round(tmp_path: Path) -> None:
    def config(lr: float) -> fc.Experiment:
        return experiment("smoke", values={**FIELDS, "client.lr": lr})

    def train(point: dict[str, float]) -> None:
        run(config(point["lr"]), on_round=lambda number, metrics: tune.report({"round": number, **metrics}))

    ray_tune = tune.Tuner(
        train, param_space={"lr": tune.grid_search([1e-6, 0.1])},
        tune_config=tune.TuneConfig(metric="validation/accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )  # fmt: skip
    best = ray_tune.fit().get_best_result()
    assert best.config == {"lr": 0.1}
    assert best.metrics_dataframe is not None
    alone = run(config(0.1), say=quiet).rounds
    assert list(best.metrics_dataframe["validation/accuracy"]) == list(alone["validation/accuracy"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_a_sweep_is_its_runs_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set reads a file of the caller's folder, which is not a trial's own folder."""
    monkeypatch.chdir(tmp_path)
    np.save("pixels.npy", np.random.default_rng(0).normal(size=(300, 4)))
    text = "def rows(path: str = 'pixels.npy'):\n    x = numpy.load(path)\n    return x, (x[:, 0] > 0).astype(int)\n"
    Path("mine.py").write_text(f"import numpy\n{text}", encoding="utf-8")
    fields = {**FIELDS, "data.name": "mine.py:rows", "model.name": "linear"}
    wanted = [experiment("smoke", values={**fields, "alpha": a, "seed": s}) for a, s in ((1.0, 0), (0.1, 1))]
    variables = dict(os.environ)
    frame = sweep(wanted, tmp_path / "sweep")
    assert {name for name in variables.keys() ^ os.environ.keys() if name.startswith("TUNE_")} == set()
    assert list(zip(frame["alpha"], frame["seed"], strict=True)) == [(1.0, 0), (0.1, 1)]
    alone = run(wanted[1], tmp_path / "alone", say=quiet)
    assert frame["last_accuracy"].iloc[1] == alone.summary["last_accuracy"]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep").glob("*/*.jsonl")}
    assert sweep(wanted, str(tmp_path / "sweep")).equals(frame)  # read, not run
    assert {path: path.stat().st_mtime_ns for path in written} == written != {}


def test_values_of_an_experiment_may_be_numpys_lists_and_paths() -> None:
    values = {"alpha": np.float64(0.5), "seed": np.int64(3), "model.channels": [8, np.int32(16)], "data.dir": Path("x")}
    plain = {"alpha": 0.5, "seed": 3, "model.channels": (8, 16), "data.dir": "x"}
    assert experiment("smoke", values=values) == experiment("smoke", values=plain)
    rows = [{"run": f"r{seed}", "status": "finished", "seed": seed, "algorithm": "fedavg", "data.name": "digits",
             "rounds": 3, "MB": 1.0} for seed in (0, 1)]  # fmt: skip
    for columns in ("MB", ["MB"], np.array(["MB"])):
        assert list(fc.means(pd.DataFrame(rows), columns)) == ["seeds", "MB", "MB_sd"]  # pyright: ignore


base = experiment("smoke")
CALLS: dict[str, Callable[[Any], object]] = {
    "columns, got None": lambda _: fc.means(pd.DataFrame(), None),  # type: ignore
    "frame of load_runs, got 'runs'": lambda _: fc.means("runs", "MB"),  # type: ignore
    "unknown column 'MBs'; did you mean 'MB'": lambda _: fc.means(pd.DataFrame({"MB": [1.0]}), "MBs"),
    "a folder is .*got \\['a', 'b'\\]": lambda _: fc.load_runs(["a", "b"]),  # type: ignore
    "an experiment, got {'seed': 1}": lambda folder: run({"seed": 1}, folder),  # type: ignore
    "storage takes str or NoneType, got 5": lambda folder: sweep([experiment("smoke", values={"storage": 5})], folder),
    "at most 10,000 cells": lambda folder: sweep((base for _ in range(10**9)), folder),
    "names of fields .*got \\['seed'\\]": lambda _: experiment(values=["seed"]),  # type: ignore
}


def test_a_wrong_argument_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for words, call in CALLS.items():
        with pytest.raises(UserError, match=words):
            call(tmp_path / "out")
    assert not (tmp_path / "out").exists()
