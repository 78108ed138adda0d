"""kill -9 of a run at the worst moments, then a resumption: it ends as if it had never been interrupted.

This file is also the program that is killed: as a script it imports everything once and forks a process for each run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import torch

from fedcommons.algorithms.feddpms import FedDPMS
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import presets
from fedcommons.federation import checkpoint
from fedcommons.federation.memory import ClientMemory
from fedcommons.runs import experiment
from fedcommons.seeds import seed_for
from fedcommons.tensors import data

pytestmark = pytest.mark.ray  # it needs none, but too long for the default run

if TYPE_CHECKING:
    from conftest import WandbFile

    Reader = Callable[[Path], WandbFile]

FIELDS = {
    "data.limit": 100, "client.epochs": 2, "client.batch_size": 5, "measure.every": 0,
    "federation.rounds": 6, "federation.checkpoint_every": 2, "federation.participation": 0.75,
    "tracking.wandb": "offline",
    "federation.memory_mb": 0.15,  # half of the clients' controls rest in files
}  # fmt: skip
METHODS = {
    "scaffold": {},
    "feddpms": {  # clients begin to give in round 3, and to receive in round 4
        "model.name": "vae", "feddpms.preliminary_rounds": 2, "feddpms.quota": 3, "feddpms.sigma": 0.1,
        "feddpms.tries": 3,
    },
}  # fmt: skip
"""The methods that are killed, and their fields."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_client(method: type[Any]) -> Callable[[], None]:
    """The third step of client 2 in round 3."""

    def arm() -> None:
        fatal, client = seed_for(0, "client", 3, 2), method.client

        def dies(self: Any, work: Any, message: Any, memory: Any, data: Any, round: int, seed: int) -> Any:
            name = "cross_entropy" if method is FedDPMS else "training_step"
            step = getattr(work.module, name)
            if seed == fatal:
                setattr(work.module, name, lambda batch, index: _die() if index == 2 else step(batch, index))
            return client(self, work, message, memory, data, round, seed)

        mock.patch.object(method, "client", dies).start()

    return arm


def in_a_merge(method: type[Any]) -> Callable[[], None]:
    """That of round 4, when it has made the next state."""

    def arm() -> None:
        fatal, merge = seed_for(0, "merge", 4), method.merge

        def dies(self: Any, executor: Any, state: Any, total: Any, replies: Any, round: int, seed: int) -> Any:
            after = merge(self, executor, state, total, replies, round, seed)
            if seed == fatal:
                _die()
            return after

        mock.patch.object(method, "merge", dies).start()

    return arm


def half_way(name: str) -> Callable[[], None]:
    """When half of the bytes of the file of this name are on the disk, under whatever name they have by then."""

    def arm() -> None:
        fsync = os.fsync

        def dies(file: int) -> None:
            if Path(os.readlink(f"/proc/self/fd/{file}")).name.lstrip(".").startswith(name):
                os.ftruncate(file, os.fstat(file).st_size // 2)
                _die()
            fsync(file)

        mock.patch("os.fsync", dies).start()

    return arm


class Moment(NamedTuple):
    """How to arm a run, the last round in its rounds.jsonl when it dies, what there is then of round 4's checkpoint."""

    arm: Callable[[], None]
    logged: int
    written: Collection[str]
    method: str = "scaffold"


TENSORS, FACTS = "round-000004.safetensors", "round-000004.safetensors.json"
MOMENTS = {
    "in a client": Moment(in_a_client(SCAFFOLD), 2, set()),
    "in a merge": Moment(in_a_merge(SCAFFOLD), 3, set()),
    "in a client that gives": Moment(in_a_client(FedDPMS), 2, set(), "feddpms"),
    "in the merge when clients have received": Moment(in_a_merge(FedDPMS), 3, set(), "feddpms"),
    "in a checkpoint's tensors": Moment(half_way(TENSORS), 4, {f".{TENSORS}.PID.tmp"}),
    "in a checkpoint's facts": Moment(half_way(FACTS), 4, {TENSORS, f".{FACTS}.PID.tmp"}),
    "in the summary": Moment(half_way("summary.json"), 6, {TENSORS, FACTS}),
}


def main(folder: Path) -> None:
    """For each moment a run in ``folder/MOMENT``; a copy of it, as it was killed, in ``folder/killed/MOMENT``.

    In ``folder/METHOD`` the same run, which nobody killed.
    """
    import sklearn.datasets  # noqa: F401  (what a run imports late: here once, not in every fork)
    import wandb.sdk.launch  # noqa: F401

    import fedcommons.reports.plots  # noqa: F401
    import fedcommons.tracking.wandb_tracker  # noqa: F401

    torch.set_num_threads(1)  # only the thread that forks lives on in a fork
    whole = [_fork(partial(_run, folder / method, method)) for method in METHODS]
    sys.exit(any([_wait(p) for p in (*whole, *(_fork(partial(_kill_and_resume, folder, m)) for m in MOMENTS))]))


def _kill_and_resume(folder: Path, moment: str) -> None:
    method = MOMENTS[moment].method
    codes = [_wait(_fork(partial(_run, folder / moment, method, MOMENTS[moment].arm)))]
    shutil.copytree(folder / moment, folder / "killed" / moment)
    codes.append(_wait(_fork(partial(_run, folder / moment, method))))
    (folder / f"{moment}.json").write_text(json.dumps(codes))


def _run(folder: Path, method: str, arm: Callable[[], None] | None = None) -> None:
    """Begin the experiment or go on with it."""
    import wandb

    if arm:
        arm()
    config = presets.experiment("smoke", "digits", {"algorithm": method, **FIELDS, **METHODS[method]})
    experiment.run(config, folder, resume=folder.exists(), say=lambda _: None)
    wandb.teardown()  # at its end a process waits for W&B's


def _fork(action: Callable[[], None]) -> int:
    """Do it in a process of its own, and nothing else."""
    if process := os.fork():
        return process
    code = 1
    try:
        action()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)  # an orderly end of an interpreter takes longer than the run


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``main``."""
    import wandb

    folder = tmp_path_factory.mktemp("kill")
    wandb.setup()  # as a sweep's driver may have done: its trials inherit in WANDB_SERVICE where W&B's process listens
    done = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def outputs(folder: Path) -> dict[str, bytes]:
    """What must not differ: the metrics, the summary, the last two checkpoints and the memories that they name."""
    paths = [folder / "rounds.jsonl", folder / "summary.json", *folder.glob("*/[!.]*.safetensors*")]
    return {p.name: p.read_bytes() for p in paths}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_in_the_middle_of_anything_ends_as_if_it_never_was(moment: str, runs: Path) -> None:
    assert json.loads((runs / f"{moment}.json").read_text()) == [-signal.SIGKILL, 0]
    assert outputs(runs / moment) == outputs(runs / MOMENTS[moment].method)


def test_what_was_half_written_is_gone_in_the_end(runs: Path) -> None:
    assert [p.relative_to(runs) for m in MOMENTS for p in (runs / m).rglob(".*.tmp")] == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_each_is_killed_at_the_moment_it_is_named_after(moment: str, runs: Path) -> None:
    """Else the test above would be about something else."""
    killed = runs / "killed" / moment
    assert [line["round"] for line in lines(killed)] == list(range(MOMENTS[moment].logged + 1))
    found = {re.sub(r"\.\d+\.tmp", ".PID.tmp", p.name) for p in killed.glob("checkpoints/*round-000004*")}
    assert found == MOMENTS[moment].written
    assert not (killed / "summary.json").exists()


def test_clients_had_given_codes_and_received_some_by_the_end(runs: Path) -> None:
    """Else FedDPMS's moments would be no other than SCAFFOLD's."""
    last = checkpoint.load_latest(runs / "feddpms" / "checkpoints", ClientMemory(folder=runs / "feddpms" / "memory"))
    assert last
    assert {name for name in last.state if name.startswith("codes/")}
    assert len(data(last.state["received"]))


def test_a_checkpoint_is_killed_with_half_of_its_bytes_written(runs: Path) -> None:
    (part,) = (runs / "killed" / "in a checkpoint's tensors").glob("checkpoints/.*.tmp")
    whole = runs / "scaffold" / "checkpoints" / "round-000004.safetensors"
    assert part.stat().st_size == whole.stat().st_size // 2 > 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_wandb_keeps_the_runs_id_and_its_whole_history(moment: str, runs: Path, wandb_file: "Reader") -> None:
    found = wandb_file(runs / moment)
    assert found.run.run_id == (runs / "killed" / moment / "wandb-id.txt").read_text().strip()
    rows = [{k: v for k, v in row.items() if not k.startswith(("_", "media/"))} for row in found.history]
    assert rows == lines(runs / moment)
    shown = [{k for k in row if k.startswith("media/")} for row in found.history]
    assert shown[-1]
    assert not any(shown[:-1])  # pictures come once, with the last round


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
