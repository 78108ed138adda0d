"""Tables from frames alone: censored rounds, chosen rates, spreads, columns of what else varies, pictures."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from sweep_runs import rows_of, saved_figures

from fedcommons.errors import UserError
from fedcommons.reports import columns, tables
from fedcommons.reports.cells import Cell
from papers.fedssyn.published import fedssyn_table1
from papers.fedssyn.table1_pictures import rounds_to_target


def run(setting: str, seed: int, reached: int | None, *, lr: float = 0.1, validation: float = 0.5, **more: Any) -> dict:
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


def rounds_column(markdown: str) -> list[str]:
    return [row[7] for row in rows_of(markdown, "| digits")]


def test_the_table_of_four_runs() -> None:
    runs = [run("real", 0, 16), run("real", 1, 20), run("shuffled_synthetic", 0, 4), run("shuffled_synthetic", 1, 5)]
    text = tables.table1_markdown(compared(*runs), {}, ["One note."])
    assert rows_of(text, "| d")[::2] == [
        ["data set", "N", "C", "alpha", "algorithm", "setting", "target", "rounds", "speed-up", "last acc.",
         "best acc.", "p", "lr", "MB exchanged"],
        ["digits", "10", "1", "0.01", "fedavg", "shuffled_synthetic", "80 %", "4.5 ± 0.7", "4.0x", "90.0 ± 0.0",
         "95.0 ± 0.0", "0.50", "0.1", "2.0"],
    ]  # fmt: skip
    published = {("digits", 10, 1.0, 0.01, "fedavg", "real"): "88"}
    assert rows_of(tables.table1_markdown(compared(run("real", 0, 3)), published, []), "| digits")[0][-1] == "88"
    assert fedssyn_table1()["cifar10", 10, 1.0, 0.01, "fedavg", "real"] == (0.44, "88")  # Fedssyn, table 1


def test_what_was_not_reached_is_censored() -> None:
    runs = [run("real", 0, None), run("real", 1, 20), run("shuffled_synthetic", 0, 4), run("shuffled_synthetic", 1, 4)]
    text = tables.table1_markdown(compared(*runs), {}, [])
    assert rounds_column(text) == [">30 (missed by 1 of 2)", "4.0 ± 0.0"]
    assert "| >6.2x " in text
    both = compared(run("real", 0, None), run("shuffled_synthetic", 0, None))
    assert rounds_column(tables.table1_markdown(both, {}, [])) == [">30", ">30"]
    assert tables.speed_up(both[0], both[1]) == "-"
    pair = compared(run("shuffled_synthetic", 0, 3), run("real", 0, 24))
    head = "fedavg  alpha 0.01  N 10  C 1  real 24 rounds"
    assert tables.effect(pair) == f"{head}  shuffled_synthetic 3 rounds  8.0x"
    slower = compared(run("real", 0, 10), run("shuffled_synthetic", 0, None))
    assert tables.speed_up(slower[0], slower[1]) == "<0.3x"


def test_the_learning_rate_is_chosen_by_validation_alone_and_partitions_must_be_equal() -> None:
    runs = [
        run("real", 0, 3, lr=0.01, validation=0.9), run("real", 1, 3, lr=0.01, validation=0.2),
        run("real", 0, 9, lr=0.1, validation=0.6), run("real", 1, 9, lr=0.1, validation=0.6),
    ]  # fmt: skip
    (cell,) = compared(*runs)
    assert (cell.values("lr"), cell.values("seed")) == ([0.1, 0.1], [0, 1])
    (tie,) = compared(*(run("real", 0, 3, lr=lr) for lr in (0.1, 0.01, 0.05)))
    assert tie.values("lr") == [0.01]
    with pytest.raises(UserError, match=r"no validation accuracy .* 0\.1, 0\.2"):
        compared(*(run("real", 0, None, lr=lr, validation=float("nan")) for lr in (0.1, 0.2)))
    with pytest.raises(UserError, match="different partitions cannot be compared: real-0 and shuffled_synthetic-0"):
        compared(run("real", 0, 3), run("shuffled_synthetic", 0, 2, partition="another"))
    assert len(compared(run("real", 0, 3), run("real", 0, 3, **{"partition.alpha": 0.1, "partition": "another"}))) == 2


def test_csv_has_a_line_for_each_run_and_downloads_of_late_clients_are_noted() -> None:
    runs = pd.DataFrame([run("real", 0, 3), run("real", 1, None)])
    lines = tables.records(runs, ("seed", "rounds_to_target", "fedprox.mu"))
    assert lines[0] == {"seed": 0, "rounds_to_target": 3, "fedprox.mu": None, "run_dir": "real-0"}
    assert tables.to_csv(lines) == "seed,rounds_to_target,fedprox.mu,run_dir\n0,3,,real-0\n1,,,real-1\n"
    late = {"run": "runs/a", "bytes_lost": 2_340_000, "straggler.rule": "fastest"}
    (note,) = tables.lost_notes(pd.DataFrame([{"run": "runs/old"}, {**late, "run": "runs/b", "bytes_lost": 0}, late]))
    assert note.startswith("a: 2.3 of the MB")


def test_the_bars_of_table_1_are_means_and_their_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each federation, a row for each method; a missed target is marked."""
    drawn = saved_figures(monkeypatch)
    runs = [run("real", 0, 16), run("real", 1, 20), run("shuffled_synthetic", 0, 4), run("shuffled_synthetic", 1, None)]
    more = [{**one, "algorithm": "scaffold"} for one in runs[:3]]
    other = [{**one, "partition.alpha": 0.1} for one in runs[:2]]
    rounds_to_target(tmp_path / "t.png", compared(*runs, *more, *other), "digits", smoke=False)
    first, second = drawn[0].axes
    assert [axes.get_title()[-12:] for axes in (first, second)] == ["alpha = 0.01", " alpha = 0.1"]
    assert [label.get_text() for label in first.get_yticklabels()] == ["fedavg", "scaffold"]
    bars = [bar for bar in first.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [18, 17, 18, 4]
    assert [np.asarray(line.get_xdata()).tolist() for line in first.get_lines()] == [[16, 20], [4, 30], [16, 20]]
    assert [text.get_text() for text in first.texts] == ["18", ">17", "18", "4"]


def test_the_spread_between_algorithms() -> None:
    def of(algorithm: str, setting: str, rounds: int | None, last: float, alpha: float = 0.01) -> dict:
        return run(setting, 0, rounds, algorithm=algorithm, last_accuracy=last, **{"partition.alpha": alpha})

    runs = [
        of("fedavg", "real", 20, 0.8), of("scaffold", "real", None, 0.7), of("feddyn", "real", 12, 0.75),
        of("fedavg", "shuffled_synthetic", 4, 0.9), of("scaffold", "shuffled_synthetic", 5, 0.91),
        of("fedavg", "real", 3, 0.9, alpha=0.1),
    ]  # fmt: skip
    assert tables.spread(compared(*runs)) == (
        "\nSpread between the algorithms:\n"
        "- digits, N = 10, C = 1, alpha = 0.01: real 10.0 points of last accuracy, 12 to >30 rounds; "
        "shuffled_synthetic 1.0 points of last accuracy, 4 to 5 rounds.\n"
    )
    assert tables.spread(compared(*runs[-1:])) == ""


def test_whatever_else_varies_has_a_column_and_is_never_averaged() -> None:
    more = [{"sharing.c": c, "straggler.q": q} for q in (0.0, 0.3) for c in (0.1, 0.5)]
    pools = [run("my_stage", seed, 3 + seed, **one) for one in more for seed in (0, 1)]
    reals = [run("real", seed, 24, **{"straggler.q": q}) for q in (0.0, 0.3) for seed in (0, 1)]
    cells = compared(*reals, *pools)
    lines = [[part.strip() for part in line.split("|")] for line in tables.table1_markdown(cells, {}, []).splitlines()]
    head = lines[0]
    assert head[6:9] == ["setting", "straggler.q", "sharing.c"]
    assert [line[6:9] for line in lines[2:8]] == [
        ["real", "0", "-"], ["real", "0.3", "-"],
        *(["my_stage", q, c] for q in ("0", "0.3") for c in ("0.1", "0.5")),
    ]  # fmt: skip
    assert [line[head.index("rounds")] for line in lines[2:5]] == ["24.0 ± 0.0", "24.0 ± 0.0", "3.5 ± 0.7"]
    assert [line[head.index("speed-up")] for line in lines[2:8]] == ["", "", *["6.9x"] * 4]
    assert columns.without_sharing(cells) == [cells[i] for i in (0, 1, 0, 0, 1, 1)]
    assert (columns.method(cells[3]), columns.setting(cells[3])) == ("fedavg straggler.q 0", "my_stage sharing.c 0.5")


def test_the_epsilon_of_what_was_shared_has_a_column_only_where_one_can_be_stated() -> None:
    """The largest over seeds; none for a pool without a guarantee, a dash without sharing."""
    pools: list[dict] = [{"generator.name": "private", "pool_epsilon": e, "commons": "covered"} for e in (3.0, 4.25)]
    runs = [run("real", 0, 9, commons="nothing"), run("real", 1, 9, commons="nothing")]
    bare = run("shuffled_synthetic", 0, 3, commons="uncovered") | {"generator.name": "ddpm"}
    runs += [run("shuffled_synthetic", seed, 3) | one | {"dp.delta": 1e-5} for seed, one in enumerate(pools)]
    lines = tables.table1_markdown(compared(*runs, bare), {}, []).splitlines()[2:5]
    assert {line.split("|")[-2].strip() for line in lines} == {"-", "none", "4.25"}
    (note,) = tables.private_notes(pd.DataFrame(runs))
    assert "δ = 1e-05" in note
    assert "ε" not in tables.table1_markdown(compared(*runs[:2], bare), {}, [])


def test_accuracies_over_clients_have_columns_where_they_are_there() -> None:
    """Heads say which model, and on what; a method without a server model has neither rounds nor accuracy."""
    ditto = run("real", 0, 5, **{"clients/accuracy_mean": 0.8, "personal/accuracy_worst_decile": 0.25})
    alone = run("real", 0, None, validation=float("nan"), **{"personal/accuracy_worst_decile": 0.5})
    alone |= {"algorithm": "fedper", "last_accuracy": None, "best_accuracy": None}
    cells = compared(ditto, alone)
    head, _, first, second = (
        [part.strip() for part in line.split("|")[1:-1]]
        for line in tables.table1_markdown(cells, {}, []).splitlines()[:4]
    )
    assert head[-2:] == ["clients' acc., mean", "personal acc., worst tenth"]
    assert (first[-2:], second[-2:]) == (["80.0", "25.0"], ["-", "50.0"])
    assert second[7:11] == ["-", "", "-", "-"]
