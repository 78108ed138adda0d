"""Frames of run folders have the numbers of the folders' own files; cells, clients, comparison, damaged folders."""

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
from fedcommons.errors import UserError
from fedcommons.federation.evaluation import CLIENTS
from fedcommons.reports import series
from fedcommons.reports.cells import Cell, cells, once, varied
from fedcommons.reports.frames import load_clients
from fedcommons.runs import build
from fedcommons.tracking.run_folder import STOPPED, read_clients, read_rounds


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
        assert row["status"] == "finished"
    slow = runs[runs["run"] == str(folder / "slow")].iloc[0]
    assert slow[["alpha", "p", "lr"]].to_list() == [0.1, 0.0, 0.02]
    assert len(load_runs(folder, folder / "slow", str(folder / "grid" / ".." / "slow"))) == 5  # each run once
    rounds = load_rounds(folder / "grid", folder / "slow")
    assert len(rounds) == 5 * 3
    for path, of_run in rounds.groupby("run"):
        lines = read_rounds(Path(str(path)))
        assert of_run["test/accuracy"].tolist() == [line["test/accuracy"] for line in lines]
        assert of_run["zeta_sq"].tolist() == [line["convergence/zeta_sq"] for line in lines]


def test_rows_have_the_bytes_of_stragglers_and_names_of_epsilons_say_whether_noise_was_secret(tmp_path: Path) -> None:
    small_run(tmp_path / "late", {"straggler.rule": "fastest", "straggler.k": 3})
    row, lines = load_runs(tmp_path / "late", say=silent).iloc[0], read_rounds(tmp_path / "late")
    assert row["bytes_lost"] == sum(line["comm/lost_bytes"] for line in lines[1:]) == row["bytes_down"] / 4
    assert load_rounds(tmp_path / "late")["late"].to_list()[1:] == [line["late"] for line in lines[1:]]
    for noise, end in (("seeded", "_if_secret"), ("secret", "")):
        private = {"dp.local": True, "sigma": 3.0, "federation.rounds": 1, "dp.noise": noise}
        own, row = small_run(tmp_path / noise, private)["privacy"], load_runs(tmp_path / noise).iloc[0]
        assert row["sigma"] == 3.0
        assert row[f"epsilon{end}"] == own[f"epsilon_of_messages{end}"] > 0
        assert row[f"epsilon_local_training{end}"] == own[f"epsilon_local_training{end}"]["largest"]


def test_means_are_over_finished_seeds_and_misses_are_bounds(recorded: Callable[..., None], tmp_path: Path) -> None:
    """A seed that missed counts with its rounds; unfinished runs and the same run twice are named and left out."""
    for seed, reached in ((0, 3), (1, 5), (2, None)):
        wanted = experiment("smoke", values={"wandb": "off", "federation.rounds": 10, "seed": seed})
        metrics, course = {"convergence/zeta_sq": 2.0}, [[10, 2.0]]
        recorded(tmp_path / str(seed), wanted, reached, metrics, rounds_to_target=reached, zeta_sq=course)
    copies(tmp_path / "0", tmp_path, "twice")
    (unfinished,) = copies(tmp_path / "1", tmp_path, "unfinished")
    (unfinished / "summary.json").unlink()
    runs, said = load_runs(tmp_path, say=silent), list[str]()
    (row,) = means(runs, ["rounds_to_target", "last_accuracy"], say=said.append).to_dict("records")
    assert (row["seeds"], row["rounds_to_target_missed"]) == (3, 1)
    assert (row["rounds_to_target"], row["rounds_to_target_sd"]) == (6, stdev([3, 5, 10]))
    assert row["rounds_to_target_shown"] == ">6"
    assert (row["last_accuracy"], row["last_accuracy_sd"]) == pytest.approx((0.6, stdev([0.9, 0.9, 0.0])))
    for text, name in zip(said, ("unfinished", "twice"), strict=True):
        assert str(tmp_path / name) in text
    runs.loc[runs["seed"] == 1, "zeta_sq"] = float("nan")
    means(runs, ["zeta_sq"], say=said.append)
    assert "zeta_sq is missing in 1 of 3 seeds" in said[-1]
    with pytest.raises(UserError, match="last_accuracy"):
        means(runs, ["last_acuracy"])


@pytest.mark.long
def test_cells_are_runs_that_differ_in_their_seeds_only(folder: Path) -> None:
    runs = load_runs(folder)
    assert varied(runs) == ["algorithm", "client.lr"]  # fedprox.mu follows from the algorithm
    by_fields = {tuple(cell.fields.values()): cell for cell in cells(runs)}
    assert {key: cell.runs["seed"].tolist() for key, cell in by_fields.items()} == {
        ("fedavg", 0.1): [0, 1], ("fedprox", 0.1): [0, 1], ("fedavg", 0.02): [0],
    }  # fmt: skip
    table = means(runs, ["best_accuracy"])
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
    privacy = {"epsilon_of_messages": 2.5, "pool_epsilon_max": 1.5, "commons": "covered"}  # of an earlier version
    (old,) = copies(folder / "slow", tmp_path / "earlier", "old")
    change(old / "summary.json", privacy=privacy)
    row = load_runs(old).iloc[0]
    assert (row["epsilon_if_secret"], row["pool_epsilon_if_secret"]) == (2.5, 1.5)
    assert not {"epsilon", "pool_epsilon"} & set(row.index)


@pytest.mark.long
def test_a_folder_that_cannot_be_read_is_named_and_left_out(folder: Path, tmp_path: Path) -> None:
    for number, (file, content, word) in enumerate((
        ("summary.json", '{"rounds": 3', "damaged"), ("summary.json", '{"rounds": 99}', "damaged"),
        ("config.yaml", "seed: [", "damaged"), ("rounds.jsonl", "", "no round"), ("config", "", "earlier version"),
    )):  # fmt: skip
        good, bad = copies(folder / "slow", tmp_path / str(number), "good", "bad")
        if file == "config":
            change(bad / "summary.json", config=None)
        else:
            (bad / file).write_text(content)
        if file == "config.yaml":
            (bad / "summary.json").unlink()
        said: list[str] = []
        assert load_runs(tmp_path / str(number), say=said.append)["run"].tolist() == [str(good)]
        assert [str(bad) in text and word in text for text in said] == [True], (file, content)
    with pytest.raises(UserError, match="not a folder"):
        load_rounds(tmp_path / "nowhere")


RECORDED = {
    "wandb": "off", "federation.rounds": 3, "federation.checkpoint_every": 1, "client.epochs": 1, "measure.every": 0,
    "measure.clients": True, "data.limit": 200, "partition.n_clients": 6, "alpha": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    run(experiment("smoke", values=RECORDED), path, say=quiet)
    return path


@pytest.mark.long
def test_each_clients_line_is_the_server_model_on_its_own_images(tmp_path: Path) -> None:
    """Clients are evaluated in two jobs."""
    many = {"partition": "iid", "partition.n_clients": CLIENTS + 2, "federation.rounds": 1}
    wanted = experiment("smoke", values={name: v for name, v in {**RECORDED, **many}.items() if name != "alpha"})
    result = run(wanted, tmp_path, say=quiet)
    own = build.prepare(wanted).dealt.own
    last = load_clients(tmp_path).query("round == 1")
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
    whole = (recording / "clients.jsonl").read_text()
    for number, kept in enumerate((whole[:-20], "")):
        (path,) = copies(recording, tmp_path, str(number))
        (path / "summary.json").unlink()
        (path / "clients.jsonl").write_text(kept)
        run(experiment("smoke", values=RECORDED), path, say=quiet)
        for name in ("clients.jsonl", "rounds.jsonl", "summary.json"):
            assert (path / name).read_bytes() == (recording / name).read_bytes()


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
    (again,) = copies(folder, tmp_path, "again")  # a run in two folders is one seed
    said: list[str] = []
    assert once(load_runs(folder, again), said.append).equals(runs)
    assert len(said) == 5


@pytest.mark.long
def test_bad_requests_are_refused(compare: ModuleType, folder: Path) -> None:
    for words, part in (
        ("--x lrr", "lr"), ("--y algorithm", "--y takes a number"), ("--facet seed", "over seeds"),
        (f"--x=lr --out={folder}", "not empty"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=part):
            compare.compare([str(folder), *words.split()])


def test_a_point_is_the_mean_over_seeds_and_a_bound_where_one_missed_the_target() -> None:
    def cell(**columns: list[Any]) -> Cell:
        return Cell({}, pd.DataFrame(columns))

    reached = cell(lr=[0.1, 0.1], rounds_to_target=[4, 6], rounds=[30, 30])
    missed = cell(lr=[0.1, 0.1], rounds_to_target=[4, None], rounds=[30, 30])
    assert series.point(reached, "lr", "rounds_to_target", "") == series.Point(0.1, 5.0, stdev([4, 6]), "", False)
    assert series.point(missed, "lr", "rounds_to_target", "") == series.Point(0.1, 17.0, stdev([4, 30]), "", True)
    assert series.point(cell(lr=[0.1], MB=[None]), "lr", "MB", "") is None
    assert series.point(cell(model=["cnn"], MB=[1]), "model", "MB", "") == series.Point("cnn", 1.0, 0.0, "", False)


def test_the_picture_is_drawn_for_numbers_names_and_bounds(tmp_path: Path) -> None:
    points = [series.Point(x, 10.0 * i + 1, 1.0, f"{i % 2}", i == 3) for i, x in enumerate((0.01, 0.01, 1.0, 1.0))]
    named = [series.Point(name, 5.0, 0.0, "0", False) for name in ("fedavg", "scaffold", "fedprox", "moon")]
    panels = [series.Panel(title, "x", of) for title, of in (("a", points), ("b", named))]
    series.draw(tmp_path / "p.png", panels, "rounds_to_target", "which", "digits, target 80 %")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
