"""Frames of run folders have the numbers of the folders' files; tables, cells, comparison, damaged folders."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import report_runs
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from report_runs import change, copies, quiet, small_run, small_runs, summary
from sweep_runs import rows_of, saved_figures
from torch.nn import functional as F

from fedcommons import UserError, experiment, load_clients, load_rounds, load_runs, means, run
from fedcommons.config import registry
from fedcommons.core.evaluation import CLIENTS
from fedcommons.reports import columns, series, tables
from fedcommons.reports.cells import Cell, cells, drop_duplicates, varied
from fedcommons.runs import build
from fedcommons.tracking.run_folder import STOPPED, read_rounds
from papers.fedssyn.published import fedssyn_table1
from papers.fedssyn.table1_pictures import rounds_to_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms with two seeds each; one more with another learning rate."""
    grid = {f"grid/{a}-{s}": {"algorithm": a, "seed": s} for a in ("fedavg", "fedprox") for s in (1, 0)}
    return small_runs(tmp_path_factory.mktemp("runs"), {**grid, "slow": {"lr": 0.02}})


@pytest.mark.long
def test_a_row_has_the_numbers_of_the_runs_own_files(folder: Path) -> None:
    runs = load_runs(folder)
    assert len(runs) == 5
    for row in runs.to_dict("records"):
        path = Path(row["run"])
        content, lines = summary(path), read_rounds(path)
        for name, value in content["config"].items():
            expected = tuple(value) if isinstance(value, list) else value
            assert pd.isna(row[name]) if value is None else row[name] == expected, name
        for name in ("rounds", "last_accuracy", "best_accuracy", "validation_accuracy", "bytes_up", "partition", "p"):
            assert row[name] == content[name]
        assert pd.isna(row["rounds_to_target"]) == (content["rounds_to_target"] is None)
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
    row, lines = load_runs(tmp_path / "late").iloc[0], read_rounds(tmp_path / "late")
    (older,) = copies(tmp_path / "late", tmp_path, "older")  # a run from the time before data.public
    of_run = {name: value for name, value in summary(older)["config"].items() if name != "data.public"}
    change(older / "summary.json", config=of_run)
    assert load_runs(older).iloc[0]["data.public"] == row["data.public"] == 0
    assert row["bytes_lost"] == sum(line["comm/lost_bytes"] for line in lines[1:]) == row["bytes_down"] / 4
    assert load_rounds(tmp_path / "late")["late"].to_list()[1:] == [line["late"] for line in lines[1:]]
    for noise, end in (("seeded", "_if_secret"), ("secret", "")):
        private = {"dp.local": True, "sigma": 3.0, "federation.rounds": 1, "dp.noise": noise}
        privacy, row = small_run(tmp_path / noise, private)["privacy"], load_runs(tmp_path / noise).iloc[0]
        assert row["sigma"] == 3.0
        assert row[f"epsilon{end}"] == privacy[f"epsilon_of_messages{end}"] > 0
        assert row[f"epsilon_local_training{end}"] == privacy[f"epsilon_local_training{end}"]["largest"]


def test_means_are_over_finished_seeds_and_misses_are_bounds(recorded: Callable[..., None], tmp_path: Path) -> None:
    """A seed that missed counts with its rounds; unfinished runs and the same run twice are named and left out."""
    for seed, reached in ((0, 3), (1, 5), (2, None)):
        wanted = experiment("smoke", values={"wandb": "off", "federation.rounds": 10, "seed": seed})
        metrics, course = {"convergence/zeta_sq": 2.0}, [[10, 2.0]]
        recorded(tmp_path / str(seed), wanted, reached, metrics, rounds_to_target=reached, zeta_sq=course)
    copies(tmp_path / "0", tmp_path, "twice")
    (unfinished,) = copies(tmp_path / "1", tmp_path, "unfinished")
    (unfinished / "summary.json").unlink()
    runs, messages = load_runs(tmp_path), list[str]()
    (row,) = means(runs, ["rounds_to_target", "last_accuracy"], say=messages.append).to_dict("records")
    assert (row["seeds"], row["rounds_to_target_missed"]) == (3, 1)
    assert (row["rounds_to_target"], row["rounds_to_target_sd"]) == (6, stdev([3, 5, 10]))
    assert row["rounds_to_target_shown"] == ">6 (missed by 1 of 3)"
    assert (row["last_accuracy"], row["last_accuracy_sd"]) == pytest.approx((0.6, stdev([0.9, 0.9, 0.0])))
    for text, name in zip(messages, ("unfinished", "twice"), strict=True):
        assert str(tmp_path / name) in text
    runs.loc[runs["seed"] == 1, "zeta_sq"] = float("nan")
    means(runs, ["zeta_sq"], say=messages.append)
    assert "zeta_sq is missing in 1 of 3 seeds" in messages[-1]
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


@pytest.mark.long
def test_the_status_of_runs_that_are_not_finished(folder: Path, tmp_path: Path) -> None:
    for path in copies(folder / "slow", tmp_path, "unfinished", "failed", "stopped"):
        (path / "summary.json").unlink()
    (tmp_path / "failed" / "error.txt").write_text("client 3 failed")
    (tmp_path / "stopped" / STOPPED).touch()
    runs = load_runs(tmp_path)
    assert {Path(run).name: status for run, status in zip(runs["run"], runs["status"], strict=True)} == {
        status: status for status in ("unfinished", "failed", "stopped")
    }


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
        messages: list[str] = []
        assert load_runs(tmp_path / str(number), say=messages.append)["run"].tolist() == [str(good)]
        assert [str(bad) in text and word in text for text in messages] == [True], (file, content)
    with pytest.raises(UserError, match="not a folder"):
        load_rounds(tmp_path / "nowhere")


@pytest.mark.long
def test_each_clients_line_is_the_server_model_on_its_own_images(tmp_path: Path) -> None:
    """Clients are evaluated in two jobs."""
    values = {
        "wandb": "off", "client.epochs": 1, "measure.every": 0, "measure.clients": True, "data.limit": 200,
        "partition": "iid", "partition.n_clients": CLIENTS + 2, "federation.rounds": 1,
    }  # fmt: skip
    wanted = experiment("smoke", values=values)
    result = run(wanted, tmp_path, say=quiet)
    clients = build.build(wanted).client_data.clients
    last, line = load_clients(tmp_path).query("round == 1"), read_rounds(tmp_path)[1]
    assert line["clients/worst_accuracy"] == last["accuracy"].min()
    assert last["accuracy"].tolist()[int(line["clients/worst"])] == line["clients/worst_accuracy"]
    assert last["client"].tolist() == list(range(len(clients)))
    for client, n, accuracy, loss in last[["client", "n", "accuracy", "loss"]].itertuples(index=False):
        data = clients[client]
        with torch.no_grad():
            logits = result.model(data.x)
        assert n == len(data)
        assert accuracy == pytest.approx((logits.argmax(1) == data.y).float().mean().item(), abs=1e-6)
        assert loss == pytest.approx(F.cross_entropy(logits, data.y).item(), rel=1e-5)


compare = report_runs.script("compare")


@pytest.mark.long
def test_mean_and_sd(compare: ModuleType, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c"
    words = [str(folder), "--x", "lr", "--y", "zeta_hat_sq", "--out", str(out)]
    assert compare.compare(words) == 0
    assert "they differ in algorithm" in capsys.readouterr().out
    assert compare.compare([*words, "--colour", "algorithm"]) == 0
    runs, table = load_runs(folder), pd.read_csv(out / "compare.csv")
    for row in table.to_dict("records"):
        values = runs[(runs["lr"] == row["lr"]) & (runs["algorithm"] == row["algorithm"])]["zeta_hat_sq"].tolist()
        assert row["seeds"] == len(values)
        assert row["zeta_hat_sq"] == pytest.approx(fmean(values))
        assert len(values) == 1 or row["zeta_hat_sq_sd"] == pytest.approx(stdev(values))
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    names = {"x": "lr", "y": "last_accuracy", "facet": "algorithm", "colour": "alpha"}
    panels = compare.panels(compare.cells(runs), names)
    assert [panel.title.rpartition(" = ")[2] for panel in panels] == ["fedavg", "fedprox"]
    assert [sorted(p.x for p in panel.points) for panel in panels] == [[0.02, 0.1], [0.1]]
    for wrong, part in (("--y algorithm", "--y takes a number"), ("--y MB --facet seed", "over seeds")):
        with pytest.raises(UserError, match=part):
            compare.compare([str(folder), "--x", "lr", *wrong.split()])
    (again,) = copies(folder, tmp_path, "again")  # a run in two folders is one seed
    messages: list[str] = []
    assert drop_duplicates(load_runs(folder, again), messages.append).equals(runs)
    assert len(messages) == 5


def test_a_point_is_the_mean_over_seeds_and_a_bound_where_one_missed_the_target() -> None:
    def cell(**columns: list[Any]) -> Cell:
        return Cell({}, pd.DataFrame(columns))

    reached = cell(lr=[0.1, 0.1], rounds_to_target=[4, 6], rounds=[30, 30])
    missed = cell(lr=[0.1, 0.1], rounds_to_target=[4, None], rounds=[30, 30])
    assert series.point(reached, "lr", "rounds_to_target", "") == series.Point(0.1, 5.0, stdev([4, 6]), "", False)
    assert series.point(missed, "lr", "rounds_to_target", "") == series.Point(0.1, 17.0, stdev([4, 30]), "", True)
    assert series.point(cell(lr=[0.1], MB=[None]), "lr", "MB", "") is None
    assert series.point(cell(model=["cnn"], MB=[1]), "model", "MB", "") == series.Point("cnn", 1.0, 0.0, "", False)


def row(setting: str, seed: int, reached: int | None, *, lr: float = 0.1, validation: float = 0.5, **more: Any) -> dict:
    """A row of ``load_runs``."""
    return {
        "run": f"runs/{setting}-{seed}", "data.name": "digits", "dataset": "digits", "algorithm": "fedavg",
        "sharing.setting": setting, "partition.alpha": 0.01, "partition.n_clients": 10, "federation.participation": 1.0,
        "seed": seed, "client.lr": lr, "lr": lr, "target": 0.8, "rounds_to_target": reached, "rounds": 30,
        "last_accuracy": 0.9, "best_accuracy": 0.95, "validation_accuracy": validation,
        "p": 0.0 if setting == "real" else 0.5, "MB": 2.0, "partition": f"partition{seed}", **more,
    }  # fmt: skip


def compared(*runs: dict) -> list[Cell]:
    return tables.compared(pd.DataFrame(runs))


def test_the_table_of_four_runs() -> None:
    runs = [row("real", 0, 16), row("real", 1, 20), row("shuffled_synthetic", 0, 4), row("shuffled_synthetic", 1, 5)]
    text = tables.table1_markdown(compared(*runs), {}, ["One note."])
    assert rows_of(text, "| d")[::2] == [
        ["data set", "N", "C", "alpha", "algorithm", "setting", "target", "rounds", "speed-up", "last acc.",
         "best acc.", "p", "lr", "MB exchanged"],
        ["digits", "10", "1", "0.01", "fedavg", "shuffled_synthetic", "80 %", "4.5 ± 0.7", "4.0x", "90.0 ± 0.0",
         "95.0 ± 0.0", "0.50", "0.1", "2.0"],
    ]  # fmt: skip
    assert fedssyn_table1()["cifar10", 10, 1.0, 0.01, "fedavg", "real"] == (0.44, "88")  # Fedssyn, table 1


def test_what_was_not_reached_is_censored() -> None:
    runs = [row("real", 0, None), row("real", 1, 20), row("shuffled_synthetic", 0, 4), row("shuffled_synthetic", 1, 4)]
    text = tables.table1_markdown(compared(*runs), {}, [])
    assert [row[7] for row in rows_of(text, "| digits")] == [">25 (missed by 1 of 2)", "4.0 ± 0.0"]
    assert "| >6.2x " in text
    both = compared(row("real", 0, None), row("shuffled_synthetic", 0, None))
    assert tables.speed_up(both[0], both[1]) == "-"
    pair = compared(row("shuffled_synthetic", 0, 3), row("real", 0, 24))
    head = "fedavg  alpha 0.01  N 10  C 1  no sharing 24 rounds"
    assert tables.effect(pair) == f"{head}  shuffled_synthetic 3 rounds  8.0x"
    slower = compared(row("real", 0, 10), row("shuffled_synthetic", 0, None))
    assert tables.speed_up(slower[0], slower[1]) == "<0.3x"


def test_the_learning_rate_is_chosen_by_validation_alone_and_partitions_must_be_equal() -> None:
    runs = [
        row("real", 0, 3, lr=0.01, validation=0.9), row("real", 1, 3, lr=0.01, validation=0.2),
        row("real", 0, 9, lr=0.1, validation=0.6), row("real", 1, 9, lr=0.1, validation=0.6),
    ]  # fmt: skip
    (cell,) = compared(*runs)
    assert (cell.values("lr"), cell.values("seed")) == ([0.1, 0.1], [0, 1])
    (tie,) = compared(*(row("real", 0, 3, lr=lr) for lr in (0.1, 0.01, 0.05)))
    assert tie.values("lr") == [0.01]
    with pytest.raises(UserError, match=r"no validation accuracy .* 0\.1, 0\.2"):
        compared(*(row("real", 0, None, lr=lr, validation=float("nan")) for lr in (0.1, 0.2)))
    with pytest.raises(UserError, match="different partitions cannot be compared: real-0 and shuffled_synthetic-0"):
        compared(row("real", 0, 3), row("shuffled_synthetic", 0, 2, partition="another"))
    assert len(compared(row("real", 0, 3), row("real", 0, 3, **{"partition.alpha": 0.1, "partition": "another"}))) == 2


def test_csv_has_a_line_for_each_run_and_downloads_of_late_clients_are_noted() -> None:
    runs = pd.DataFrame([row("real", 0, 3), row("real", 1, None)])
    lines = tables.records(runs, ("seed", "rounds_to_target", "fedprox.mu"))
    assert lines[0] == {"seed": 0, "rounds_to_target": 3, "fedprox.mu": None, "run_dir": "real-0"}
    assert tables.to_csv(lines) == "seed,rounds_to_target,fedprox.mu,run_dir\n0,3,,real-0\n1,,,real-1\n"
    late = {"run": "runs/a", "bytes_lost": 2_340_000, "straggler.rule": "fastest"}
    (note,) = tables.lost_notes(pd.DataFrame([{"run": "runs/old"}, late]))
    assert note.startswith("a: 2.3 of the MB")


def test_the_bars_of_table_1_are_means_and_their_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = saved_figures(monkeypatch)
    runs = [row("real", 0, 16), row("real", 1, 20), row("shuffled_synthetic", 0, 4), row("shuffled_synthetic", 1, None)]
    rounds_to_target(tmp_path / "t.png", compared(*runs), "digits", smoke=False)
    (axes,) = figures[0].axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [18, 30]
    assert to_hex(bars[1].get_facecolor()) == "#ffffff"  # open, up to the last round
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.get_lines()] == [[16, 20], [4, 30]]
    assert [text.get_text() for text in axes.texts] == ["18", ">17 (missed by 1 of 2)"]


def test_a_method_looks_alike_in_every_picture() -> None:
    methods, strategies = (list(registry.KINDS[kind].components) for kind in ("algorithm", "sharing"))
    looks = series.looks([*methods, *strategies])
    assert len(set(looks.values())) == len(looks) - 1  # FedAvg looks like no sharing
    assert all(series.looks(["mine", name])[name] == looks[name] for name in looks)
    for names in (strategies, ["merf, noise local", "merf, noise summed"], ["fedavg", "fedavg, mu 1", "fedavg, mu 2"]):
        assert len({colour for colour, _, _ in series.looks(names).values()}) == min(len(names), len(series.COLOURS))
    assert len({colour for colour, _, _ in series.looks(["fedpvr", "fedavg", "real"], by_colour=True).values()}) == 3


def test_whatever_else_varies_has_a_column_and_is_never_averaged() -> None:
    more = [{"sharing.c": c, "straggler.q": q} for q in (0.0, 0.3) for c in (0.1, 0.5)]
    pools = [row("my_stage", seed, 3 + seed, **fields) for fields in more for seed in (0, 1)]
    reals = [row("real", seed, 24, **{"straggler.q": q}) for q in (0.0, 0.3) for seed in (0, 1)]
    cells = compared(*reals, *pools)
    lines = [[part.strip() for part in line.split("|")] for line in tables.table1_markdown(cells, {}, []).splitlines()]
    head = lines[0]
    assert head[6:9] == ["setting", "straggler.q", "sharing.c"]
    assert [line[6:9] for line in lines[2:8]] == [
        ["no sharing", "0", "-"], ["no sharing", "0.3", "-"],
        *(["my_stage", q, c] for q in ("0", "0.3") for c in ("0.1", "0.5")),
    ]  # fmt: skip
    assert [line[head.index("rounds")] for line in lines[2:5]] == ["24.0 ± 0.0", "24.0 ± 0.0", "3.5 ± 0.7"]
    assert [line[head.index("speed-up")] for line in lines[2:8]] == ["", "", *["6.9x"] * 4]
    assert columns.without_sharing(cells) == [cells[i] for i in (0, 1, 0, 0, 1, 1)]


def test_the_epsilon_of_what_was_shared_has_a_column_only_where_one_can_be_stated() -> None:
    """The largest over seeds; none for a pool without a guarantee, a dash without sharing."""
    pools: list[dict] = [{"generator.name": "private", "pool_epsilon": e, "commons": "covered"} for e in (3.0, 4.25)]
    runs = [row("real", 0, 9, commons="nothing"), row("real", 1, 9, commons="nothing")]
    bare = row("shuffled_synthetic", 0, 3, commons="uncovered") | {"generator.name": "ddpm"}
    runs += [row("shuffled_synthetic", seed, 3) | pool | {"dp.delta": 1e-5} for seed, pool in enumerate(pools)]
    lines = tables.table1_markdown(compared(*runs, bare), {}, []).splitlines()[2:5]
    assert {line.split("|")[-2].strip() for line in lines} == {"-", "none", "4.25"}
    (note,) = tables.private_notes(pd.DataFrame(runs))
    assert "δ = 1e-05" in note
    assert "ε" not in tables.table1_markdown(compared(*runs[:2], bare), {}, [])
