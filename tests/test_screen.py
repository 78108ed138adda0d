"""What is seen of a run and of a sweep: lines that fit, plain ones in a pipe, the time left, levels, JSON."""

import io
import json
import logging
import os
import pty
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import fedcommons
from fedcommons import experiment
from fedcommons.errors import UserError, Warned
from fedcommons.runs import experiment as runs
from fedcommons.sharing import needs
from fedcommons.sweeping.display import EVERY, Display, LogFile, duration
from fedcommons.sweeping.progress import Pile, Progress
from fedcommons.sweeping.screen import Rounds, ending, line

QUICK = ["--preset=smoke", "--wandb=off", "--data.limit=80", "--client.epochs=1", "--measure.every=0"]
FIELDS = {"wandb": "off", "data.limit": 80, "client.epochs": 1, "measure.every": 0, "federation.rounds": 2}


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(**more: Any) -> tuple[Display, io.StringIO, Clock]:
    """A display without a terminal, what it writes, and its clock."""
    said, clock = io.StringIO(), Clock()
    return Display(Console(file=said, highlight=False), clock=clock, **more), said, clock


WORST = {"test/accuracy": 0.123456, "test/loss": 123456.789, "stragglers": 1000.0, "rejected": 1000.0}


@pytest.mark.parametrize(
    ("metrics", "left", "width", "expected"),
    [
        ({"test/accuracy": 0.8421, "test/loss": 0.5123}, "", 80, "round  3/30  accuracy 0.842  loss 0.512"),
        ({"test/accuracy": 0.5, "stragglers": 0.0, "rejected": 0.0}, "9 s left", 80,
         "round  3/30  accuracy 0.500  9 s left"),
        ({"stragglers": 2.0, "rejected": 1.0, "train/loss": 2.0}, "", 80,
         "round  3/30  training loss 2.000  late 2  rejected 1"),
        ({"test/mse": 0.25, "test/loss": None}, "", 80, "round  3/30  mse 0.250  loss not finite"),
        ({"test/accuracy": 0.8421, "test/loss": 1.0}, "9 s left", 30, "round  3/30  accuracy 0.842"),
        ({"test/accuracy": 0.5, "personal/loss_mean": 1.0, "personal/accuracy_mean": 0.75}, "9 s left", 80,
         "round  3/30  accuracy 0.500  personal accuracy 0.750  9 s left"),
        ({"personal/train_loss_mean": 1.0}, "", 80, "round  3/30  personal training loss 1.000"),
        ({}, "", 80, "round  3/30"),
    ],
)  # fmt: skip
def test_a_round_is_a_line_of_what_there_is(
    metrics: dict[str, float | None], left: str, width: int, expected: str
) -> None:
    assert line(3, 30, metrics, left, width) == expected


def test_a_line_fits_whatever_its_numbers_are() -> None:
    for width in (20, 40, 80):
        assert len(line(1000, 1000, WORST, "about 12 min left", width)) <= width
    assert "rejected 1000" in line(1000, 1000, WORST, "12 min left", 80)


def test_rounds_tell_the_time_that_is_left_by_their_pace() -> None:
    display, said, clock = plain()
    rounds = Rounds(display, 10, clock)
    for number in (4, 5, 6, 10):  # a resumed run begins in the middle
        rounds(number, {"test/accuracy": 0.5})
        clock.now += 20
    lefts = [text.rpartition("  ")[2] for text in said.getvalue().splitlines()]
    assert lefts == ["accuracy 0.500", duration(5 * 20) + " left", duration(4 * 20) + " left", "accuracy 0.500"]


def test_in_a_pipe_what_is_under_way_has_a_line_now_and_then_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    display, said, clock = plain()
    with display:
        for number in range(1, 101):
            clock.now += EVERY / 10
            display.step("generator 1/2", number, 100, "training", ends=False)
        display.step("a cell", 3, 3, "rounds")
    lines = said.getvalue().splitlines()
    assert lines[0] == "generator 1/2: 11/100 training, 4.5 min left"
    assert lines[-1] == "a cell: 3/3 rounds"
    assert len(lines) == 10
    assert said.getvalue().replace("\n", "").isprintable()


@pytest.mark.parametrize(("columns", "width"), [(None, 80), ("", 80), ("40", 40), ("200", 80), ("0", 80), ("x", 80)])
def test_a_pipe_is_as_wide_as_columns_says(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert plain()[0].width == width


def test_quiet_shows_warnings_and_the_log_file_has_all(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log.txt")
    handler.setLevel("INFO")
    display, said, _ = plain(quiet=True, file=handler)
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
    assert said.getvalue() == "diverged?\n"
    assert (tmp_path / "log.txt").read_text() == "a sentence\ndiverged?\nit is refused.\n"
    assert (list(logger.handlers), logger.level, logger.propagate) == before


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run's summary and folder."""
    folder = tmp_path_factory.mktemp("played") / "run"
    return runs.run(experiment("smoke", values=FIELDS), folder, say=lambda _: None), folder


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("width", [40, 80])
def test_the_end_of_a_run_is_some_lines_that_fit(played: tuple[dict[str, Any], Path], width: int) -> None:
    summary, folder = played
    text = ending(summary, rounds_of(folder), 12.0, Path("runs/run"), width)
    assert len(text) <= (13 if width == 80 else 24)
    assert all(len(one) <= width for one in text)
    assert not [one for one in text if "{" in one]
    joined = " ".join(" ".join(text).split())
    for wanted in ("fedavg on digits", f"accuracy {summary['last_accuracy']:.3f}", "took 12 s", "Overall guarantee"):
        assert wanted in joined


def test_the_end_of_a_run_without_accuracies_has_what_there_is(played: tuple[dict[str, Any], Path]) -> None:
    summary = {**played[0], "last_accuracy": None, "best_accuracy": None, "target": "mse <= 0.3", "rounds_to_target": 7}
    text = "\n".join(ending(summary, [{"round": 2, "test/mse": 0.25, "test/loss": 0.5}], 1.0, Path("out"), 80))
    assert re.search(r"^mse +0.250 after the last round\nloss +0.500 after the last round\n", text, re.M)
    assert re.search(r"^target +mse <= 0.3: reached in round 7$", text, re.M)


def test_the_end_of_a_run_without_a_server_model_tells_of_the_clients_own(
    played: tuple[dict[str, Any], Path],
) -> None:
    summary = {**played[0], "last_accuracy": None, "best_accuracy": None, "target": 0.2, "rounds_to_target": None}
    last = {"train/loss": 4.5, "personal/accuracy_mean": 0.6, "personal/accuracy_worst_decile": 0.25}
    text = "\n".join(ending(summary, [last], 1.0, Path("out"), 80))
    assert re.search(r"^loss +4.500 in training, after the last round$", text, re.M)
    assert re.search(r"^personal +accuracy 0.600, mean over clients, 0.250 of the worst tenth$", text, re.M)
    assert re.search(r"^target +accuracy 0.2: no round has a test accuracy$", text, re.M)


def test_json_is_all_on_stdout_and_the_rest_on_stderr(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("run", *QUICK, "--federation.rounds=1", "--json", "--log-file=said.txt", cwd=tmp_path)
    assert json.loads(done.stdout) == json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert "round 1/1  accuracy" in done.stderr
    assert re.search(r"^\d{4}-\d\d-\d\d \S+ INFO round 1/1  accuracy", (tmp_path / "said.txt").read_text(), re.M)
    again = command("run", *QUICK, "--federation.rounds=1", "--json", "--quiet", "--resume", cwd=tmp_path)
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_a_log_file_that_cannot_be_is_refused_before_any_work(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("run", *QUICK, "--log-file=there/is/none.txt", cwd=tmp_path)
    said = "error: --log-file: there/is/none.txt cannot be written (No such file or directory).\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_log_file_on_a_full_disk_is_refused_before_any_work(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("run", *QUICK, "--log-file=/dev/full", cwd=tmp_path)
    said = "error: --log-file: /dev/full cannot be written (No space left on device).\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_a_disk_that_fills_up_ends_the_log_and_not_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = LogFile(tmp_path / "log.txt", encoding="utf-8")
    handler.setLevel("INFO")
    display, said, _ = plain(quiet=True, file=handler)
    with display:
        display.say("a sentence")
        assert handler.stream
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), handler.stream.fileno())
        os.close(full)
        display.say("another one")
        display.say("a third one")
    assert capfd.readouterr() == ("", "")
    assert "No space left on device" in said.getvalue()
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "a sentence\n"


def test_the_library_is_silent_unless_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = experiment("smoke", values={**FIELDS, "federation.rounds": 1})
    with caplog.at_level(logging.INFO, "fedcommons"):
        for _ in range(2):
            fedcommons.run(wanted, tmp_path / "run")
    assert capfd.readouterr() == ("", "")
    assert "nothing is left to do" in caplog.text  # to whoever listens


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs something with a real terminal of so many columns, and gives what came out."""

    def run(action: Callable[[], None], **variables: str) -> str:
        process, master = pty.fork()
        if not process:
            try:
                os.environ.update(variables)
                sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
                action()
                sys.stdout.flush()
            finally:
                os._exit(0)
        found = b""
        try:
            while piece := os.read(master, 4096):
                found += piece
        except OSError:  # the other side is closed
            pass
        os.waitpid(process, 0)
        os.close(master)
        return found.decode()

    return run  # type: ignore[return-value]


def _shows() -> None:
    clock = Clock()
    with Display(clock=clock) as display:
        display.say("a sentence that stays")
        for number in (1, 2, 3):
            clock.now += 60
            display.step("generator 1/4 (client 0)", number, 9, "training")


@pytest.mark.parametrize(("columns", "term"), [("80", "xterm"), ("30", "xterm"), ("80", "dumb")])
def test_a_terminal_has_a_live_line_and_none_that_is_too_long(
    terminal: Callable[..., str], columns: str, term: str
) -> None:
    shown = terminal(_shows, COLUMNS=columns, TERM=term, NO_COLOR="1")
    assert "a sentence that stays" in shown
    if term == "dumb":
        assert "\x1b" not in shown
        return
    assert not re.search(r"\x1b\[[0-9;]*m", shown)  # no colour
    seen = [re.sub(r"\x1b\[[0-9?;]*[A-Za-z]", "", one) for one in re.split(r"[\r\n]+", shown)]
    assert max(map(len, seen)) <= int(columns)
    assert any("generator" in one for one in seen)
    if columns == "80":
        assert any("3/9" in one and "training" in one and "6 min left" in one for one in seen)


def trial(name: str, **config: Any) -> Any:
    return SimpleNamespace(trial_id=name, config=config)


def test_a_sweep_tells_the_time_left_in_all() -> None:
    """Two cells of 4 rounds, 10 s each, and two generators of 30 s, one after another; then two side by side."""
    display, said, clock = plain()
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
    for _ in (3, 4):
        clock.now += 10
    progress.on_trial_result(0, [], other, {"round": 3, "test/accuracy": 0.5})  # resumed after round 2, 20 s a round
    assert progress.played == Pile(8, 2 + 3, 10 + 10 + 20, 3)
    progress.on_trial_error(0, [], other)
    clock.now += 20
    progress.on_trial_result(0, [], one, {"round": 4})
    progress.on_trial_complete(0, [], one)
    assert progress.left == 0
    assert "generator 1/2" not in said.getvalue()  # it took no longer than a line is waited for
    assert "0 of 2 cells done, about 20 s left in all" in said.getvalue()
    assert said.getvalue().splitlines()[-1] == "a: 4/4 rounds"


GENERATORS = {
    "ddpm": {"generator.batch_size": 8},
    "private_ddpm": {"generator.noise_multiplier": 1.0, "generator.batch_size": 4, "generator.delta": 1e-5},
}


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.long
def test_a_generator_tells_each_of_its_steps_and_draws_what_it_draws_unasked(name: str, tmp_path: Path) -> None:
    fields = {**FIELDS, "partition": "iid", "sharing": "shuffled_synthetic", "generator": name, **GENERATORS[name]}
    fields |= {"generator.epochs": 2, "generator.channels": (8, 8), "partition.n_clients": 2, "federation.rounds": 1}
    told: list[tuple[str, int, int, str]] = []
    for number, on_step in enumerate([lambda *step: told.append(step), None]):
        wanted = experiment("smoke", values={**fields, "artifacts": str(tmp_path / f"artifacts {number}")})
        runs.run(wanted, tmp_path / str(number), say=lambda _: None, on_step=on_step)
    for client in (0, 1):
        mine = [one for one in told if one[0] == f"generator {client + 1}/2 (client {client})"]
        for doing, of in (
            ("training", {number for _, _, number, what in mine if what == "training"}),
            ("sampling", {4}),
        ):
            (last,) = of
            assert [number for _, number, _, what in mine if what == doing] == list(range(1, last + 1))
            assert last >= 4
    one, other = ((tmp_path / folder / "rounds.jsonl").read_bytes() for folder in ("0", "1"))
    assert one == other


def test_a_generator_that_tells_nothing_is_not_asked() -> None:
    class Silent:
        def fit(self, examples: Any, n_classes: int, seed: int, epochs: Any, *, flip: bool = False) -> None: ...

    class Tells:
        def fit(self, progress: Any = None) -> None: ...

    assert not needs.takes(Silent().fit, "progress")
    assert needs.takes(Tells().fit, "progress")
