"""Tables come from summaries alone; a fixed set of runs gives an exact table."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from fedcommons.reports import tables
from fedcommons.reports.plots import RoundBar, class_heatmap, round_bars
from fedcommons.reports.published import fedssyn_table1


def run(setting: str, seed: int, reached: int | None, *, lr: float = 0.1, validation: float = 0.5, **more: Any) -> dict:
    return {
        "dataset": "digits", "algorithm": "fedavg", "setting": setting, "alpha": 0.01, "n_clients": 10,
        "participation": 1.0, "seed": seed, "learning_rate": lr, "target": 0.8, "rounds_to_target": reached,
        "rounds": 30, "last_accuracy": 0.9, "best_accuracy": 0.95, "validation_accuracy": validation,
        "p": 0.0 if setting == "real" else 0.5, "bytes_down": 10**6, "bytes_up": 10**6, "bytes_once": 0,
        "partition": f"partition{seed}", "zeta_sq": [[0, 1.0]], **more,
    }  # fmt: skip


def rounds_column(markdown: str) -> list[str]:
    return [line.split("|")[8].strip() for line in markdown.splitlines() if line.startswith("| digits")]


def test_the_table_is_exact() -> None:
    runs = [run("real", 0, 16), run("real", 1, 20), run("shuffled_synthetic", 0, 4), run("shuffled_synthetic", 1, 5)]
    text = tables.table1_markdown(tables.entries(runs), {}, ["One note."])
    assert text == (
        "| data set | N  | C | alpha | algorithm | setting            | target | rounds     | speed-up | last acc.  "
        "| best acc.  | p    | lr  | MB exchanged |\n"
        "|----------|----|---|-------|-----------|--------------------|--------|------------|----------|------------"
        "|------------|------|-----|--------------|\n"
        "| digits   | 10 | 1 | 0.01  | fedavg    | real               | 80 %   | 18.0 ± 2.8 |          | 90.0 ± 0.0 "
        "| 95.0 ± 0.0 | 0.00 | 0.1 | 2.0          |\n"
        "| digits   | 10 | 1 | 0.01  | fedavg    | shuffled_synthetic | 80 %   | 4.5 ± 0.7  | 4.0x     | 90.0 ± 0.0 "
        "| 95.0 ± 0.0 | 0.50 | 0.1 | 2.0          |\n"
        "\n1. One note.\n"
    )


def test_what_was_not_reached_is_censored() -> None:
    runs = [run("real", 0, None), run("real", 1, 20), run("shuffled_synthetic", 0, 4), run("shuffled_synthetic", 1, 4)]
    text = tables.table1_markdown(tables.entries(runs), {}, [])
    assert rounds_column(text) == [">30 (1 of 2 seeds)", "4.0 ± 0.0"]
    assert "| >6.2x " in text
    both = tables.entries([run("real", 0, None), run("shuffled_synthetic", 0, None)])
    assert rounds_column(tables.table1_markdown(both, {}, [])) == [">30", ">30"]
    assert tables.speed_up(both[0], both[1]) == "-"
    slower = tables.entries([run("real", 0, 10), run("shuffled_synthetic", 0, None)])
    assert tables.speed_up(slower[0], slower[1]) == "<0.3x"


def test_the_learning_rate_is_chosen_by_validation_alone_one_for_all_seeds() -> None:
    runs = [
        run("real", 0, 3, lr=0.01, validation=0.9), run("real", 1, 3, lr=0.01, validation=0.2),
        run("real", 0, 9, lr=0.1, validation=0.6), run("real", 1, 9, lr=0.1, validation=0.6),
    ]  # fmt: skip
    assert [(r["learning_rate"], r["seed"]) for r in tables.choose_learning_rate(runs)] == [(0.1, 0), (0.1, 1)]
    tie = [run("real", 0, 3, lr=lr) for lr in (0.1, 0.01, 0.05)]
    assert [r["learning_rate"] for r in tables.choose_learning_rate(tie)] == [0.01]


def test_runs_on_different_partitions_are_not_compared() -> None:
    runs = [run("real", 0, 3), run("shuffled_synthetic", 0, 2, partition="another")]
    with pytest.raises(ValueError, match="different partitions"):
        tables.entries(runs)


def test_csv_has_a_line_for_each_run() -> None:
    rows = list(csv.DictReader(io.StringIO(tables.to_csv([run("real", 0, 3), run("real", 1, None)]))))
    assert [(r["seed"], r["rounds_to_target"]) for r in rows] == [("0", "3"), ("1", "")]
    assert "zeta_sq" not in rows[0]


def test_published_values_are_the_papers() -> None:
    found = fedssyn_table1()
    assert found["cifar10", 10, 1.0, 0.01, "fedavg", "real"] == (0.44, "88")  # Fedssyn, table 1
    assert found["cifar10", 10, 1.0, 0.01, "fedavg", "shuffled_synthetic"] == (0.44, "4")
    assert len(found) == 160
    column = tables.table1_markdown(
        tables.entries([run("real", 0, 3)]), {("digits", 10, 1.0, 0.01, "fedavg", "real"): "88"}, []
    )
    assert column.splitlines()[2].rstrip("| ").endswith("88")


def test_pictures_are_drawn(tmp_path: Path) -> None:
    import numpy as np

    bars = [RoundBar("real", 30, None, False), RoundBar("shuffled_synthetic", 4, 1.0, True)]
    more = [RoundBar("my_lab.py:Mine", 8, 2.0, True), RoundBar("other.py:Its", 9, None, True)]
    round_bars(tmp_path / "bars.png", [("α = 0.01", [*bars, *more])], 30, "digits", smoke=True)
    class_heatmap(np.eye(10, dtype=int) * 12, tmp_path / "heat.png")
    for name in ("bars.png", "heat.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_spread_between_algorithms() -> None:
    def of(algorithm: str, setting: str, rounds: int | None, last: float, alpha: float = 0.01) -> dict:
        return run(setting, 0, rounds, algorithm=algorithm, last_accuracy=last, alpha=alpha)

    runs = [
        of("fedavg", "real", 20, 0.8), of("scaffold", "real", None, 0.7), of("feddyn", "real", 12, 0.75),
        of("fedavg", "shuffled_synthetic", 4, 0.9), of("scaffold", "shuffled_synthetic", 5, 0.91),
        of("fedavg", "real", 3, 0.9, alpha=0.1),
    ]  # fmt: skip
    assert tables.spread(tables.entries(runs)) == (
        "\nSpread between the algorithms:\n"
        "- digits, N = 10, C = 1, alpha = 0.01: real 10.0 points of last accuracy, 12 to >30 rounds; "
        "shuffled_synthetic 1.0 points of last accuracy, 4 to 5 rounds.\n"
    )
    assert tables.spread(tables.entries(runs[-1:])) == ""


def test_a_cell_is_what_varies_less_the_seed() -> None:
    """Runs that differ in any other field are never averaged; the algorithm's column says in which."""
    base = {"dataset": "digits", "n_clients": 4, "participation": 1.0, "alpha": None, "algorithm": "fedprox",
            "setting": "real", "partition": "x", "target": 0.5, "rounds": 3, "rounds_to_target": 2, "p": 0.0,
            "last_accuracy": 0.5, "best_accuracy": 0.6, "learning_rate": 0.1, "bytes_down": 1, "bytes_up": 1,
            "bytes_once": 0}  # fmt: skip
    runs = [
        {**base, "seed": seed, "config": {"seed": seed, "fedprox.mu": mu, "model.channels": [1, 2]}}
        for mu in (0.1, 0.5) for seed in (0, 1)
    ]  # fmt: skip
    cells = tables.entries(runs)
    assert [(len(e.runs), e.varied) for e in cells] == [(2, (("fedprox.mu", 0.1),)), (2, (("fedprox.mu", 0.5),))]
    assert "fedprox fedprox.mu=0.5" in tables.table1_markdown(cells, {}, [])
    assert [e.varied for e in tables.entries([{n: v for n, v in r.items() if n != "config"} for r in runs])] == [()]


def test_downloads_of_late_clients_are_told() -> None:
    late = {"run_dir": "a", "bytes_lost": 2_340_000, "config": {"straggler.rule": "fastest"}}
    assert tables.lost_notes([{"run_dir": "old"}, {**late, "run_dir": "b", "bytes_lost": 0}, late]) == [
        "a: 2.3 of the MB exchanged were downloads of late clients, whose "
        "replies did not come (straggler.rule fastest)."
    ]


def test_a_pair_in_a_line() -> None:
    pool, real = run("shuffled_synthetic", 0, 3), run("real", 0, 24)
    line = "fedavg  alpha 0.01  N 10  C 1  real 24 rounds  shuffled_synthetic 3 rounds  8.0x"
    assert tables.effect(tables.entries([pool, real])) == line
    assert tables.effect(tables.entries([real])) == "fedavg  alpha 0.01  N 10  C 1  real 24 rounds"
