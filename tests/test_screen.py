"""What a run and a sweep print: lines that fit, plain ones in a pipe, the time left, levels, JSON."""

import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_runs import quiet
from rich.console import Console

from fedcommons import experiment
from fedcommons.errors import UserError, Warned
from fedcommons.runs import experiment as runs
from fedcommons.sweeping.display import EVERY, Display
from fedcommons.sweeping.progress import Pile, Progress
from fedcommons.sweeping.screen import ending, line

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
    ({"stragglers": 2.0, "rejected": 1.0, "train/loss": 2.0}, "", 80, "training loss 2.000  late 2  rejected 1"),
    ({"test/accuracy": 0.8421, "test/loss": 1.0}, "9 s left", 28, "accuracy 0.842"),
    ({"test/accuracy": 0.8421}, "", 26, ""),
    ({"personal/loss_mean": 1.0, "personal/accuracy_mean": 0.75}, "9 s left", 80, "personal accuracy 0.750  9 s left"),
]


def test_the_line_of_a_round_has_its_metrics_and_fits() -> None:
    for metrics, left, width, expected in LINES:
        assert line(3, 30, metrics, left, width) == f"round  3/30  {expected}".rstrip()


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

    def fail() -> None:
        with display:
            display.say("a sentence")
            display.say(Warned("diverged?"))
            raise UserError("it is refused.")

    with pytest.raises(UserError):
        fail()
    assert written.getvalue() == "diverged?\n"
    assert (tmp_path / "log.txt").read_text() == "a sentence\ndiverged?\nit is refused.\n"


def test_the_end_of_a_run_is_some_lines_that_fit_with_the_metrics_that_there_are(tmp_path: Path) -> None:
    summary = runs.run(experiment("smoke", values=FIELDS), tmp_path / "run", say=quiet)
    rounds = [json.loads(text) for text in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    text = ending(summary, rounds, 12.0, Path("runs/run"), 40)
    assert all(len(one) <= 40 and "{" not in one for one in text)
    joined = " ".join(" ".join(text).split())
    for part in ("fedavg on digits", f"accuracy {summary['last_accuracy']:.3f}", "12 s", "Overall guarantee"):
        assert part in joined
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
        made = trial(f"generator {number}", generator={})
        progress.on_trial_start(0, [], made)
        clock.now += 30
        progress.on_trial_result(0, [], made, {"step": 50, "of": 100, "doing": "training"})
        assert progress.left is None
        progress.on_trial_complete(0, [], made)
    one = trial("one", cell="a")
    progress.on_trial_start(0, [], one)
    for number in (0, 1, 2):
        clock.now += 10 * bool(number)
        progress.on_trial_result(0, [], one, {"round": number})
    assert progress.left == 6 * 10
    other = trial("other", cell="b")
    progress.on_trial_start(0, [], other)
    assert progress.left == 6 * 10 / 2
    clock.now += 20
    progress.on_trial_result(0, [], other, {"round": 3, "test/accuracy": 0.5})  # resumed after round 2, 20 s a round
    assert progress.played == Pile(8, 2 + 3, 10 + 10 + 20, 3)
    progress.on_trial_error(0, [], other)
    clock.now += 20
    progress.on_trial_result(0, [], one, {"round": 4})
    progress.on_trial_complete(0, [], one)
    assert progress.left == 0
    assert "0 of 2 cells done, about 20 s left in all" in written.getvalue()
    assert written.getvalue().splitlines()[-1] == "a: 4/4 rounds"


@pytest.mark.long
def test_generators_report_their_steps(tmp_path: Path) -> None:
    fields = {**FIELDS, "partition": "iid", "sharing": "shuffled_synthetic", "generator.batch_size": 8,
              "generator.epochs": 2, "generator.channels": (8, 8), "partition.n_clients": 2}  # fmt: skip
    steps: list[tuple[str, int, int, str]] = []
    wanted = experiment("smoke", values={**fields, "artifacts": str(tmp_path / "artifacts")})
    runs.run(wanted, tmp_path / "run", say=quiet, on_step=lambda *step: steps.append(step))
    for client in (0, 1):
        mine = [one for one in steps if one[0] == f"generator {client + 1}/2 (client {client})"]
        (last,) = {number for _, _, number, doing in mine if doing == "training"}
        for doing, end in (("training", last), ("sampling", 4)):
            assert [number for _, number, _, what in mine if what == doing] == list(range(1, end + 1))
