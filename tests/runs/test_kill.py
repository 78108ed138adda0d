"""kill -9 of a run at any change of its files, then a resumption: it ends as if it had never been interrupted.

What a killed process leaves is its files, so it is killed at their changes: before a file is opened, renamed or
removed, and when a file is on the disk, whole or half.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from forked import Ended, Script, call, forked, warm_up, words
from interrupted import outputs

if TYPE_CHECKING:
    from conftest import WandbFile

FIELDS = {
    "preset": "smoke", "data.limit": "60", "client.epochs": "1", "measure.every": "0", "federation.rounds": "4",
    "federation.checkpoint_every": "2", "partition.n_clients": "4", "out": "run", "algorithm": "scaffold",
    "federation.participation": "0.75", "model.channels": "[2,4]", "federation.memory_mb": "0.01",
}  # fmt: skip
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")


def count_changes(folder: Path, dies_at: int, is_half: bool, name: str) -> list[str]:
    """List what this process changes in the folder from now on, and kill it at number ``dies_at``.

    is_half: the file that is then written to the disk keeps its first half. name: of the only file that counts.
    """
    fsync, changes = os.fsync, []

    def step(event: str) -> None:
        changes.append(event)
        if len(changes) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        is_written = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (is_written or event in CHANGES) or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path.startswith(str(folder)) and path.endswith(name):
            step(event)

    def sync(file: int) -> None:
        if not name:
            if is_half and len(changes) + 1 == dies_at:
                os.ftruncate(file, os.fstat(file).st_size // 2)
            step("fsync")
        fsync(file)

    sys.addaudithook(audit)
    os.fsync = sync
    return changes


@dataclass(frozen=True)
class Runs:
    script: Script
    root: Path

    def run(
        self, folder: Path, dies_at: int = 0, *, is_half: bool = False, name: str = "", wandb: str = "off"
    ) -> Ended:
        """Begin the run in the folder or go on with it."""
        folder.mkdir(exist_ok=True)
        asked = words({**FIELDS, "tracking.wandb": wandb})

        def action() -> None:
            changes = count_changes(folder, dies_at, is_half, name)
            try:
                call(self.script, *asked, "--resume")
            finally:
                print(f"\n{json.dumps(changes)}", flush=True)
                if "wandb" in sys.modules:
                    sys.modules["wandb"].teardown()  # as at the end of a process, which waits for W&B's

        return forked(action, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, sweeps: Callable[[str], ModuleType]) -> Runs:
    warm_up()
    return Runs(sweeps("run").run, tmp_path_factory.mktemp("kill"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> list[str]:
    """The changes of files of the undisturbed run, in a folder ``whole``."""
    ended = runs.run(runs.root / "whole")
    assert ended.code == 0, ended.err
    changes = json.loads(ended.out.splitlines()[-1])
    assert changes.count("fsync") > 10
    assert list((runs.root / "whole" / "run").glob("memory/*.safetensors"))
    return changes


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9, 1.0])
@pytest.mark.long
def test_a_run_killed_at_any_change_of_its_files_ends_as_if_it_never_was(
    share: float, is_half: bool, runs: Runs, whole: list[str], tmp_path: Path
) -> None:
    at = [i for i, event in enumerate(whole, 1) if event == "fsync" or not is_half]
    killed = runs.run(tmp_path, at[int(share * (len(at) - 1))], is_half=is_half)
    assert killed.code == -signal.SIGKILL, killed.err
    was_finished = (tmp_path / "run" / "summary.json").exists()
    ended = runs.run(tmp_path)
    assert ended.code == 0, ended.err
    assert outputs(tmp_path / "run") == outputs(runs.root / "whole" / "run")
    assert was_finished or list(tmp_path.rglob(".*.tmp")) == []
    assert share == 1.0 or not was_finished


@pytest.mark.long
def test_wandb_has_the_killed_history(runs: Runs, tmp_path: Path, wandb_file: "Callable[[Path], WandbFile]") -> None:
    killed = runs.run(tmp_path, 4, name="rounds.jsonl", wandb="offline")
    assert killed.code == -signal.SIGKILL, killed.err
    folder = tmp_path / "run"
    name = (folder / "wandb-id.txt").read_text().strip()
    ended = runs.run(tmp_path, wandb="offline")
    assert ended.code == 0, ended.err
    file = wandb_file(folder)
    assert file.run.run_id == name
    rows = [{k: v for k, v in row.items() if not k.startswith(("_", "media/", "seconds/"))} for row in file.history]
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert rows == [{k: v for k, v in line.items() if k != "participants"} for line in lines]
    has_pictures = [any(k.startswith("media/") for k in row) for row in file.history]
    assert has_pictures == [False] * 4 + [True]  # pictures come once, with the last round
