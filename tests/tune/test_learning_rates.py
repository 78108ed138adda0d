"""The choice of learning rates: on other seeds, beyond the edges of a list, without rates at which a run diverged."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_runs

from fedcommons.tune import learning_rates, sweep
from fedcommons.tune.study import Entry

pytestmark = pytest.mark.long
methods, table1, commons = (report_runs.script(name) for name in ("methods", "table1", "commons"))
Played = list[tuple[str, float, int]]
"""Algorithm, learning rate and seed of each trial that ran."""


@pytest.fixture
def invented(recorded: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    """Run trials without Ray; ``validation`` returns a trial's accuracy, or None if the trial diverges."""

    def install(validation: Callable[[str, float, int], float | None]) -> Played:
        played: Played = []

        def run_cells(todo: sweep.Todo, out: Path, *args: Any, on_end: Callable[[], Any] = bool) -> sweep.Outcome:
            failures = {}
            for cell in todo.trials:
                played.append((cell.config.algorithm, cell.config.client.lr, cell.config.seed))
                if (value := validation(*played[-1])) is None:
                    (out / cell.name).mkdir()
                    (out / cell.name / "error.txt").touch()
                    failures[cell.name] = "it diverged"
                else:
                    recorded(out / cell.name, cell.config, 2, {"validation/accuracy": value})
                on_end()
            return sweep.Outcome({}, 0, failures)

        monkeypatch.setattr(sweep, "run_cells", run_cells)
        return played

    return install


def command(out: Path, *more: str) -> list[str]:
    return ["--preset=smoke", "--wandb=off", "--data.limit=120", "--seeds=0,1", f"--out={out}", *more]


def test_values_beyond_the_edge_are_tried_until_the_best_is_inside_or_three_were_added(
    methods: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    best = {"fedavg": 0.4, "scaffold": 0.001, "fedprox": 0.2}
    played = invented(lambda name, lr, seed: None if lr > 1 else 1 - abs(lr - best[name]) / 2)
    argv = command(tmp_path / "out", "--algorithms=fedavg,scaffold,fedprox", "--lrs=0.1,0.2", "--tuning-seeds=8,9")
    assert methods.methods(argv) == 0
    tried = [sorted({lr for n, lr, seed in played if n == name and seed > 1}) for name in best]
    assert tried == [[0.1, 0.2, 0.4, 0.8], [0.0125, 0.025, 0.05, 0.1, 0.2], [0.1, 0.2, 0.4]]
    reported = [(name, lr) for name, lr, seed in played if seed < 2]
    assert sorted(reported) == sorted([("fedavg", 0.4), ("scaffold", 0.0125), ("fedprox", 0.2)] * 2)
    text = (tmp_path / "out" / "methods.md").read_text()
    assert "seeds 8,9" in text
    assert "client.lr 0.1, 0.2, 0.4, 0.8 for fedavg, alpha 0.1" in text
    (edge,) = re.findall("still at an edge .*", text)
    assert ("client.lr 0.0125 for scaffold" in edge, "fedavg" in edge) == (True, False)
    played.clear()
    assert methods.methods([*argv, "--resume"]) == 0
    assert not played
    assert (tmp_path / "out" / "methods.md").read_text() == text


def test_a_diverged_value_is_worse_and_no_value_is_out_of_range(
    methods: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    played = invented(lambda name, lr, seed: None if name == "scaffold" and (lr > 0.2 or seed == lr * 5) else lr / 1e39)
    argv = command(tmp_path / "a", "--algorithms=scaffold", "--lrs=0.05,0.1,0.2")
    assert methods.methods(argv) == 0  # seed 1 diverges at 0.2, so that the table has the next best rate
    assert [rate for _, rate, seed in played if seed == 0] == [0.2, 0.1]
    played.clear()
    assert methods.methods(command(tmp_path / "b", "--algorithms=fedavg", "--lrs=1e37,1e38")) == 0
    assert {rate for _, rate, _ in played} == {1e37, 1e38}


def test_each_row_and_setting_of_table_1_chooses_its_own_rate_and_rows_without_a_choice_stay(
    table1: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    argv = command(tmp_path, "--algorithms=fedavg,scaffold", "--alphas=0.1", "--settings=real", "--lrs=0.1,0.2,0.3")
    entries = table1.entries(table1.arguments(argv))
    assert [sum(e.is_tuning == is_tuning for e in entries) for is_tuning in (True, False)] == [2 * 3, 2 * 2]
    fixed = [Entry(e.cell, {}) for e in entries]
    assert learning_rates.plan(fixed, tmp_path) == fixed
    played = invented(lambda name, lr, seed: 0.9 if lr == (0.2 if name == "fedavg" else 0.3) else 0.5)
    assert table1.table1(argv) == 0
    assert {(name, lr) for name, lr, seed in played if seed < 2} == {("fedavg", 0.2), ("scaffold", 0.3)}
    assert "seeds 100, which" in (tmp_path / "table1.md").read_text()
    assert "seed100" not in (tmp_path / "report.html").read_text()
    assert len((tmp_path / "table1.csv").read_text().splitlines()) == 1 + 2 * 2


def test_rates_of_one_field_are_compared_at_the_best_rates_of_the_other_fields() -> None:
    tried = [(("a", a), ("b", b)) for a, b in ((2.0, 1.0), (1.0, 1.0), (4.0, 1.0), (2.0, 10.0))]
    assert learning_rates.edges(tried, tried[0]) == [("b", False, (("a", 2.0), ("b", 0.1)))]
    assert learning_rates.edges(tried, tried[2]) == [("a", True, (("a", 8.0), ("b", 1.0)))]


@pytest.mark.usefixtures("untimed")
def test_a_dry_run_counts_the_listed_rates_only_and_says_so(
    commons: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commons.commons(command(tmp_path / "out", "--ways=real", "--lrs=0.1,0.2,0.3", "--dry-run")) == 0
    assert re.search("Not counted: learning rates(.|\n)*5 cells", capsys.readouterr().out)
