"""One process at a time in a folder: an flock on its file ``.lock``, which names the holder.

The kernel frees a lock when its process ends in any way, so a dead process does not block the folder. The file stays,
which also shows that the folder is ours.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedcommons.errors import UserError, clean
from fedcommons.storage import safe_read

NAME = ".lock"

_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

_held: set[int] = set()


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)  # else a child that lives on would keep the lock of its dead parent


@contextmanager
def locked(folder: Path, say: Callable[[str], None] = print, patience: float = 0) -> Iterator[None]:
    """Hold ``folder``; meanwhile nobody else can, in this process or another one.

    patience: seconds to wait for the holder. On a file system without flock this is said once, and nobody is kept out.

    Raises:
        UserError: somebody else holds it.
        OSError: the lock file cannot be written.
    """
    path = folder / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # Python closes it when a child execs
    _held.add(descriptor)
    try:
        _take(descriptor, path, say, time.monotonic() + patience)
        mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.pwrite(descriptor, mine, 0)
        os.ftruncate(descriptor, len(mine))
        yield
    finally:
        if descriptor in _held:
            _held.remove(descriptor)
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
                f"{path.parent} is in use by {who}; wait until that has ended or choose another --out."
            ) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            say(f"{path.parent} cannot be locked ({error.strerror}): let no other process write there.")
            return


def holder(folder: Path) -> tuple[int, str] | None:
    """Process and host that hold ``folder`` or held it last; None if it has no lock file of ours."""
    try:
        found = safe_read.json_of(folder / NAME)
        pid, host = found["pid"], found["host"]
    except (ValueError, KeyError, TypeError):  # not there, no file, not JSON, not an object of ours
        return None
    return (pid, clean(host)) if type(pid) is int and isinstance(host, str) else None


def strangers(folder: Path) -> list[str]:
    """The names in ``folder``, sorted, without a lock file of ours."""
    ours = holder(folder) is not None or _is_empty(folder / NAME)  # killed in between
    return sorted(path.name for path in folder.iterdir() if not (ours and path.name == NAME))


def _is_empty(path: Path) -> bool:
    try:
        return safe_read.content(path, 0) == b""
    except safe_read.UnreadableError:
        return False


@contextmanager
def opened(
    folder: Path,
    stranger: Callable[[Path], str | None],
    kind: str,
    say: Callable[[str], None] = print,
    patience: float = 0,
) -> Iterator[None]:
    """Make the folder that ``--out`` names and hold it.

    stranger: finds the name of a file that no folder of this ``kind`` has; None if there is none.

    Raises:
        UserError: it cannot be written, somebody else holds it, or it has a stranger. Nothing in it is changed then.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (name := stranger(folder)) is not None:
                raise UserError(f"--out: {folder} is not empty and no {kind} (it has {name}); name another folder.")
            stack.enter_context(locked(folder, say, patience))
        except OSError as error:
            raise UserError(f"--out: {folder} cannot be written ({error.strerror}); name another folder.") from error
        yield
