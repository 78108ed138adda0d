"""One process at a time in a folder: the second is refused by the name of the first, and the dead hold nothing."""

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest

from fedcommons.errors import UserError
from fedcommons.storage import file_lock
from fedcommons.storage.file_lock import locked

FORK = multiprocessing.get_context("fork")


@contextmanager
def another(action: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """A process that does this; the function that it is passed pauses it until the end of the context."""
    here, there = FORK.Pipe()

    def pause() -> None:
        there.send("it has begun")
        there.recv()

    process = FORK.Process(target=action, args=(pause,))
    process.start()
    try:
        assert here.poll(60)
        assert process.pid
        yield process.pid
    finally:
        here.send("go on")
        process.join()


def test_a_second_lock_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    def hold(pause: Callable[[], None]) -> None:
        with locked(tmp_path):
            pause()

    with another(hold) as process:
        who = f"{tmp_path} is in use by process {process} on {socket.gethostname()}"
        with pytest.raises(UserError, match=who), locked(tmp_path):
            pytest.fail("two in one folder")
    with locked(tmp_path):  # the other has ended
        assert file_lock.holder(tmp_path) == (os.getpid(), socket.gethostname())
        for _ in range(2):  # also in this process; the refused one has not released the lock of the first
            with pytest.raises(UserError, match=f"process {os.getpid()}"), locked(tmp_path):
                pytest.fail("two in one folder")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path):
            raise ZeroDivisionError


def test_the_lock_of_a_killed_process_is_free_though_its_children_live_on(tmp_path: Path) -> None:
    """As W&B's service or Ray's workers may: one that was forked, one that was started; a patient lock waits."""

    def action(pause: Callable[[], None]) -> None:
        with locked(tmp_path):
            started = subprocess.Popen(["sleep", "60"], close_fds=False)
            if not (forked := os.fork()):
                signal.pause()
            (tmp_path / "children").write_text(f"{started.pid} {forked}")
            pause()

    with another(action) as process:
        children = [int(number) for number in (tmp_path / "children").read_text().split()]
        killer = Timer(0.3, os.kill, (process, signal.SIGKILL))
        try:
            killer.start()
            with locked(tmp_path, patience=30):  # which waits for the end of the other
                killer.join()
            for child in children:
                os.kill(child, 0)  # both are alive
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_only_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lacks)
    messages: list[str] = []
    with locked(tmp_path, messages.append), locked(tmp_path, lambda _: None):
        pass
    (line,) = messages
    assert f"{tmp_path} cannot be locked (No locks available)" in line
