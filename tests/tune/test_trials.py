"""What a run and a sweep print, the order and repetition of trials, and the results that are kept between sweeps."""

import io
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from ray.tune.search import Searcher
from report_runs import quiet
from rich.console import Console

from fedcommons import experiment
from fedcommons.cli.display import EVERY, Display, duration
from fedcommons.cli.run_output import Rounds, ending, line
from fedcommons.config import presets
from fedcommons.config.dotted import override, to_dict
from fedcommons.errors import UserError, Warned
from fedcommons.runs import experiment as runs
from fedcommons.tracking.run_folder import read_heterogeneity
from fedcommons.tune import cached_results, trials
from fedcommons.tune import sweep as tuning
from fedcommons.tune.progress import Pile, Progress
from fedcommons.tune.scheduler import InOrder, MissingArtifact

FIELDS = {"wandb": "off", "data.limit": 80, "client.epochs": 1, "measure.every": 0, "federation.rounds": 1}
QUICK = ["--preset=smoke", *(f"--{name}={value}" for name, value in FIELDS.items())]


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(**more: Any) -> tuple[Display, io.StringIO, Clock]:
    """A display without a terminal, what it writes, and its clock."""
    written, clock = io.StringIO(), Clock()
    return Display(Console(file=written, highlight=False), clock=clock, **more), written, clock


LINES = [
    ({"test/accuracy": 0.8421, "test/loss": 0.5123}, "", 80, "accuracy 0.842  loss 0.512"),
    ({"test/accuracy": 0.5, "stragglers": 0.0, "rejected": 0.0}, "9 s left", 80, "accuracy 0.500  9 s left"),
    ({"stragglers": 2.0, "rejected": 1.0, "train/loss": 2.0}, "", 80, "training loss 2.000  stragglers 2  rejected 1"),
    ({"test/accuracy": 0.8421, "test/loss": 1.0}, "9 s left", 28, "accuracy 0.842"),
    ({"test/mse": 0.25, "test/loss": None}, "", 80, "mse 0.250  loss not finite"),
    ({"test/accuracy": 0.8421}, "", 26, ""),
    ({"personal/loss_mean": 1.0, "personal/accuracy_mean": 0.75}, "9 s left", 80, "personal accuracy 0.750  9 s left"),
]


def test_the_line_of_a_round_has_its_metrics_and_fits() -> None:
    for metrics, remaining, width, expected in LINES:
        assert line(3, 30, metrics, remaining, width) == f"round  3/30  {expected}".rstrip()


def test_the_time_left_follows_the_pace_of_the_rounds() -> None:
    display, written, clock = plain()
    rounds = Rounds(display, 10, clock)
    for number in (4, 5, 6, 10):  # a resumed run begins in the middle
        rounds(number, {"test/accuracy": 0.5})
        clock.now += 20
    lefts = [text.rpartition("  ")[2] for text in written.getvalue().splitlines()]
    assert lefts == ["accuracy 0.500", duration(5 * 20) + " left", duration(4 * 20) + " left", "accuracy 0.500"]


def test_in_a_pipe_progress_has_a_line_now_and_then_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display, written, clock = plain()
    with display:
        for number in range(1, 101):
            clock.now += EVERY / 10
            display.step("generator 1/2", number, 100, "training", ends=False)
        display.step("a cell", 3, 3, "rounds")
    lines = written.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("generator 1/2: 11/100 training, 4.5 min left", "a cell: 3/3 rounds")
    assert len(lines) == 10
    assert written.getvalue().replace("\n", "").isprintable()


def test_quiet_shows_warnings_and_the_log_file_has_all(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log.txt")
    handler.setLevel("INFO")
    display, written, _ = plain(quiet=True, file=handler)
    logger = logging.getLogger("fedcommons")
    before = list(logger.handlers), logger.level, logger.propagate

    def fail() -> None:
        with display:
            display.say("a sentence")
            display.say(Warned("diverged?"))
            display.step("a cell", 1, 9, "rounds")  # of level debug
            raise UserError("it is refused.")

    with pytest.raises(UserError):
        fail()
    assert written.getvalue() == "diverged?\n"
    assert (tmp_path / "log.txt").read_text() == "a sentence\ndiverged?\nit is refused.\n"
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_the_end_of_a_run_is_some_lines_that_fit_with_the_metrics_that_there_are(tmp_path: Path) -> None:
    summary = runs.run(experiment("smoke", values=FIELDS), tmp_path / "run", say=quiet)
    rounds = [json.loads(text) for text in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    metrics = read_heterogeneity(tmp_path / "run")
    text = ending(summary, rounds, 12.0, Path("runs/run"), 40, metrics)
    assert all(len(row) <= 40 and "{" not in row for row in text)
    assert len(ending(summary, rounds, 12.0, Path("runs/run"), 5)) >= len(text)  # a terminal too narrow for any text
    joined = " ".join(" ".join(text).split())
    for part in (
        "fedavg on digits",
        f"accuracy {summary['last_accuracy']:.3f}",
        "12 s",
        "Overall guarantee",
        f"SSDI {metrics['ssdi']:.2f}",
    ):
        assert part in joined
    missed = ending({**summary, "rounds": 30, "rounds_to_target": None}, rounds, 12.0, Path("runs/run"), 80)
    assert f"{'target':13}accuracy 0.2: >30 rounds" in missed
    last = {"train/loss": 4.5, "personal/accuracy_mean": 0.6, "personal/accuracy_worst_decile": 0.25}
    none = {"last_accuracy": None, "best_accuracy": None, "target": 0.2, "rounds_to_target": None}
    text = "\n".join(ending({**summary, **none}, [last], 1.0, Path("out"), 80))
    for pattern in (r"^loss +4.500", r"^personal +accuracy 0.600, .*0.250", r"^target +accuracy 0.2: no round"):
        assert re.search(pattern, text, re.M)


@pytest.mark.long
def test_json_is_all_on_stdout_and_the_rest_on_stderr(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("run", *QUICK, "--json", "--log-file=said.txt", cwd=tmp_path)
    assert json.loads(done.stdout) == json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert "round 1/1  accuracy" in done.stderr
    assert "INFO round 1/1  accuracy" in (tmp_path / "said.txt").read_text()
    again = command("run", *QUICK, "--json", "--quiet", "--resume", cwd=tmp_path)
    assert (again.stdout, again.stderr) == (done.stdout, "")
    done = command("run", *QUICK, "--log-file=there/is/none.txt", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")


def test_the_time_left_of_a_sweep() -> None:
    """Two cells of 4 rounds, 10 s each, and two generators of 30 s, one after another; then two side by side."""

    def trial(name: str, **config: Any) -> Any:
        return SimpleNamespace(trial_id=name, config=config)

    display, written, clock = plain()
    progress = Progress(display, {"a": 4, "b": 4}, 2, lambda: None, clock)
    for number in (1, 2):
        job = trial(f"generator {number}", generator={})
        progress.on_trial_start(0, [], job)
        clock.now += 30
        progress.on_trial_result(0, [], job, {"step": 50, "of": 100, "doing": "training"})
        assert progress.remaining_s is None
        progress.on_trial_complete(0, [], job)
    first = trial("one", cell="a")
    progress.on_trial_start(0, [], first)
    for number in (0, 1, 2):
        clock.now += 10 * bool(number)
        progress.on_trial_result(0, [], first, {"round": number})
    assert progress.remaining_s == 6 * 10
    other = trial("other", cell="b")
    progress.on_trial_start(0, [], other)
    assert progress.remaining_s == 6 * 10 / 2
    clock.now += 20
    progress.on_trial_result(0, [], other, {"round": 3, "test/accuracy": 0.5})  # resumed after round 2, 20 s a round
    assert progress.played == Pile(8, 2 + 3, 10 + 10 + 20, 3)
    progress.on_trial_error(0, [], other)
    clock.now += 20
    progress.on_trial_result(0, [], first, {"round": 4})
    progress.on_trial_complete(0, [], first)
    assert progress.remaining_s == 0
    assert "0 of 2 cells done, about 20 s left in all" in written.getvalue()
    assert written.getvalue().splitlines()[-1] == "a: 4/4 rounds"


def in_order(cells: dict[str, int], cores: int, monkeypatch: pytest.MonkeyPatch) -> InOrder:
    """Return the order of cells, each with this number of generators of its own, on a machine with these cores."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(cores)})
    lacking = [MissingArtifact(3, [f"{name} {i}"], [name], [name]) for name, n in cells.items() for i in range(n)]
    return InOrder(dict.fromkeys(cells, 1), lacking)


def starts(order: InOrder, cores: int, fails: str = "") -> list[str]:
    """Return what starts when, if trials take equally long, as Tune asks: twice as many wait as there are cores."""
    running: list[tuple[str, dict]] = []
    started = []
    for number in range(100):
        while len(running) < 2 * cores:
            offer = order.suggest(str((number, len(running))))
            if not isinstance(offer, dict):
                break
            running.append((str((number, len(running))), offer))
            started.append(offer["cell"] if "cell" in offer else f"makes {offer['generator']['images'][0]}")
        if not running:
            assert offer == Searcher.FINISHED
            return started
        trial, config = running.pop(0)
        is_failed = fails in config.get("generator", {}).get("images", [])
        order.on_trial_complete(trial, {"failed": "no memory", "trace": "line 7"} if is_failed else {"trained": True})
    raise AssertionError("it never ends")


def test_a_cell_waits_for_its_generators_and_fails_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"pool": 3, "real": 0, "next pool": 1, "next real": 0}
    assert starts(in_order(cells, 1, monkeypatch), 1) == [
        "makes pool 0", "makes pool 1", "makes pool 2", "pool", "real", "makes next pool 0", "next pool", "next real",
    ]  # fmt: skip
    order = in_order({"pool": 2, "real": 0}, 1, monkeypatch)
    assert starts(order, 1, fails="pool 0") == ["makes pool 0", "makes pool 1", "real"]
    assert order.failed == {"pool": "the generator of client 3 failed: no memory"}


FACTS = {"seed": 3, "channels": (8, 16), "rate": 0.1}


def test_a_kept_result_is_read_again_if_all_facts_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    assert cached_results.read(file, FACTS, "audit") is None
    cached_results.write(file, FACTS, "audit", {"auc": 0.75})
    assert cached_results.read(file, FACTS, "audit") == {"auc": 0.75}
    for facts, words in (
        ({**FACTS, "seed": 4}, "seed = 3, and now it is 4"),
        ({"seed": 3, "rate": 0.1}, "channels = [8, 16], and now it is its default"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            cached_results.read(file, facts, "audit")
    for content in ("", '{"facts": {}}', '{"facts": 1, "audit": {}}', "NaN"):
        file.write_text(content)
        with pytest.raises(UserError, match="remove it"):
            cached_results.read(file, {}, "audit")


TRIAL = trials.trial


def counted(params: Mapping[str, Any]) -> None:
    """Leave a mark beside the trial's folder at each start; kill the process at the first start of one of them."""
    import os
    import signal

    from fedcommons.tune.scheduler import shared_value

    name = params["cell"]
    marks = Path(shared_value(name)["out"]) / f"{name}.starts"
    with open(marks, "a", encoding="utf-8") as file:
        file.write("x")
    if (marks.parent / "dies").read_text() == name and marks.read_text() == "x":
        os.kill(os.getpid(), signal.SIGKILL)
    TRIAL(params)


@pytest.mark.ray
@pytest.mark.usefixtures("one_core")
def test_a_trial_is_tried_again_only_if_its_process_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    values = {"data.limit": 100, "measure.every": 0, "federation.rounds": 1, "tracking.wandb": "off"}
    smoke = presets.experiment("smoke", "digits", {**values, "artifacts": str(tmp_path / "artifacts")})
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the trials cannot import a test
    monkeypatch.setattr(trials, "trial", counted)
    killed = tuning.Trial("killed", smoke)
    refused = tuning.Trial("refused", override(smoke, {"seed": 1}))
    missing = tuning.Trial("missing", override(smoke, {"sharing.setting": "local_synthetic"}))
    out = tmp_path / "out"
    (out / "refused").mkdir(parents=True)  # it holds a run of another seed
    (out / "refused" / "config.yaml").write_text(yaml.safe_dump(to_dict(smoke)))
    (out / "refused" / "environment.json").write_text("{}")
    (out / "dies").write_text("killed")
    outcome = tuning.run_cells(tuning.Todo(3, [killed, refused, missing], []), out, Display())  # without generators
    starts = {path.stem: path.read_text() for path in out.glob("*.starts")}
    assert starts == {"killed": "xx", "refused": "x", "missing": "x"}
    assert (out / "killed" / "summary.json").exists()
    assert set(outcome.failures) == {"refused", "missing"}
    assert "another seed" in outcome.failures["refused"]
