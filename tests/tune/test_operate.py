"""A sweep outlives its terminal; ``status``, ``logs`` and ``stop`` need its folder only."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcommons import UserError, experiment
from fedcommons.cli import main
from fedcommons.storage import file_lock
from fedcommons.tune import operate
from fedcommons.tune.sweep_folder import MESSAGES, write_plan

FEDCOMMONS = f"{shlex.quote(sys.executable)} -c 'from fedcommons.cli import main; main.main()'"
SWEEP = (
    "tune --space lr=0.1,0.2 --preset smoke --wandb off --rounds 1000000 --data.limit 80 --measure.every 0 --out runs/t"
)


def soon(condition: Callable[[], object], seconds: float = 240) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return bool(condition())


def in_terminal(line: str, cwd: Path) -> None:
    """Type a line into a shell of a new terminal, and close the terminal, so that the kernel sends SIGHUP."""
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(cwd)
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    os.write(terminal, f"{line} touch typed\n".encode())
    assert soon((cwd / "typed").exists)
    os.close(terminal)
    assert os.waitpid(shell, 0)[0] == shell


@pytest.mark.ray
def test_a_sweep_outlives_its_terminal_and_is_followed_and_stopped_by_its_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    in_terminal(f"setsid nohup {FEDCOMMONS} {SWEEP} > tune.log 2>&1 &", tmp_path)
    folder = tmp_path / "runs" / "t"

    def rounds() -> int:
        return sum(len(path.read_text().splitlines()) for path in folder.glob("*/rounds.jsonl"))

    assert soon(lambda: rounds() > 4), (tmp_path / "tune.log").read_text()
    holder = file_lock.holder(folder)
    assert holder is not None
    assert file_lock.is_holder_here(folder)
    assert operate.status([str(folder)]) == 0
    first, *runs = capfd.readouterr().out.splitlines()
    assert [word for word in (f"process {holder[0]} ", " running", " left") if word not in first] == []
    assert runs
    assert operate.logs([str(folder), "--lines", "1000"]) == 0
    assert "2 cells to run" in capfd.readouterr().out
    assert operate.stop([str(folder)]) == 0
    assert not file_lock.is_locked(folder)
    assert file_lock.start_of(holder[0]) is None
    assert [*folder.glob("*/checkpoints/*.safetensors")]
    capfd.readouterr()
    operate.status([str(folder)])
    assert " stopped" in capfd.readouterr().out.splitlines()[0]
    with pytest.raises(UserError, match="no sweep is running"):
        operate.stop([str(folder)])


@pytest.mark.parametrize("changed", [{"started": "1"}, {"host": "elsewhere"}, {"pid": 2**22}])
def test_stop_ends_no_process_but_the_one_of_the_lock_file(
    changed: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleeping process stands for a process that has got the number of a sweep's process."""
    monkeypatch.setattr(operate, "STOP_S", 0.5)
    with subprocess.Popen(["sleep", "60"]) as other:
        with file_lock.locked(tmp_path):
            lock = tmp_path / file_lock.NAME
            facts = json.loads(lock.read_text())
            assert facts["started"] == file_lock.start_of(os.getpid())
            facts |= {"pid": other.pid, "started": file_lock.start_of(other.pid)} | changed
            lock.write_text(json.dumps(facts))
            with pytest.raises(UserError, match="does not run in"):
                operate.stop([str(tmp_path)])
            assert other.poll() is None
        other.send_signal(signal.SIGTERM)
    assert not file_lock.is_locked(tmp_path)


def test_status_and_logs_of_a_recorded_folder(
    tmp_path: Path, recorded: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path, {"a": 2, "b": 2, "c": 2})
    for name in ("a", "b"):
        recorded(tmp_path / name, experiment("smoke", values={"federation.rounds": 2}), None)
    (tmp_path / "b" / "summary.json").unlink()
    (tmp_path / "b" / "error.txt").write_text("b.py, line 3: too large\n\ntrace\n")
    (tmp_path / "b" / MESSAGES).write_text("one\ntwo\nthree\n")
    assert operate.status([str(tmp_path)]) == 0
    first, failed = capfd.readouterr().out.splitlines()
    assert first.endswith("no process; 1 done, 1 failed, 1 waiting.")
    assert "b: b.py, line 3: too large" in failed
    assert operate.logs([str(tmp_path), "b", "--lines", "2"]) == 0
    assert capfd.readouterr().out == "two\nthree\n"


def test_a_script_may_not_have_the_name_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stop.py").touch()
    monkeypatch.setattr(main, "sweeps_folder", lambda: tmp_path)
    with pytest.raises(UserError, match=r"stop\.py .* rename"):
        main.command(["run"])
