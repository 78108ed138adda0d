"""Checks and lock of a sweep's folder: one process at a time, no foreign files, the same folder on all hosts."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from fedcommons.federation import hosts
from fedcommons.storage import file_lock, object_store
from fedcommons.storage.atomic_files import write_json
from fedcommons.tracking.run_folder import is_run, read_rounds, read_summary
from fedcommons.tracking.wandb_tracker import flaw_of_login, logged_in

PLAN, MESSAGES = ".plan.json", "messages.log"
"""Files of a sweep's folder: plan (see ``write_plan``) and messages. Each run's subfolder has messages of its own."""

LATE_S = 60.0
"""Seconds for which a sweep waits for the files of its last runs, as a network file system may show them late."""


def open_folder(out: Path) -> AbstractContextManager[None]:
    """Create the folder ``out``, and lock it while the context is open, so that no other sweep writes to it.

    Raises:
        UserError: the folder cannot be written, another process has locked it, or it has files that belong to no sweep.
    """
    return file_lock.open_lock(out, _stranger, "folder of a sweep")


def write_plan(out: Path, rounds: Mapping[str, int]) -> None:
    """Record the planned runs, so that other processes see which runs wait, and estimate the time left.

    The file holds the time, and run -> [rounds at this time, planned rounds]. rounds: run -> planned rounds.
    """
    plan = {name: [rounds_done(out / name), planned] for name, planned in rounds.items()}
    write_json(out / PLAN, {"time": time.time(), "runs": plan})


def rounds_done(folder: Path) -> int:
    """Return the number of finished rounds of a run."""
    return max(len(read_rounds(folder)) - 1, 0)


def holds_runs(out: Path) -> bool:
    """Check whether ``out`` has at least one subfolder with a run."""
    return any(is_run(path.parent) for path in out.glob("*/config.yaml"))


def has_come(folder: Path, may_be_stopped: bool, deadline: float) -> bool:
    """Wait until the files of an ended run, perhaps on another host, appear in ``folder``; False at the deadline.

    may_be_stopped: a scheduler may have stopped the run, so that it has no summary. deadline: by ``time.monotonic``.
    """
    while not (read_summary(folder) is not None or (may_be_stopped and is_run(folder))):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


def require_shared(
    pin: Mapping[str, str],
    storages: Sequence[str | None],
    artifacts: Sequence[str],
    out: Path,
    makes_artifacts: bool,
    online: bool = False,
) -> list[str]:
    """Check that all hosts that may run the experiments have the same source files and can write the result folders.

    Return a message for each host that will keep its runs offline, as W&B's server does not answer there.

    pin: labels that the hosts must have. storages: the storage of each run, or None. artifacts: the stores of runs
    without a storage. makes_artifacts: generators will be stored, so these stores are created and checked. online: runs
    are sent to W&B, so all hosts need a valid login if this host has one; else all hosts keep the runs offline.

    Raises:
        UserError: see ``hosts.require_alike``.
    """
    shared = [("--out", out)] if None in storages else []
    for folder in dict.fromkeys(map(Path, artifacts)):
        if makes_artifacts:
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):  # a read-only store is not checked, as nothing can be written to it
            shared.append(("--artifacts", folder))
    remote = dict.fromkeys(storage for storage in storages if storage is not None)
    shared += [("--storage", Path(storage)) for storage in remote if not object_store.is_url(storage)]
    advice = "" if remote else ", or name a storage that keeps the runs (--storage)"
    login = partial(flaw_of_login, os.environ.get("WANDB_BASE_URL"))  # runs on other hosts get this variable, too
    return hosts.require_alike(pin, shared, advice, login if online and logged_in() else None)


def _stranger(out: Path) -> str | None:
    """Return the name of a file in ``out`` that belongs to no sweep; None if ``out`` is new or a sweep's folder."""
    if is_run(out):
        return "config.yaml, of a run"
    names = file_lock.strangers(out)
    return names[0] if names and not file_lock.holder(out) and not holds_runs(out) else None
