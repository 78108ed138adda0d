"""Figures 3 and 4 and table 2 of Fedssyn: their runs, and tables and pictures from made numbers and small runs."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import report_runs
from rich.console import Console
from sweep_runs import complete, in_order, rows_of

from fedcommons.cli.display import Display
from fedcommons.reports import tables
from papers.fedssyn import central
from papers.fedssyn.figures import Dot, accuracy_table, panels
from papers.fedssyn.sensitivity_report import is_above


def run(setting: str, seed: int, last: float, alpha: float | None = 0.1, **more: Any) -> dict[str, Any]:
    return {
        "data.name": "digits", "partition.n_clients": 10, "federation.participation": 1.0, "partition.alpha": alpha,
        "algorithm": "fedavg", "sharing.setting": setting, "seed": seed, "client.lr": 0.04, "lr": 0.04, "p": 0.5,
        "partition": f"{alpha} {seed}", "last_accuracy": last, "best_accuracy": last + 0.01, **more,
    }  # fmt: skip


CENTRAL = {"algorithm": "central", "federation.participation": None, "p": None, "client.lr": None}
RUNS = [
    run("real", 0, 0.5), run("real", 1, 0.6), run("shuffled_synthetic", 0, 0.9), run("shuffled_synthetic", 1, 0.9),
    run("real", 0, 0.4, alpha=0.01), run("real", 1, 0.3, alpha=0.01),
    *(run("central_real", s, 0.98 - 0.02 * s, None, **CENTRAL, **{"partition.n_clients": None}) for s in range(2)),
    *(run("central_synthetic", seed, 0.95, **CENTRAL) for seed in range(2)),
]  # fmt: skip


def test_figure_3s_table_and_panels_have_each_dot_and_central_model() -> None:
    rows = rows_of(accuracy_table(tables.compared(pd.DataFrame(RUNS)), []))
    assert rows[2] == ["digits", "10", "1", "0.1", "fedavg", "no sharing", "55.0 ± 7.1", "56.0 ± 7.1", "0.50", "0.04"]
    assert rows[5][3:] == ["-", "central, all real data", "central_real", "97.0 ± 1.4", "98.0 ± 1.4", "-", "0.04"]
    assert rows[6][4] == "server trains on the pool, 0 rounds"
    first, second = panels(tables.compared(pd.DataFrame(RUNS)))
    assert first.dots[0] == Dot("fedavg", "no sharing", [50.0, 60.0])
    assert [name for name, _ in first.lines] == ["central_real", "central_synthetic"]
    assert first.lines[0][1] == pytest.approx([98, 96])
    assert second.lines == first.lines[:1]  # this alpha has no synthetic images


figure3 = report_runs.script("figure3")


@pytest.mark.long
def test_figure_3_from_small_runs(figure3: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--preset=smoke", "--alphas=0.1", "--federation.rounds=1", "--p-real=0.3", "--central-epochs=2",
            "--data.limit=80", "--wandb=off", f"--out={out}",
            "--generator.channels=[8,8]", "--generator.sampling_steps=2",
            "--settings=real,shuffled_synthetic,shuffled_real", f"--artifacts={tmp_path / 'artifacts'}"]  # fmt: skip
    options = figure3.arguments(argv)
    entries_of = figure3.entries(options)
    cells, lines = [e.cell for e in entries_of], figure3.central_lines(entries_of, options)
    complete(figure3.figure3, argv, cells, out, lambda: [central.run(line, out / line.name) for line in lines])
    summary = json.loads((out / "summary.json").read_text())
    shares = {c["setting"]: c["p"] for c in summary["cells"]}
    assert shares == pytest.approx({"real": 0, "shuffled_synthetic": 0.5, "shuffled_real": 0.3}, abs=0.05)
    assert [c["setting"] for c in summary["central"]] == ["central_real", "central_synthetic"]


script = report_runs.script("sensitivity")


def entries(script: ModuleType, *argv: str) -> list[Any]:
    return script.entries(script.arguments(argv))


def test_a_gain_counts_only_above_students_interval() -> None:
    assert [is_above(ahead) for ahead in ([1.0], [1.0, 1.2, 1.1], [1.0, 5.0, -0.5])] == [None, True, False]


@pytest.mark.long
def test_figure_4_from_small_runs(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["--preset=smoke", "--rhos=1", "--numbers=1", "--clients=4", "--generators=ddpm", "--data.limit=80",
            "--generator.channels=[8,8]", "--generator.sampling_steps=2", "--federation.rounds=1",
            "--wandb=off", f"--artifacts={tmp_path}/artifacts", f"--out={out}"]  # fmt: skip
    grid = entries(script, *argv)
    lines = script.central_lines(grid, script.arguments(argv))
    assert {line.epochs for line in lines} == {2}  # a round of two epochs
    cells = [e.cell for e in grid]
    complete(script.sensitivity, argv, cells, out, lambda: [central.run(line, out / line.name) for line in lines])
    with (out / "sensitivity.csv").open() as file:
        pools = [(line["panel"], line["generator"], line["epochs"]) for line in csv.DictReader(file)]
    assert pools == [("a", "", "0"), ("a", "ddpm", "2"), ("b", "", "0"), ("b", "ddpm", "1"), ("b", "ddpm", "2"),
                     ("c", "", "0"), ("c", "ddpm", "2")]  # fmt: skip


table2 = report_runs.script("table2")


@pytest.mark.long
def test_rates_come_from_the_tuning_seeds_and_bytes_are_counted_until_the_target(
    table2: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    options = table2.arguments(["--seeds", "0,1", "--alphas", "0.1", "--methods", "fedssyn,fedgen,feddm,fedavg",
                                "--rates", "0.04,0.1,0.3", "--image-rates", "0.1,0.2,0.4"])  # fmt: skip
    runs, display = table2.entries(options), Display(Console(quiet=True))
    for e in in_order(table2.table2, runs, tmp_path):
        validated = 0.5 + 0.1 * (e["rates"] in ((("client.lr", 0.1),), (("feddm.image_lr", 0.2),)))
        accuracy = {"last_accuracy": 0.6, "best_accuracy": 0.95}
        reached = None if e["method"] == "fedavg" else 5
        summary = {"rounds_to_target": reached, "validation_accuracy": validated, **accuracy}
        metrics = {"validation/accuracy": validated, "comm/total_bytes": 3e6 if e["method"] == "fedgen" else 6e6}
        recorded(tmp_path / e.cell.name, e.cell.config, reached, metrics, **summary)
    table2.table2.report(runs, options, tmp_path, display)
    rows = rows_of((tmp_path / "table2.md").read_text(), "| 0.1")
    assert [row[2] for row in rows[:4]] == ["0.1", "0.1", "0.2", "0.1"]
    assert [row[6:8] for row in rows[:4]] == [["5.0 ± 0.0", "6.00"], ["5.0 ± 0.0", "3.00"], ["5.0 ± 0.0", "6.00"],
                                              [">20 (missed by 2 of 2)", ">6.00"]]  # fmt: skip
    assert rows[4][2:] == ["200 %", "50 %"]
    assert (tmp_path / "table2.png").read_bytes().startswith(b"\x89PNG")
