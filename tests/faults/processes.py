"""Forked processes with a limit of time and memory: what a command does to itself must not take the campaign along.

The campaign imports everything once; a fork then starts in milliseconds, and ends as a real process would.
"""

import atexit
import fcntl
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

TRACEBACK = 70
"""Exit code of a process that ended with an exception which nobody caught; a user would see 1."""

GIGABYTES = 8.0
"""That a process may take beyond what it was born with."""

PIPE = 2**20  # bytes

Key = TypeVar("Key")


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    code: its exit code, or minus the signal that killed it; late: it had to be ended; left: what it started still ran.
    """

    code: int
    out: str
    err: str
    late: bool = False
    left: bool = False


@dataclass
class Begun:
    """A process that runs, and its pipes."""

    pid: int
    out: int
    err: int
    deadline: float
    status: int | None = None
    said: dict[int, bytes] = field(default_factory=dict)


def begin(
    action: Callable[[], object],
    folder: Path,
    environment: Mapping[str, str | None],
    *,
    seconds: float = 60,
    limits: Mapping[int, int] | None = None,
    patience: float = 5,
) -> Begun:
    """Do ``action`` in a process of its own in ``folder``.

    environment: what to set in it (None: unset); seconds: of computing, after which it is ended (``patience`` times as
    many may go by, as the machine may be busy); limits: other resources to bound, for example the size of a file.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = os.pipe(), os.pipe()
    for reading, writing in pipes:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE)
        os.set_blocking(reading, False)
    if not (pid := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        _live(action, folder, environment, limits or {}, pipes[0][1], pipes[1][1])
    for _, writing in pipes:
        os.close(writing)
    return Begun(pid, pipes[0][0], pipes[1][0], time.monotonic() + patience * seconds)


def _live(
    action: Callable[[], object],
    folder: Path,
    environment: Mapping[str, str | None],
    limits: Mapping[int, int],
    out: int,
    err: int,
) -> None:
    code = TRACEBACK
    try:
        os.setsid()  # so that its children can be ended with it
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 256)  # others' pipes, or nobody would see that a reader is gone
        os.chdir(folder)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        for kind, bound in {resource.RLIMIT_CORE: 0, **limits}.items():
            resource.setrlimit(kind, (bound, bound))
        code = _status(action)
    finally:
        os._exit(code)


def _status(action: Callable[[], object]) -> int:
    """The exit code that Python would end with, its last steps taken: registered functions, then both streams."""
    code = 0
    try:
        action()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
        code = TRACEBACK
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            print(f"Exception ignored in: {stream}", file=sys.__stderr__)
            traceback.print_exc()
            return TRACEBACK  # what a reader sees of it is a traceback; Python's code is 120
    return code


def memory(gigabytes: float = GIGABYTES) -> dict[int, int]:
    """The limit of memory, for ``begin``."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    return {resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + int(gigabytes * 2**30)}


def has_ended(begun: Begun) -> bool:
    """Whether it has; what it has said meanwhile is read, or its pipes would be full."""
    for pipe in (begun.out, begun.err):
        begun.said[pipe] = begun.said.get(pipe, b"") + _read(pipe)
    if begun.status is None:
        found, status = os.waitpid(begun.pid, os.WNOHANG)
        if found:
            begun.status = status
    return begun.status is not None


def end(begun: Begun) -> Ended:
    """Wait for it, at most until its deadline, and end what it started."""
    late = False
    while not has_ended(begun):
        if time.monotonic() > begun.deadline:
            late = True
            os.kill(begun.pid, signal.SIGKILL)
            begun.deadline = float("inf")
        time.sleep(0.005)
    left = False
    with suppress(ProcessLookupError):  # it may have left nobody behind
        os.killpg(begun.pid, signal.SIGKILL)
        left = not late
    out, err = ((begun.said.get(pipe, b"") + _read(pipe)).decode(errors="replace") for pipe in (begun.out, begun.err))
    for pipe in (begun.out, begun.err):
        os.close(pipe)
    code = os.waitstatus_to_exitcode(begun.status or 0)
    return Ended(code, out, err, late or code == -signal.SIGXCPU, left)


def _read(pipe: int) -> bytes:
    """What is in the pipe now; a process that outlives us may hold it open for ever."""
    parts = []
    while select.select([pipe], [], [], 0)[0] and (part := os.read(pipe, PIPE)):
        parts.append(part)
    return b"".join(parts)


def side_by_side(begin_one: Callable[[Key], Begun], keys: Iterable[Key], at_once: int) -> Iterator[tuple[Key, Ended]]:
    """Begin one process for each key, some at once; (key, how it ended) in the order in which they end."""
    waiting, running = iter(keys), {}
    while True:
        while len(running) < at_once and (key := next(waiting, None)) is not None:
            running[key] = begin_one(key)
        if not running:
            return
        for key, begun in list(running.items()):
            if has_ended(begun) or time.monotonic() > begun.deadline:
                del running[key]
                yield key, end(begun)
        time.sleep(0.005)
