"""Run commands in forks of this process, with limits of time and memory, and check the files that they leave."""

import gc
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Script = Callable[[Sequence[str]], int]

SMALL = {
    "preset": "smoke", "data.limit": "40", "client.epochs": "1", "federation.rounds": "2", "measure.every": "0",
    "model.channels": "[2,4]", "partition.n_clients": "3", "tracking.wandb": "off", "artifacts": "store", "out": "out",
}  # fmt: skip
"""Options of a run that takes less than a second."""

EXAMPLES = int(os.environ.get("FEDCOMMONS_EXAMPLES", "300"))

SIZES = pytest.mark.parametrize(
    "many", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.slow)]
)
"""``many`` False: a few fixed cases, marked long. True: a campaign of random cases, marked slow."""

Case = TypeVar("Case")


def examine(check: Callable[[Case], object], cases: st.SearchStrategy[Case], few: int, many: bool) -> None:
    """Run ``check`` on ``few`` fixed cases; if ``many``, on ``FEDCOMMONS_EXAMPLES`` fresh random cases."""

    @settings(
        derandomize=not many, max_examples=EXAMPLES if many else few, print_blob=many, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(case=cases)
    def each(case: Case) -> None:
        check(case)

    each()


@dataclass(frozen=True)
class Ended:
    """The end of a process: exit code (negative: the signal that killed the process), stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """Return the line of stderr that starts with ``error:`` or ``stopped;``; empty unless there is exactly one."""
        lines = [line for line in self.err.splitlines() if line.startswith(("error: ", "stopped; "))]
        return lines[0] if len(lines) == 1 else ""


def forked(
    action: Callable[[], object],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    seconds: int = 60,
    gigabytes: float = 3.0,
) -> Ended:
    """Run ``action`` in a fork with current folder ``folder``; at the end, kill all processes that it started.

    seconds: limit of CPU time. gigabytes: limit of memory in addition to the memory of this process.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if "wandb" in sys.modules:
            sys.modules["wandb"].teardown()  # a fork could neither use nor close an inherited connection to W&B
        if not (process := os.fork()):
            code: object = 70  # exit code if even the handlers below fail
            try:
                gc.freeze()  # the fork's garbage collector skips the objects of the tests
                logging.getLogger().handlers.clear()  # importing Opacus installs a handler
                os.setsid()
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8")
                sys.stderr = os.fdopen(2, "w", 1, closefd=False, encoding="utf-8")
                os.chdir(folder)
                os.environ.update(environment or {})
                used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")
                most = used + int(gigabytes * 2**30)
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                signal.alarm(10 * seconds)
                action()
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(BaseException):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code if isinstance(code, int) else 1 if code else 0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return Ended(status, *texts)


def warm_up() -> None:
    """Import libraries that a run imports late, so that forks need not import them again."""
    for name in ("matplotlib.pyplot", "pandas", "safetensors.torch", "sklearn.datasets", "wandb"):
        import_module(name)


def call(script: Script, *words: str) -> None:
    """Run a script of sweeps/ as the command line does, with these arguments."""
    from fedcommons.cli import parse

    os.environ.pop("FEDCOMMONS_PARTS", None)
    sys.argv = ["script.py", *words]
    parse.main(script)


def words(fields: Mapping[str, str]) -> list[str]:
    """Return the options ``--name=value`` of these fields."""
    return [f"--{name}={value}" for name, value in fields.items()]


def files(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return size, modification time (ns) and link target of everything in a folder, by relative path."""
    entries = {}
    for path in folder.rglob("*"):
        facts = path.lstat()
        target = os.readlink(path) if path.is_symlink() else ""
        entries[str(path.relative_to(folder))] = (0 if path.is_dir() else facts.st_size, facts.st_mtime_ns, target)
    return entries


@contextmanager
def camp(root: Path) -> Iterator[Path]:
    """Yield a folder ``here`` for one example, next to files that no command may change; remove all at the end."""
    with tempfile.TemporaryDirectory(dir=root, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for name in ("home", "tmp", "here"):
            (folder / name).mkdir()
        outside = write_mine(folder / "outside", "notes.txt", "deep/paper.txt", "messages.log")
        before = files(outside)
        yield folder / "here"
        assert files(outside) == before
        assert {path.name for path in folder.iterdir()} == {"here", "outside", "home", "tmp"}


def write_mine(folder: Path, *names: str) -> Path:
    """Write files with these names, as a user's files, into the folder; return the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return folder


def ran(here: Path, action: Callable[[], object], *, seconds: int = 30) -> Ended:
    """Run an action in a folder of ``camp``; check that it succeeded, or ended with exactly one error sentence."""
    environment = {"HOME": str(here.parent / "home"), "TMPDIR": str(here.parent / "tmp"), "RAY_ADDRESS": ""}
    ended = forked(action, here, environment, seconds=seconds)
    assert "Traceback (most recent call last)" not in ended.err, ended.err
    assert ended.code in (0, 1, 2), f"code {ended.code}: {ended.err}"
    assert not [c for c in ended.out + ended.err if not c.isprintable() and c not in "\n\t\r"], repr(ended.err)
    assert ended.code == 0 or len(ended.sentence.split()) > 2, f"not one sentence: {ended.err}"
    assert len(ended.sentence) <= 620, ended.sentence
    return ended
