"""The folder of a sweep: one process at a time in it, and nothing in it that is not ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedcommons import locks
from fedcommons.tracking.run_folder import is_run


@contextmanager
def open_folder(out: Path) -> Iterator[None]:
    """Make the folder that ``--out`` names and hold it: nobody else may write there meanwhile.

    Raises:
        UserError: it cannot be written, somebody holds it, or it has what no sweep wrote.
    """
    with locks.opened(out, _stranger, "folder of a sweep"):
        yield


def holds_runs(out: Path) -> bool:
    """Whether ``out`` is the folder of a sweep with runs in it."""
    return any(is_run(path.parent) for path in out.glob("*/config.yaml"))


def _stranger(out: Path) -> str | None:
    """What shows that ``out`` is neither new nor a sweep's, whose mark is a lock file of ours, or runs."""
    if is_run(out):
        return "config.yaml, of a run"
    names = locks.strangers(out)
    return names[0] if names and not locks.holder(out) and not holds_runs(out) else None
