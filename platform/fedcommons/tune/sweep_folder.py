"""The folder of a sweep: one process at a time in it, nothing in it that is not ours, and the same on all hosts."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedcommons.config.experiment import Experiment
from fedcommons.federation import hosts
from fedcommons.runtime import ray_cluster
from fedcommons.storage import file_lock, object_store
from fedcommons.tracking.run_folder import is_run, read_summary

LATE_S = 60.0
"""Seconds for which a sweep waits for the files of its last runs: a network file system may show them late."""


@contextmanager
def open_folder(out: Path) -> Iterator[None]:
    """Make the folder that ``--out`` names and hold it: nobody else may write there meanwhile.

    Raises:
        UserError: it cannot be written, somebody holds it, or it has what no sweep wrote.
    """
    with file_lock.opened(out, _stranger, "folder of a sweep"):
        yield


def holds_runs(out: Path) -> bool:
    """Whether ``out`` is the folder of a sweep with runs in it."""
    return any(is_run(path.parent) for path in out.glob("*/config.yaml"))


def has_come(folder: Path, may_be_stopped: bool, deadline: float) -> bool:
    """Return whether a run that has ended on some host is here, or appears until the deadline."""
    while not (read_summary(folder) is not None or (may_be_stopped and is_run(folder))):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


def require_shared(configs: Sequence[Experiment], out: Path, makes_artifacts: bool) -> None:
    """See that the hosts that will run these have our source files and share the folders of results.

    Raises:
        UserError: see ``hosts.require_alike``.
    """
    alone = [config for config in configs if config.storage is None]
    shared = [("--out", out)] if alone else []
    for folder in dict.fromkeys(Path(config.artifacts) for config in alone if config.generator):
        if makes_artifacts:
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):  # where nothing is made it may be read-only
            shared.append(("--artifacts", folder))
    storages = dict.fromkeys(config.storage for config in configs if config.storage is not None)
    shared += [("--storage", Path(one)) for one in storages if not object_store.is_url(one)]
    pin = ray_cluster.pinned(configs[0].federation.gpus_per_actor)
    hosts.require_alike(pin, shared, "" if storages else ", or name a storage that keeps the runs (--storage)")


def _stranger(out: Path) -> str | None:
    """What shows that ``out`` is neither new nor a sweep's, whose mark is a lock file of ours, or runs."""
    if is_run(out):
        return "config.yaml, of a run"
    names = file_lock.strangers(out)
    return names[0] if names and not file_lock.holder(out) and not holds_runs(out) else None
