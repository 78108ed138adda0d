"""Frames of run folders have the numbers of the folders' own files; cells, clients, comparison, damaged folders."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
import torch
from report_runs import change, copies, quiet, small_run, small_runs, summary
from torch.nn import functional as F

from fedcommons import experiment, load_rounds, load_runs, means, run
from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.federation.evaluation import CLIENTS
from fedcommons.reports import series
from fedcommons.reports.cells import Cell, cells, once, varied
from fedcommons.reports.frames import load_clients
from fedcommons.runs import build
from fedcommons.tracking.run_folder import STOPPED, read_clients, read_config, read_rounds, read_summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms with two seeds each; one more with another learning rate."""
    grid = {f"grid/{a}-{s}": {"algorithm": a, "seed": s} for a in ("fedavg", "fedprox") for s in (1, 0)}
    return small_runs(tmp_path_factory.mktemp("runs"), {**grid, "slow": {"lr": 0.02}})


def silent(text: str) -> None:
    raise AssertionError(text)


@pytest.mark.long
def test_a_row_has_the_numbers_of_the_runs_own_files(folder: Path) -> None:
    runs = load_runs(folder, say=silent)
    assert len(runs) == 5
    for row in runs.to_dict("records"):
        path = Path(row["run"])
        own, lines = summary(path), read_rounds(path)
        for name, value in own["config"].items():
            expected = tuple(value) if isinstance(value, list) else value
            assert pd.isna(row[name]) if value is None else row[name] == expected, name
        for name in ("rounds", "last_accuracy", "best_accuracy", "validation_accuracy", "bytes_up", "partition", "p"):
            assert row[name] == own[name]
        assert pd.isna(row["rounds_to_target"]) == (own["rounds_to_target"] is None)
        zeta = [line["convergence/zeta_sq"] for line in lines]
        assert (row["zeta_sq"], row["zeta_sq_mean"]) == (zeta[-1], pytest.approx(fmean(zeta), rel=1e-15))
        assert row["MB"] == lines[-1]["comm/total_bytes"] / 1e6
        assert row["test/loss"] == lines[-1]["test/loss"]
        assert row["status"] == "finished"
    slow = runs[runs["run"] == str(folder / "slow")].iloc[0]
    assert slow[["alpha", "p", "lr"]].to_list() == [0.1, 0.0, 0.02]
    unused = {"rho", "sigma", "generator.rho", "fedprox.mu", "epsilon"}
    assert not unused & set(load_runs(folder / "slow").columns)
    assert len(load_runs(folder, folder / "slow", str(folder / "grid" / ".." / "slow"))) == 5  # each run once
    rounds = load_rounds(folder / "grid", folder / "slow")
    assert len(rounds) == 5 * 3
    for path, of_run in rounds.groupby("run"):
        lines = read_rounds(Path(str(path)))
        assert of_run["round"].tolist() == [0, 1, 2]
        assert of_run["test/accuracy"].tolist() == [line["test/accuracy"] for line in lines]
        assert of_run["zeta_sq"].tolist() == [line["convergence/zeta_sq"] for line in lines]
        assert set(of_run["algorithm"]) == {read_config(Path(str(path))).algorithm}


def test_rows_have_the_bytes_of_stragglers_and_names_of_epsilons_say_whether_noise_was_secret(tmp_path: Path) -> None:
    small_run(tmp_path / "late", {"straggler.rule": "fastest", "straggler.k": 3})
    row, lines = load_runs(tmp_path / "late", say=silent).iloc[0], read_rounds(tmp_path / "late")
    assert not {"late", "partial"} & set(row.index)
    assert row["bytes_lost"] == sum(line["comm/lost_bytes"] for line in lines[1:]) == row["bytes_down"] / 4
    assert load_rounds(tmp_path / "late")["late"].to_list()[1:] == [line["late"] for line in lines[1:]]
    for noise, end in (("seeded", "_if_secret"), ("secret", "")):
        private = {"dp.local": True, "sigma": 3.0, "federation.rounds": 1, "dp.noise": noise}
        own, row = small_run(tmp_path / noise, private)["privacy"], load_runs(tmp_path / noise).iloc[0]
        assert row["sigma"] == 3.0
        assert row[f"epsilon{end}"] == own[f"epsilon_of_messages{end}"] > 0
        assert row[f"epsilon_local_training{end}"] == own[f"epsilon_local_training{end}"]["largest"]
        names = {name for name in row.index if name.startswith("epsilon")}
        assert names == {f"epsilon{end}", f"epsilon_local_training{end}"}


def config(seed: int) -> Experiment:
    return experiment("smoke", values={"wandb": "off", "federation.rounds": 10, "seed": seed})


def test_means_are_over_finished_seeds_and_misses_are_bounds(recorded: Callable[..., None], tmp_path: Path) -> None:
    """A seed that missed counts with its rounds; unfinished runs and the same run twice are named and left out."""
    for seed, reached in ((0, 3), (1, 5), (2, None)):
        recorded(
            tmp_path / str(seed), config(seed), reached, {"convergence/zeta_sq": 2.0}, rounds_to_target=reached,
            zeta_sq=[[10, 2.0]],
        )  # fmt: skip
    copies(tmp_path / "0", tmp_path, "twice")
    (unfinished,) = copies(tmp_path / "1", tmp_path, "unfinished")
    (unfinished / "summary.json").unlink()
    runs, said = load_runs(tmp_path, say=silent), list[str]()
    (row,) = means(runs, ["rounds_to_target", "last_accuracy"], say=said.append).to_dict("records")
    assert (row["seeds"], row["rounds_to_target_missed"]) == (3, 1)
    assert (row["rounds_to_target"], row["rounds_to_target_sd"]) == (6, stdev([3, 5, 10]))
    assert row["rounds_to_target_shown"] == ">6"
    assert (row["last_accuracy"], row["last_accuracy_sd"]) == pytest.approx((0.6, stdev([0.9, 0.9, 0.0])))
    for text, name, word in zip(said, ("unfinished", "twice"), ("unfinished", "same experiment"), strict=True):
        assert str(tmp_path / name) in text
        assert word in text
    runs.loc[runs["seed"] == 1, "zeta_sq"] = float("nan")
    means(runs, ["zeta_sq"], say=said.append)
    assert "zeta_sq is missing in 1 of 3 seeds" in said[-1]
    with pytest.raises(UserError, match="did you mean 'last_accuracy'"):
        means(runs, ["last_acuracy"])
    assert means(runs.iloc[-1:], ["last_accuracy"], say=quiet).empty


@pytest.mark.long
def test_cells_are_runs_that_differ_in_their_seeds_only(folder: Path) -> None:
    runs = load_runs(folder)
    assert varied(runs) == ["algorithm", "client.lr"]  # fedprox.mu follows from the algorithm
    by_fields = {tuple(cell.fields.values()): cell for cell in cells(runs)}
    assert {key: cell.runs["seed"].tolist() for key, cell in by_fields.items()} == {
        ("fedavg", 0.1): [0, 1], ("fedprox", 0.1): [0, 1], ("fedavg", 0.02): [0],
    }  # fmt: skip
    assert cells(load_runs(folder / "slow"))[0].fields == {}
    table = means(runs, ["best_accuracy"])
    both = by_fields["fedprox", 0.1].values("best_accuracy")
    row = table[(table["algorithm"] == "fedprox")].iloc[0]
    assert (row["seeds"], row["best_accuracy"]) == (2, pytest.approx(fmean(both)))
    assert row["best_accuracy_sd"] == pytest.approx(stdev(both))
    assert pd.isna(table.loc[table["seeds"] == 1, "best_accuracy_sd"]).tolist() == [True]


@pytest.mark.long
def test_the_status_of_runs_that_are_not_finished(folder: Path, tmp_path: Path) -> None:
    for path in copies(folder / "slow", tmp_path, "unfinished", "failed", "stopped"):
        (path / "summary.json").unlink()
    (tmp_path / "failed" / "error.txt").write_text("client 3 failed")
    (tmp_path / "stopped" / STOPPED).touch()
    lines = (tmp_path / "stopped" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "stopped" / "rounds.jsonl").write_text("".join(lines[:2]))
    runs = load_runs(tmp_path, say=silent).set_index("status")
    assert set(runs.index) == {"unfinished", "failed", "stopped"}
    assert runs.loc["stopped", "rounds"] == 1
    assert runs.loc["failed", "last_accuracy"] == load_runs(folder / "slow")["last_accuracy"].iloc[0]
    assert runs.loc["failed", "client.lr"] == 0.02
    privacy = {"epsilon_of_messages": 2.5, "pool_epsilon_max": 1.5, "commons": "covered"}  # of an earlier version
    (old,) = copies(folder / "slow", tmp_path / "earlier", "old")
    change(old / "summary.json", privacy=privacy)
    row = load_runs(old).iloc[0]
    assert (row["epsilon_if_secret"], row["pool_epsilon_if_secret"]) == (2.5, 1.5)
    assert not {"epsilon", "pool_epsilon"} & set(row.index)


@pytest.mark.long
def test_a_folder_that_cannot_be_read_is_named_and_left_out(folder: Path, tmp_path: Path) -> None:
    for number, (file, content, word) in enumerate((
        ("summary.json", '{"rounds": 3', "damaged"), ("summary.json", "[1, 2]", "damaged"),
        ("summary.json", "{}", "damaged"), ("summary.json", '{"rounds": 99}', "damaged"),
        ("summary.json", "\udcff", "damaged"), ("config.yaml", "seed: [", "damaged"), ("rounds.jsonl", "", "no round"),
        ("config", "", "earlier version"),
    )):  # fmt: skip
        good, bad = copies(folder / "slow", tmp_path / str(number), "good", "bad")
        if file == "config":
            change(bad / "summary.json", config=None)
        else:
            (bad / file).write_bytes(content.encode(errors="surrogateescape"))
        if file == "config.yaml":
            (bad / "summary.json").unlink()
        said: list[str] = []
        assert load_runs(tmp_path / str(number), say=said.append)["run"].tolist() == [str(good)]
        assert [str(bad) in text and word in text for text in said] == [True], (file, content)
    (tmp_path / "empty").mkdir()
    for name, part in (("empty", "holds no run"), ("nowhere", "is not a folder")):
        with pytest.raises(UserError, match=part):
            load_rounds(tmp_path / name)


DEAL = """
import numpy as np


def deal(labels, n_clients, {constant}):
    return np.array_split(np.arange(len(labels)), n_clients)


class Huge:
    def __call__(self, work, data, round, seed):
        return {{"n": 1e150}}
"""


def test_runs_with_odd_values_of_own_components_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha of two numbers or of a word, a field of 1e200, a measure of 1e150."""
    monkeypatch.chdir(tmp_path)
    for n, constant in enumerate(("alpha=(0.1, 1.0)", "alpha='low'", "scale=1e200")):
        (tmp_path / f"own{n}.py").write_text(DEAL.format(constant=constant))
        own = {"partition.name": f"own{n}.py:deal", "measure.measure": f"own{n}.py:Huge"}
        fields = {"wandb": "off", "federation.rounds": 1, "client.epochs": 1, "data.limit": 80, "measure.every": 1}
        run(experiment("smoke", values={**fields, **own}), of := tmp_path / str(n))
        assert len(load_runs(of)) == len(load_rounds(of)) - 1 == 1
        assert read_summary(of) is not None
        assert read_rounds(of)[-1].get("measure/n") is None


RECORDED = {
    "wandb": "off", "federation.rounds": 3, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "measure.clients": True, "data.limit": 200, "partition.n_clients": 6, "alpha": 0.1,
}  # fmt: skip
MANY = {"partition": "iid", "partition.n_clients": CLIENTS + 2, "federation.rounds": 1, "alpha": None}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    run(experiment("smoke", values=RECORDED), path, say=quiet)
    return path


@pytest.mark.parametrize("fields", [{}, MANY], ids=["one job", "two jobs"])
@pytest.mark.long
def test_each_clients_line_is_the_server_model_on_its_own_images(fields: dict[str, object], tmp_path: Path) -> None:
    values = {name: value for name, value in {**RECORDED, **fields}.items() if value is not None}
    wanted = experiment("smoke", values=values)
    result = run(wanted, tmp_path, say=quiet)
    own, rounds = build.prepare(wanted).dealt.own, values["federation.rounds"]
    last = load_clients(tmp_path).query(f"round == {rounds}")
    assert last["client"].tolist() == list(range(len(own)))
    for client, n, accuracy, loss in last[["client", "n", "accuracy", "loss"]].itertuples(index=False):
        data = own[client]
        with torch.no_grad():
            logits = result.model(data.x)
        assert n == len(data)
        assert accuracy == pytest.approx((logits.argmax(1) == data.y).float().mean().item(), abs=1e-6)
        assert loss == pytest.approx(F.cross_entropy(logits, data.y).item(), rel=1e-5)


@pytest.mark.long
def test_rounds_name_the_worst_client_and_a_resumed_run_writes_the_same_lines(recording: Path, tmp_path: Path) -> None:
    lines, clients = read_rounds(recording), read_clients(recording)
    assert [line["round"] for line in clients] == [line["round"] for line in lines] == [0, 1, 2, 3]
    for line, of_clients in zip(lines, clients, strict=True):
        assert line["clients/worst_accuracy"] == min(of_clients["accuracy"])
        assert of_clients["accuracy"][line["clients/worst"]] == line["clients/worst_accuracy"]
    assert load_runs(recording)["clients/worst_accuracy"].tolist() == [lines[-1]["clients/worst_accuracy"]]
    whole = (recording / "clients.jsonl").read_text()
    for number, kept in enumerate((whole[:-20], "".join(whole.splitlines(keepends=True)[:3]), "")):
        (path,) = copies(recording, tmp_path, str(number))
        (path / "summary.json").unlink()
        (path / "clients.jsonl").write_text(kept)
        run(experiment("smoke", values=RECORDED), path, say=quiet)
        for name in ("clients.jsonl", "rounds.jsonl", "summary.json"):
            assert (path / name).read_bytes() == (recording / name).read_bytes()
    run(experiment("smoke", values={**RECORDED, "measure.clients": False}), tmp_path / "without", say=quiet)
    assert not (tmp_path / "without" / "clients.jsonl").exists()
    assert load_clients(tmp_path / "without").empty


compare = report_runs.script("compare")


@pytest.mark.long
def test_rows_have_mean_and_sd(
    compare: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    words = [str(folder), "--x", "lr", "--y", "zeta_hat_sq", "--out", str(out)]
    assert compare.compare(words) == 0
    assert "also vary in algorithm" in capsys.readouterr().out
    assert compare.compare([*words, "--colour", "algorithm"]) == 0
    assert "also vary" not in capsys.readouterr().out
    runs, table = load_runs(folder), pd.read_csv(out / "compare.csv")
    assert sorted(table["seeds"]) == [1, 2, 2]
    for row in table.to_dict("records"):
        own = runs[(runs["lr"] == row["lr"]) & (runs["algorithm"] == row["algorithm"])]["zeta_hat_sq"].tolist()
        assert row["seeds"] == len(own)
        assert row["zeta_hat_sq"] == pytest.approx(fmean(own))
        assert len(own) == 1 or row["zeta_hat_sq_sd"] == pytest.approx(stdev(own))
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    names = {"x": "lr", "y": "last_accuracy", "facet": "algorithm", "colour": "alpha"}
    panels = compare.panels(compare.cells(runs), names)
    assert [panel.title.rpartition(" = ")[2] for panel in panels] == ["fedavg", "fedprox"]
    assert [sorted(p.x for p in panel.points) for panel in panels] == [[0.02, 0.1], [0.1]]
    assert {p.series for panel in panels for p in panel.points} == {"0.1"}
    (again,) = copies(folder, tmp_path, "again")  # a run in two folders is one seed
    said: list[str] = []
    assert once(load_runs(folder, again), said.append).equals(runs)
    assert len(said) == 5
    assert all(str(again) in line for line in said)


@pytest.mark.long
def test_bad_requests_are_refused(
    compare: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    for words, part in (
        ("FOLDER --x lrr", "did you mean 'lr'"), ("FOLDER --y zeta_hat_q", "did you mean 'zeta_hat_sq'"),
        ("FOLDER --y algorithm", "--y takes a number"), ("FOLDER --facet seed", "means over seeds"),
        ("--x=lr", "at least one folder"), (".", "holds no run"), ("FOLDER --x=lr --out=.", "is not empty"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=part):
            compare.compare(words.replace("FOLDER", str(folder)).split())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.long
def test_comparing_imports_neither_ray_nor_wandb() -> None:
    code = (
        "import sys, runpy; runpy.run_path('sweeps/compare.py', run_name='x'); print({'ray', 'wandb'} & {*sys.modules})"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def _cell(**columns: list[Any]) -> Cell:
    return Cell({}, pd.DataFrame(columns))


def test_a_point_is_the_mean_over_seeds_and_a_bound_where_one_missed_the_target() -> None:
    reached = _cell(lr=[0.1, 0.1], rounds_to_target=[4, 6], rounds=[30, 30])
    missed = _cell(lr=[0.1, 0.1], rounds_to_target=[4, None], rounds=[30, 30])
    assert series.point(reached, "lr", "rounds_to_target", "") == series.Point(0.1, 5.0, stdev([4, 6]), "", False)
    assert series.point(missed, "lr", "rounds_to_target", "") == series.Point(0.1, 17.0, stdev([4, 30]), "", True)
    assert series.point(_cell(lr=[0.1], MB=[None]), "lr", "MB", "") is None
    assert series.point(_cell(p=[0.3, 0.31], MB=[1, 1]), "p", "MB", "a") == series.Point(0.305, 1.0, 0.0, "a", False)
    assert series.point(_cell(model=["cnn"], MB=[1]), "model", "MB", "") == series.Point("cnn", 1.0, 0.0, "", False)


def test_the_picture_is_drawn_for_numbers_names_and_bounds(tmp_path: Path) -> None:
    points = [series.Point(x, 10.0 * i + 1, 1.0, f"{i % 2}", i == 3) for i, x in enumerate((0.01, 0.01, 1.0, 1.0))]
    named = [series.Point(name, 5.0, 0.0, "0", False) for name in ("fedavg", "scaffold", "fedprox", "moon")]
    many = [series.Point(1.0, i + 1.0, 0.0, f"series {i}", False) for i in range(12)]
    panels = [series.Panel(title, "x", of) for title, of in (("a", points), ("b", named), ("c", many))]
    series.draw(tmp_path / "p.png", panels, "rounds_to_target", "which", "digits, target 80 %")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
