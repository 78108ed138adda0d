"""The choice of learning rates: on other seeds, beyond the edges of a list, without rates at which a run diverged."""

import csv
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import report_runs
from rich.console import Console
from sweep_runs import in_order

from fedcommons.cli.display import Display
from fedcommons.errors import ClientError, DivergenceError
from fedcommons.federation.client_block import NOT_FINITE
from fedcommons.storage.error_file import leaving_errors
from fedcommons.tune import learning_rates, sweep
from fedcommons.tune.study import Entry

pytestmark = pytest.mark.long
methods, table1, commons = (report_runs.script(name) for name in ("methods", "table1", "commons"))
Played = list[tuple[str, float, int]]
"""Algorithm, learning rate and seed of each trial that ran."""
DIVERGED, FAILED = DivergenceError("it diverged"), ClientError("the disk is full")


@pytest.fixture
def invented(recorded: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    """Run trials without Ray. ``validation`` returns a trial's accuracy a after the last round, or its error.

    All rounds before the last have the accuracy 1 - a, so that the best round may prefer another learning rate.
    """

    def install(validation: Callable[[str, float, int], float | ClientError]) -> Played:
        played: Played = []

        def run_cells(todo: sweep.Todo, out: Path, *args: Any, on_end: Callable[[], Any] = bool) -> sweep.Outcome:
            failures = {}
            for cell in todo.trials:
                played.append((cell.config.algorithm, cell.config.client.lr, cell.config.seed))
                if isinstance(value := validation(*played[-1]), ClientError):
                    (out / cell.name).mkdir(exist_ok=True)
                    with suppress(ClientError), leaving_errors(out / cell.name):
                        raise value
                    failures[cell.name] = value.sentence
                else:
                    rmtree(out / cell.name, ignore_errors=True)
                    recorded(out / cell.name, cell.config, 2)
                    file = out / cell.name / "rounds.jsonl"
                    *lines, last = map(json.loads, file.read_text().splitlines())
                    lines = [{**line, "validation/accuracy": 1 - value} for line in lines]
                    lines.append({**last, "validation/accuracy": value})
                    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    """FedAvg is best at 0.8, but diverges there on the second tuning seed; the first alone would prefer 0.1."""
    best = {"fedavg": 0.4, "scaffold": 0.001, "fedprox": 0.2}

    def validation(name: str, lr: float, seed: int) -> float | ClientError:
        if name == "fedavg" and lr > 0.5:
            return DIVERGED if seed == 9 else 0.9
        return 0.8 - abs(lr - best[name]) / 2 + (lr == 0.1) * {8: 0.2, 9: -0.3}.get(seed, 0)

    played = invented(validation)
    argv = command(tmp_path / "out", "--algorithms=fedavg,scaffold,fedprox", "--lrs=0.1,0.2", "--tuning-seeds=8,9")
    assert methods.methods(argv) == 0
    tried = [sorted({lr for n, lr, seed in played if n == name and seed > 1}) for name in best]
    assert tried == [[0.1, 0.2, 0.4, 0.8], [0.0125, 0.025, 0.05, 0.1, 0.2], [0.1, 0.2, 0.4]]
    reported = [(name, lr) for name, lr, seed in played if seed < 2]
    assert sorted(reported) == sorted([("fedavg", 0.4), ("scaffold", 0.0125), ("fedprox", 0.2)] * 2)
    text = (tmp_path / "out" / "methods.md").read_text()
    assert "seeds (8, 9)" in text
    assert "client.lr 0.1, 0.2, 0.4, 0.8 for fedavg, alpha 0.1" in text
    (edge,) = re.findall("still at an edge .*", text)
    assert ("client.lr 0.0125 for scaffold" in edge, "fedavg" in edge) == (True, False)
    assert "client.lr 0.8 (seed 9) for fedavg, alpha 0.1" in text
    played.clear()
    assert methods.methods([*argv, "--resume"]) == 0
    assert played == [("fedavg", 0.8, 9)]
    assert (tmp_path / "out" / "methods.md").read_text() == text


def test_a_diverged_value_is_worse_and_no_value_is_out_of_range(
    methods: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    errors = {(0.2, 1): DIVERGED, (0.4, 100): DIVERGED}
    played = invented(lambda name, lr, seed: errors.get((lr, seed), lr / 1e39))
    argv = command(tmp_path / "a", "--algorithms=scaffold", "--lrs=0.05,0.1,0.2")
    assert methods.methods(argv) == 0  # seed 1 diverges at 0.2, so that the table has the next best rate
    assert [rate for _, rate, seed in played if seed == 0] == [0.2, 0.1]
    assert "client.lr 0.2 (seed 1)" in (tmp_path / "a" / "methods.md").read_text()
    played.clear()
    errors.pop((0.2, 1))
    assert methods.methods([*argv, "--resume"]) == 0  # diverged trials run again, so that 0.2 is the best again
    assert sorted(played) == [("scaffold", 0.2, 1), ("scaffold", 0.4, 100)]
    assert "(seed 1)" not in (tmp_path / "a" / "methods.md").read_text()
    summary = next((tmp_path / "a").glob("*lr0.2-seed0*")) / "summary.json"
    rejected = [{"client": 4, "replies": 1, "why": f"delta {NOT_FINITE}"}]
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "rejected": rejected}))
    assert methods.methods([*argv, "--resume"]) == 0  # a run with a client that diverged excludes its rates as well
    assert "client.lr 0.2 (seed 0)" in (tmp_path / "a" / "methods.md").read_text()
    played.clear()
    assert methods.methods(command(tmp_path / "b", "--algorithms=fedavg", "--lrs=1e37,1e38")) == 0
    assert {rate for _, rate, _ in played} == {1e37, 1e38}


@pytest.mark.parametrize("failing", [1, 100])
def test_another_failure_excludes_no_rate_and_is_reported(
    methods: Any, invented: Callable[..., Played], tmp_path: Path, failing: int
) -> None:
    errors = {(0.2, failing): FAILED}
    played = invented(lambda name, lr, seed: errors.get((lr, seed), 0.9 - abs(lr - 0.2)))
    argv = command(tmp_path, "--algorithms=fedavg", "--lrs=0.1,0.2,0.4")
    assert methods.methods(argv) == 1
    assert {lr for _, lr, seed in played if seed < 2} == ({0.2} if failing == 1 else set())  # a tuning run: no choice
    played.clear()
    errors.clear()
    assert methods.methods([*argv, "--resume"]) == 0
    assert played[0] == ("fedavg", 0.2, failing)
    assert {lr for _, lr, seed in played if seed < 2} == {0.2}


def test_a_line_that_diverges_at_all_rates_fails_and_without_a_reported_run_there_is_no_page(
    methods: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    invented(lambda name, lr, seed: DIVERGED if name == "scaffold" and seed < 2 else 0.9 - abs(lr - 0.2))
    argv = ["--lrs=0.1,0.2,0.4", "--algorithms"]
    assert methods.methods([*command(tmp_path / "a"), *argv, "scaffold,fedavg"]) == 1
    (note,) = re.findall("No row.*", (tmp_path / "a" / "methods.md").read_text())
    assert "scaffold" in note
    for earlier in ("scaffold,fedavg", "scaffold"):  # the second call removes the page of the first
        assert methods.methods([*command(tmp_path / "b"), *argv, earlier, "--resume"]) == 1
        assert (tmp_path / "b" / "report.html").exists() == ("," in earlier)


def test_equal_rates_give_the_first_and_two_classes_of_one_name_are_two_lines(
    methods: Any, table1: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for n, file in enumerate(files):
        file.write_text(USER_FILE.format(n))
    names = [f"{file}:Mine" for file in files]
    played = invented(lambda name, lr, seed: 0.7 if lr == 0.1 and name == names[1] else min(lr, 0.2))
    argv = [f"--algorithms={','.join(names)}", "--lrs=0.05,0.2,0.1,0.3,0.4"]
    for study, more in ((methods.methods, []), (table1.table1, ["--settings=real", "--alphas=0.1"])):
        played.clear()
        assert study(command(tmp_path / study.name, *argv, *more)) == 0
        assert sorted({(n, lr) for n, lr, seed in played if seed < 2}) == [(names[0], 0.2), (names[1], 0.1)]


USER_FILE = """\"\"\"A method.\"\"\"
from dataclasses import dataclass
from fedcommons.algorithms.fedavg import FedAvg
@dataclass(frozen=True)
class Mine(FedAvg):
    \"\"\"Method {}.\"\"\"
"""


def test_each_alpha_federation_and_row_is_a_line(methods: Any, table1: Any, commons: Any, tmp_path: Path) -> None:
    shared = "--settings=real,shuffled_synthetic"
    for study, argv, n in (
        (methods, ["--algorithms=fedavg,scaffold"], 4),
        (
            table1,
            ["--algorithms=fedavg,scaffold", shared, "--federations=10:1,20:1,10:0.5", "--without-references"],
            24,
        ),
        (commons, ["--ways=real,FedMix"], 4),
    ):
        argv = command(tmp_path, "--alphas=0.1,1", "--lrs=0.1,0.2", *argv)
        entries = study.entries(study.arguments(argv))
        assert sum(e.is_tuning for e in entries) == 2 * n
        assert len({e["line"] for e in entries if not e.is_tuning}) == n


def test_commons_runs_the_rate_of_the_best_round(commons: Any, invented: Callable[..., Played], tmp_path: Path) -> None:
    options = commons.arguments(command(tmp_path, "--ways=real", "--lrs=0.1,0.2,0.3"))
    entries = commons.entries(options)
    played = invented(lambda name, lr, seed: {0.2: 0.05, 0.3: 0.9}.get(lr, 0.5))  # the best round of 0.2 has 0.95
    with Display() as display:
        todo = sweep.todo([e.cell for e in entries], tmp_path, display)
        assert not commons.play(entries, options, todo, tmp_path, display).failures
    assert {lr for _, lr, seed in played if seed < 2} == {0.2}


def test_each_row_and_setting_of_table_1_chooses_its_own_rate_and_rows_without_a_choice_stay(
    table1: Any, invented: Callable[..., Played], tmp_path: Path
) -> None:
    argv = command(tmp_path, "--algorithms=fedavg,scaffold", "--alphas=0.1", "--settings=real", "--lrs=0.1,0.2,0.3")
    entries = table1.entries(table1.arguments(argv))
    assert [sum(e.is_tuning == is_tuning for e in entries) for is_tuning in (True, False)] == [2 * 3, 2 * 2]
    fixed = [Entry(e.cell, {}) for e in entries]
    assert learning_rates.plan(fixed, tmp_path) == fixed
    played = invented(lambda name, lr, seed: 0.9 if lr == (0.2 if name == "fedavg" else 0.3) else 0.02)
    assert table1.table1(argv) == 0
    assert {(name, lr) for name, lr, seed in played if seed < 2} == {("fedavg", 0.2), ("scaffold", 0.3)}
    assert "seeds 100, which" in (tmp_path / "table1.md").read_text()
    assert "seed100" not in (tmp_path / "report.html").read_text()
    assert len((tmp_path / "table1.csv").read_text().splitlines()) == 1 + 2 * 2


THREE = "0.1,0.2,0.3"


@pytest.mark.parametrize(
    ("name", "argv"),
    [("feddm", [f"--image-rates={THREE}", f"--rates={THREE}", "--algorithms=feddm,fedavg", "--study-alpha=0.1"]),
     ("feddm", [f"--image-rates={THREE}", f"--rates={THREE}", "--noisy=fedavg", "--study-alpha=0.1"]),
     ("feddpms", [f"--lrs={THREE}", "--algorithms=feddpms,fedavg"]),
     ("fedcvae", [f"--rates={THREE}"]),
     ("table2", [f"--rates={THREE}", f"--image-rates={THREE}"]),
     ("figure3", [f"--lrs={THREE}", "--settings=real,shuffled_real"])],
)  # fmt: skip
def test_reports_have_only_the_reported_seeds_at_the_chosen_rates(
    name: str, argv: list[str], sweeps: Callable[[str], Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    """On the tuning seed 0.2 is best; a sweep without a finished reported run writes nothing."""
    study, display = getattr(sweeps(name), name), Display(Console(quiet=True))
    options = study.arguments([*argv, "--alphas=0.1", "--seeds=0,1", f"--out={tmp_path}"])
    entries = study.configurations(options)
    for e in in_order(study, entries, tmp_path):
        if (folder := tmp_path / e.cell.name).exists():
            continue  # in several tables
        is_best = e.labels.get("rates", ((0, 0.2),))[0][1] == 0.2
        assert e.is_tuning or (is_best and e.cell.config.flat.get(e.labels.get("field", ""), 0.2) == 0.2)
        if not e.is_tuning and e.cell.seed == 0 and not any(tmp_path.glob("*seed0*")):
            study.report(entries, options, tmp_path, display)
            assert not (tmp_path / f"{name}.csv").exists()
        metrics = {"validation/accuracy": 0.9 if is_best else 0.5}
        recorded(folder, e.cell.config, None, metrics, last_accuracy=0.5, best_accuracy=0.6, disclosed=0.0)
    study.report(entries, options, tmp_path, display)
    with (tmp_path / f"{name}.csv").open() as file:
        assert {line["seed"] for line in csv.DictReader(file)} == {"0", "1"}
    text = (tmp_path / f"{name}.md").read_text()
    assert "0.1, 0.2, 0.3)" in text
    assert "seeds (100), which" in text
    assert ("No row 'central_real'" in text) == (name == "figure3")  # none was trained


def test_rates_of_one_field_are_compared_at_the_best_rates_of_the_other_fields() -> None:
    tried = [(("a", a), ("b", b)) for a, b in ((2.0, 1.0), (1.0, 1.0), (4.0, 1.0), (2.0, 10.0))]
    assert learning_rates.edges(tried, tried[0]) == [("b", False, (("a", 2.0), ("b", 0.1)))]
    assert learning_rates.edges(tried, tried[2]) == [("a", True, (("a", 8.0), ("b", 1.0)))]


@pytest.mark.usefixtures("untimed")
def test_a_dry_run_counts_the_listed_rates_only_and_says_so(
    commons: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commons.commons(command(tmp_path / "out", "--ways=real", "--lrs=0.1,0.2,0.3", "--dry-run")) == 0
    assert re.search(r"Not counted: learning rates(.|\n)*\b5 cells", capsys.readouterr().out)
