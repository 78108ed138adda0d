"""Frames of run folders: every number is that of the folder's own files; cells; what cannot be read."""

import json
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pandas as pd
import pytest

from fedcommons import experiment, load_rounds, load_runs, means, run
from fedcommons.errors import UserError
from fedcommons.reports.cells import cells, varied
from fedcommons.tracking.run_folder import STOPPED, read_config, read_rounds, read_summary

FIELDS = {"wandb": "off", "federation.rounds": 2, "client.epochs": 1, "measure.every": 1, "data.limit": 80}


def quiet(text: str) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms, two seeds each; one more with another learning rate."""
    out = tmp_path_factory.mktemp("runs")
    for algorithm in ("fedavg", "fedprox"):
        for seed in (1, 0):
            fields = {**FIELDS, "algorithm": algorithm, "seed": seed, "alpha": 0.1}
            run(experiment("smoke", values=fields), out / "grid" / f"{algorithm}-{seed}", say=quiet)
    run(experiment("smoke", values={**FIELDS, "alpha": 0.1, "lr": 0.02}), out / "slow", say=quiet)
    return out


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_row_has_the_numbers_of_the_runs_own_files(folder: Path) -> None:
    runs = load_runs(folder, say=silent)
    assert len(runs) == 5
    for row in runs.to_dict("records"):
        path = Path(row["run"])
        summary, lines = read_summary(path), read_rounds(path)
        assert summary is not None
        for name, value in summary["config"].items():
            expected = tuple(value) if isinstance(value, list) else value
            assert pd.isna(row[name]) if value is None else row[name] == expected, name
        for name in ("rounds", "last_accuracy", "best_accuracy", "validation_accuracy", "bytes_up", "partition", "p"):
            assert row[name] == summary[name]
        assert pd.isna(row["rounds_to_target"]) == (summary["rounds_to_target"] is None)
        zeta = [line["convergence/zeta_sq"] for line in lines]
        assert (row["zeta_sq"], row["zeta_sq_mean"]) == (zeta[-1], pytest.approx(fmean(zeta), rel=1e-15))
        assert row["MB"] == lines[-1]["comm/total_bytes"] / 1e6
        assert row["test/loss"] == lines[-1]["test/loss"]
        assert row["status"] == "finished"


def test_of_stragglers_rows_have_the_bytes_and_rounds_have_the_clients(tmp_path: Path) -> None:
    run(experiment("smoke", values={**FIELDS, "straggler.rule": "fastest", "straggler.k": 3}), tmp_path, say=quiet)
    row, lines = load_runs(tmp_path, say=silent).iloc[0], read_rounds(tmp_path)
    assert not {"late", "partial"} & set(row.index)
    assert row["bytes_lost"] == sum(line["comm/lost_bytes"] for line in lines[1:]) == row["bytes_down"] / 4
    assert load_rounds(tmp_path)["late"].to_list()[1:] == [line["late"] for line in lines[1:]]


def test_what_took_effect_stands_under_its_symbol(folder: Path, tmp_path: Path) -> None:
    runs = load_runs(folder / "slow")
    assert runs[["alpha", "p", "lr"]].iloc[0].to_list() == [0.1, 0.0, 0.02]
    assert not {"rho", "sigma", "generator.rho", "fedprox.mu", "epsilon"} & set(runs.columns)  # nothing used them


@pytest.mark.parametrize(("noise", "end"), [("seeded", "_if_secret"), ("secret", "")])
def test_an_epsilon_has_a_column_that_says_whether_it_was_earned(noise: str, end: str, tmp_path: Path) -> None:
    private = {**FIELDS, "dp.local": True, "sigma": 3.0, "federation.rounds": 1, "dp.noise": noise}
    result = run(experiment("smoke", values=private), tmp_path / "private", say=quiet)
    row = load_runs(tmp_path).iloc[0]
    spent = result.summary["privacy"]
    assert row["sigma"] == 3.0
    assert row[f"epsilon{end}"] == spent[f"epsilon_of_messages{end}"] > 0
    assert row[f"epsilon_local_training{end}"] == spent[f"epsilon_local_training{end}"]["largest"]
    assert {name for name in row.index if name.startswith("epsilon")} == {
        f"epsilon{end}",
        f"epsilon_local_training{end}",
    }


def test_the_epsilon_of_an_earlier_version_was_of_seeded_noise(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "slow", tmp_path / "old")
    summary = json.loads((tmp_path / "old" / "summary.json").read_text())
    old = {"epsilon_of_messages": 2.5, "pool_epsilon_max": 1.5, "commons": "covered"}
    (tmp_path / "old" / "summary.json").write_text(json.dumps(summary | {"privacy": old}))
    row = load_runs(tmp_path).iloc[0]
    assert (row["epsilon_if_secret"], row["pool_epsilon_if_secret"]) == (2.5, 1.5)
    assert not {"epsilon", "pool_epsilon"} & set(row.index)


def test_a_row_a_round(folder: Path) -> None:
    rounds = load_rounds(folder / "grid", folder / "slow")
    assert len(rounds) == 5 * 3
    for path, of_run in rounds.groupby("run"):
        lines = read_rounds(Path(str(path)))
        assert of_run["round"].tolist() == [0, 1, 2]
        assert of_run["test/accuracy"].tolist() == [line["test/accuracy"] for line in lines]
        assert of_run["zeta_sq"].tolist() == [line["convergence/zeta_sq"] for line in lines]
        assert set(of_run["algorithm"]) == {read_config(Path(str(path))).algorithm}


@pytest.mark.long
def test_means_count_as_the_tables_do(folder: Path, tmp_path: Path) -> None:
    """A seed that missed the target counts with its rounds and shows; what is unfinished or there twice is named."""
    base = {**FIELDS, "alpha": 0.1, "target": 0.3}
    for seed, target in ((0, 0.05), (1, 0.05), (2, 1.0)):
        run(experiment("smoke", values={**base, "seed": seed, "target": target}), tmp_path / f"{seed}", say=quiet)
    for path in (*tmp_path.glob("*/summary.json"), *tmp_path.glob("*/config.yaml")):  # one target, three outcomes
        path.write_text(
            path.read_text().replace('"target": 1.0', '"target": 0.05').replace("target: 1.0", "target: 0.05")
        )
    shutil.copytree(tmp_path / "0", tmp_path / "twice")
    shutil.copytree(tmp_path / "1", tmp_path / "unfinished")
    (tmp_path / "unfinished" / "summary.json").unlink()
    runs = load_runs(tmp_path, say=silent)
    runs.loc[runs["seed"] == 2, "rounds_to_target"] = float("nan")
    said: list[str] = []
    (row,) = means(runs, ["rounds_to_target", "last_accuracy"], say=said.append).to_dict("records")
    whole = runs.iloc[:3]
    reached = [*whole["rounds_to_target"].tolist()[:2], 2.0]
    assert reached[:2] != [2.0, 2.0]
    assert (row["seeds"], row["rounds_to_target_missed"]) == (3, 1)
    assert (row["rounds_to_target"], row["rounds_to_target_sd"]) == (fmean(reached), stdev(reached))
    assert row["rounds_to_target_shown"] == f">{fmean(reached):.4g}"
    assert row["last_accuracy"] == pytest.approx(whole["last_accuracy"].mean())
    assert said == [
        f"left out: {tmp_path / 'unfinished'} is unfinished.",
        f"left out: {tmp_path / 'twice'} is the same experiment as {tmp_path / '0'}.",
    ]
    said.clear()
    runs.loc[runs["seed"] == 1, "zeta_sq"] = float("nan")
    means(runs, ["zeta_sq"], say=said.append)
    assert said[-1] == "left out: zeta_sq is missing in 1 of 3 seeds of the only cell."
    with pytest.raises(UserError, match="unknown column 'last_acuracy'; did you mean 'last_accuracy'"):
        means(runs, ["last_acuracy"])
    assert means(runs.iloc[-1:], ["last_accuracy"], say=quiet).empty


def test_cells_are_runs_that_differ_in_their_seeds_only(folder: Path) -> None:
    runs = load_runs(folder)
    assert varied(runs) == ["algorithm", "client.lr"]  # fedprox.mu follows from the algorithm
    found = {tuple(cell.fields.values()): cell for cell in cells(runs)}
    assert {key: cell.runs["seed"].tolist() for key, cell in found.items()} == {
        ("fedavg", 0.1): [0, 1], ("fedprox", 0.1): [0, 1], ("fedavg", 0.02): [0],
    }  # fmt: skip
    assert cells(load_runs(folder / "slow"))[0].fields == {}
    table = means(runs, ["best_accuracy"])
    both = found["fedprox", 0.1].values("best_accuracy")
    row = table[(table["algorithm"] == "fedprox")].iloc[0]
    assert row["seeds"] == 2
    assert row["best_accuracy"] == pytest.approx(fmean(both))
    assert row["best_accuracy_sd"] == pytest.approx(stdev(both))
    alone = [sd for sd, seeds in zip(table["best_accuracy_sd"], table["seeds"], strict=True) if seeds == 1]
    assert pd.isna(alone).tolist() == [True]


def test_a_run_counts_once_however_it_is_named(folder: Path) -> None:
    assert len(load_runs(folder, folder / "slow", str(folder / "grid" / ".." / "slow"))) == 5


def test_runs_that_are_not_finished_say_so(folder: Path, tmp_path: Path) -> None:
    for name in ("unfinished", "failed", "stopped"):
        shutil.copytree(folder / "slow", tmp_path / name)
        (tmp_path / name / "summary.json").unlink()
    (tmp_path / "failed" / "error.txt").write_text("client 3 failed")
    (tmp_path / "stopped" / STOPPED).touch()
    lines = (tmp_path / "stopped" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "stopped" / "rounds.jsonl").write_text("".join(lines[:2]))
    runs = load_runs(tmp_path, say=silent).set_index("status")
    assert set(runs.index) == {"unfinished", "failed", "stopped"}
    assert runs.loc["stopped", "rounds"] == 1
    assert runs.loc["failed", "last_accuracy"] == load_runs(folder / "slow")["last_accuracy"].iloc[0]
    assert runs.loc["failed", "client.lr"] == 0.02


@pytest.mark.parametrize("content", ['{"rounds": 3', "[1, 2]", "{}", '{"rounds": 99}', "\udcff"])
def test_a_run_whose_end_is_damaged_is_not_taken_for_one_under_way(folder: Path, tmp_path: Path, content: str) -> None:
    for name in ("good", "damaged"):
        shutil.copytree(folder / "slow", tmp_path / name)
    (tmp_path / "damaged" / "summary.json").write_bytes(content.encode(errors="surrogateescape"))
    said: list[str] = []
    assert load_runs(tmp_path, say=said.append)["run"].tolist() == [str(tmp_path / "good")]
    assert [text for text in said if "damaged is damaged: its" in text] == said != []


def test_folders_that_cannot_be_read_are_named_and_left_out(folder: Path, tmp_path: Path) -> None:
    for name in ("good", "damaged", "old", "empty"):
        shutil.copytree(folder / "slow", tmp_path / name)
    (tmp_path / "damaged" / "config.yaml").write_text("seed: [")
    (tmp_path / "damaged" / "summary.json").unlink()
    summary = json.loads((tmp_path / "old" / "summary.json").read_text())
    del summary["config"]
    (tmp_path / "old" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "empty" / "rounds.jsonl").write_text("")
    said: list[str] = []
    assert load_runs(tmp_path, say=said.append)["run"].tolist() == [str(tmp_path / "good")]
    assert len(said) == 3
    for name, why in (("damaged", "damaged"), ("old", "earlier version"), ("empty", "no round")):
        assert any(str(tmp_path / name) in text and why in text for text in said), name


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        load_runs(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        load_rounds(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "fields",
    [{"partition.name": "own.py:spread"}, {"partition.name": "own.py:named"}, {"partition.name": "own.py:scaled"},
     {"measure.measure": "own.py:Huge"}],
    ids=["alpha of two numbers", "alpha of a word", "a field of 1e200", "a measure of 1e150"],
)  # fmt: skip
def test_what_a_run_with_own_parts_writes_is_read_again(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    config = experiment("smoke", values={**FIELDS, "federation.rounds": 1, **fields})
    run(config, tmp_path / "run")
    assert len(load_runs(tmp_path / "run")) == len(load_rounds(tmp_path / "run")) - 1 == 1
    assert read_summary(tmp_path / "run") is not None
    assert read_rounds(tmp_path / "run")[-1].get("measure/n") is None


OWN = """
import numpy as np


def spread(labels, n_clients, alpha=(0.1, 1.0)):
    return np.array_split(np.arange(len(labels)), n_clients)


def named(labels, n_clients, alpha="low"):
    return np.array_split(np.arange(len(labels)), n_clients)


def scaled(labels, n_clients, scale=1e200):
    return np.array_split(np.arange(len(labels)), n_clients)


class Huge:
    def __call__(self, work, data, round, seed):
        return {"n": 1e150}
"""
