"""A lock that lets one process at a time use a folder: an flock on its file ``.lock``, which names the process.

The kernel frees the lock when the process ends in any way, so a dead process does not block the folder. The lock file
remains, and shows that fedcommons created the files in the folder.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedcommons.errors import UserError, clean
from fedcommons.storage import safe_read

NAME = ".lock"

_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

_open_locks: set[int] = set()


def _let_go() -> None:
    for descriptor in _open_locks:
        os.close(descriptor)
    _open_locks.clear()


os.register_at_fork(after_in_child=_let_go)  # otherwise a forked child keeps the lock when its parent ends


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = print, patience: float = 0) -> Iterator[None]:
    """Lock ``folder`` during the ``with`` block against other users of the lock, in this and in other processes.

    say: called with one sentence if the file system has no flock, so that the folder is not locked. patience: seconds
    to wait for the process that holds the lock.

    Raises:
        UserError: the lock is still held after ``patience`` seconds.
        OSError: the lock file cannot be written.
    """
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # closed in child programs
    _open_locks.add(descriptor)
    try:
        _take(descriptor, path, say, time.monotonic() + patience)
        pid = os.getpid()
        content = json.dumps({"pid": pid, "host": socket.gethostname(), "started": start_of(pid)}).encode()
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        yield
    finally:
        if descriptor in _open_locks:
            _open_locks.remove(descriptor)
            os.close(descriptor)


def _take(descriptor: int, path: Path, say: Callable[[str], None], deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            who = "process {} on {}".format(*held_by) if (held_by := holder(path.parent)) else "another process"
            raise UserError(
                f"{path.parent} is in use by {who}; wait until this process has ended, or choose another --out."
            ) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            say(f"{path.parent} cannot be locked ({error.strerror}): make sure that no other process writes to it.")
            return


def holder(folder: Path) -> tuple[int, str] | None:
    """Return (process id, host) of the present or last holder of the folder's lock; None without a valid lock file."""
    try:
        content = safe_read.json_of(folder / NAME)
        pid, host = content["pid"], content["host"]
    except (ValueError, KeyError, TypeError):  # the file is missing, not regular, not JSON, or has another structure
        return None
    return (pid, clean(host)) if type(pid) is int and isinstance(host, str) else None


def start_of(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended or there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


def is_holder_here(folder: Path) -> bool:
    """Check whether the process in the lock file runs on this host, with the start time in the file."""
    if (process := holder(folder)) is None or process[1] != clean(socket.gethostname()):
        return False
    started = start_of(process[0])
    return started is not None and started == safe_read.json_of(folder / NAME).get("started")


def is_locked(folder: Path) -> bool:
    """Check whether a process, on any host, has locked the folder; without flock, only processes of this host count."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return is_holder_here(folder)
    finally:
        os.close(descriptor)
    return False


def strangers(folder: Path) -> list[str]:
    """Return the sorted names of the entries of ``folder``, except a lock file that is valid or empty."""
    # An empty lock file counts as ours, because a process that is killed before it writes its id leaves such a file.
    is_ours = holder(folder) is not None
    with suppress(safe_read.UnreadableError):
        is_ours = is_ours or safe_read.content(folder / NAME, 0) == b""
    return sorted(path.name for path in folder.iterdir() if not (is_ours and path.name == NAME))


@contextmanager
def open_lock(
    folder: Path,
    stranger: Callable[[Path], str | None],
    kind: str,
    say: Callable[[str], None] = print,
    patience: float = 0,
) -> Iterator[None]:
    """Create the folder that ``--out`` names, and lock it during the ``with`` block.

    Args:
        folder: the folder.
        stranger: returns the name of a file that does not belong in such a folder; None if there is no such file.
        kind: what such a folder is called in messages, such as ``run folder``.
        say, patience: see ``locked``.

    Raises:
        UserError: the folder cannot be written, is locked, or contains a file that does not belong there. No file in
            the folder has been changed.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (name := stranger(folder)) is not None:
                raise UserError(
                    f"--out: {folder} is not empty and is not a {kind} (it contains {name}); name another folder."
                )
            stack.enter_context(locked(folder, say, patience))
        except OSError as error:
            raise UserError(f"--out: {folder} cannot be written ({error.strerror}); name another folder.") from error
        yield
