"""Temporary folders that only this user can enter. They are removed when this process ends or a later process starts.

Any user can create files in a folder such as /tmp. So only folders that this module created for the same user are
removed, and no link is followed. A process locks each of its folders by an flock on the file ``.fedcommons`` in the
folder. The kernel releases the lock when the process ends, even if the process is killed.
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

PREFIX = "fc-"  # short, because paths of sockets contain it and have a maximum length
MARK = ".fedcommons"

_descriptors: dict[Path, int] = {}


def _release_all() -> None:
    for descriptor in _descriptors.values():
        os.close(descriptor)
    _descriptors.clear()
    _process_folder.cache_clear()


os.register_at_fork(after_in_child=_release_all)  # only the parent process may remove its folders


def make(base: str | None = None) -> Path:
    """Create a folder of mode 0700 in ``base`` (default: Python's temporary folder); it is removed at process exit.

    Folders of killed processes in ``base`` are removed first.
    """
    base = os.path.realpath(base or tempfile.gettempdir())
    _remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    _descriptors[folder] = descriptor = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # if flock is not supported, no process removes folders
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(folder / "new", folder / MARK)  # after locking, so that no process sees a marked, unlocked folder
    return folder


_process_folder = cache(make)


@contextmanager
def folder(base: str | None = None) -> Iterator[Path]:
    """Create a folder as ``make`` does, and remove it at the end of the context."""
    path = make(base)
    try:
        yield path
    finally:
        _remove(path)


@contextmanager
def tempdir(folder: Path | None = None) -> Iterator[None]:
    """In this context, put temporary files of this process and of processes that it starts into ``folder``.

    The default folder is removed at process exit, with the files that libraries such as W&B create and do not remove.
    W&B's cache is also in the folder, unless WANDB_CACHE_DIR names another folder. If W&B's cache were in HOME and HOME
    were not writable, W&B would log to stderr.
    """
    chosen = str(folder or _process_folder())
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
    if (descriptor := _descriptors.pop(folder, None)) is not None:
        os.close(descriptor)
    for _ in range(50):  # try again, because an ending process may still write to its log
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.1)


@atexit.register
def _remove_all() -> None:
    folders = list(_descriptors)
    for folder in folders:
        _remove(folder)
    # Other processes may have ended since this process began, so their folders are now abandoned.
    for base in {folder.parent for folder in folders}:
        _remove_abandoned(str(base))


def _remove_abandoned(base: str) -> None:
    with ExitStack() as stack, suppress(OSError):
        inside = _opened(stack, base, os.O_RDONLY | os.O_DIRECTORY)
        for name in os.listdir(inside):
            if name.startswith(PREFIX):
                _remove_if_abandoned(base, inside, name)


def _remove_if_abandoned(base: str, inside: int, name: str) -> None:
    """Remove the folder ``name`` in ``base`` if this module created it and no process uses it.

    inside: the open descriptor of ``base``.
    """
    with ExitStack() as stack, suppress(OSError):
        descriptor = _opened(stack, name, os.O_RDONLY | os.O_DIRECTORY, inside)
        mark = _opened(stack, MARK, os.O_RDWR | os.O_NONBLOCK, descriptor)
        of_folder, of_mark = os.fstat(descriptor), os.fstat(mark)
        if {of_folder.st_uid, of_mark.st_uid} != {os.geteuid()} or stat.S_IMODE(of_folder.st_mode) & 0o077:
            return
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_used(f"{base}/{name}"):  # Ray's agent processes continue after their driver is killed
            return
        # The mark is removed last, so that an interrupted removal can be repeated.
        for entry in sorted(os.listdir(descriptor), key=lambda entry: entry == MARK):
            if stat.S_ISDIR(os.lstat(entry, dir_fd=descriptor).st_mode):
                shutil.rmtree(entry, dir_fd=descriptor)
            else:
                os.unlink(entry, dir_fd=descriptor)
        os.rmdir(name, dir_fd=inside)


def _opened(stack: ExitStack, name: str, flags: int, inside: int | None = None) -> int:
    descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=inside)
    stack.callback(os.close, descriptor)
    return descriptor


def _is_used(folder: str) -> bool:
    """Return whether another process has a file in the folder open or works in it; True if there is no /proc."""
    if not os.path.isdir("/proc/self/fd"):
        return True
    for process in os.listdir("/proc"):
        if process.isdecimal() and int(process) != os.getpid():
            with suppress(OSError):  # the process has ended, or belongs to another user
                links = [f"/proc/{process}/cwd", *(entry.path for entry in os.scandir(f"/proc/{process}/fd"))]
                if any(f"{_target(link)}/".startswith(f"{folder}/") for link in links):
                    return True
    return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the file was closed meanwhile
        return ""
