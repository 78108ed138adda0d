"""Temporary folders that only this user can enter, gone when their process has ended, or when the next one begins.

Names in a folder such as /tmp may be anybody's, so what is removed was made here and by the same user, and no link is
followed. A process holds its folders by an flock on their file ``.fedcommons``, which the kernel frees however it ends.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

PREFIX = "fc-"  # short, as the paths of sockets are below it
MARK = ".fedcommons"

_held: dict[Path, int] = {}


def _let_go() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()
    _mine.cache_clear()


os.register_at_fork(after_in_child=_let_go)  # they are the parent's to remove


def make(base: str | None = None) -> Path:
    """A new folder of mode 0700 in ``base`` (by default where Python puts temporary files); it goes with this process.

    What killed processes have left in ``base`` is removed first.
    """
    base = os.path.realpath(base or tempfile.gettempdir())
    _remove_left(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    _held[folder] = descriptor = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # without flock here nobody else can take it either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / "new", folder / MARK)  # only now: no other process may find it marked and not held
    return folder


_mine = cache(make)


@contextmanager
def folder() -> Iterator[Path]:
    """A folder as ``make`` makes it, for a while."""
    made = make()
    try:
        yield made
    finally:
        _remove(made)


@contextmanager
def tempdir(folder: Path | None = None) -> Iterator[None]:
    """Meanwhile temporary files of this process, and of those that it starts, lie in ``folder``.

    By default that is one of this process's, for what others make and forget, such as W&B, some when it is imported.
    W&B's cache lies there too, unless WANDB_CACHE_DIR names another folder: where the one in HOME cannot be written,
    W&B's log would go to stderr.
    """
    chosen = str(folder or _mine())
    before, variables = tempfile.tempdir, {name: os.environ.get(name) for name in ("TMPDIR", "WANDB_CACHE_DIR")}
    tempfile.tempdir = os.environ["TMPDIR"] = chosen
    os.environ.setdefault("WANDB_CACHE_DIR", chosen)
    try:
        yield
    finally:
        tempfile.tempdir = before
        for name, value in variables.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _remove(folder: Path) -> None:
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)
    for _ in range(50):  # again, as a process that ends may write to its log meanwhile
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.1)


@atexit.register
def _remove_all() -> None:
    folders = list(_held)
    for folder in folders:
        _remove(folder)
    for base in {folder.parent for folder in folders}:  # what was used still when this process began
        _remove_left(str(base))


def _remove_left(base: str) -> None:
    with ExitStack() as stack, suppress(OSError):
        inside = _opened(stack, base, os.O_RDONLY | os.O_DIRECTORY)
        for name in os.listdir(inside):
            if name.startswith(PREFIX):
                _remove_if_left(base, inside, name)


def _remove_if_left(base: str, inside: int, name: str) -> None:
    """Remove the folder ``name`` in ``base``, open as ``inside``, if we made it and no process uses it any more."""
    with ExitStack() as stack, suppress(OSError):
        found = _opened(stack, name, os.O_RDONLY | os.O_DIRECTORY, inside)
        mark = _opened(stack, MARK, os.O_RDWR | os.O_NONBLOCK, found)
        of_folder, of_mark = os.fstat(found), os.fstat(mark)
        if {of_folder.st_uid, of_mark.st_uid} != {os.geteuid()} or stat.S_IMODE(of_folder.st_mode) & 0o077:
            return
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_used(f"{base}/{name}"):  # Ray's agents outlive a driver that was killed
            return
        for entry in sorted(os.listdir(found), key=lambda entry: entry == MARK):  # what is interrupted stays marked
            if stat.S_ISDIR(os.lstat(entry, dir_fd=found).st_mode):
                shutil.rmtree(entry, dir_fd=found)
            else:
                os.unlink(entry, dir_fd=found)
        os.rmdir(name, dir_fd=inside)


def _opened(stack: ExitStack, name: str, flags: int, inside: int | None = None) -> int:
    descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=inside)
    stack.callback(os.close, descriptor)
    return descriptor


def _is_used(folder: str) -> bool:
    """Whether another process has a file of the folder open, or works there; True where /proc does not tell."""
    if not os.path.isdir("/proc/self/fd"):
        return True
    for process in os.listdir("/proc"):
        if process.isdecimal() and int(process) != os.getpid():
            with suppress(OSError):  # it has ended, or is another user's
                links = [f"/proc/{process}/cwd", *(entry.path for entry in os.scandir(f"/proc/{process}/fd"))]
                if any(f"{_target(link)}/".startswith(f"{folder}/") for link in links):
                    return True
    return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""
