"""Small runs with checkpoints, clients' memory and generators in files, and a hand on each thing they do to files."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from faults import places, processes
from faults.places import GENERATES, TINY
from faults.processes import Begun, Ended
from faults.verdicts import Fault

from fedcommons.config import cli
from lightning_modules import Classifier

Script = Callable[[Sequence[str]], int]

EXPERIMENTS: Mapping[str, Mapping[str, str]] = {
    "memory": {"algorithm": "scaffold", "federation.memory_mb": "0.12", "federation.rounds": "4", "measure.every": "2",
               "federation.checkpoint_every": "2"},
    "pool": {**GENERATES, "sharing.setting": "shuffled_synthetic", "sharing.p": "0.3", "federation.rounds": "3",
             "measure.every": "0"},
}  # fmt: skip
"""What is run: half of the clients' memory in files; generators and images in a store."""

OF_THE_ATTEMPT = ("timing.jsonl", "environment.json", "messages.log", ".lock")
"""Files that may differ between a run and the same run broken off."""

USERS = ("notes.txt", ".draft.tmp", "deep/.paper.3.tmp", "checkpoints/mine.txt", "memory/photo.jpg", "deep/error.txt")
"""Files that a user may have put beside those of a run."""


@dataclass(frozen=True)
class Found:
    """What went wrong in a trial; number: with the seed, it makes the trial again."""

    number: int
    fault: Fault
    line: str


class Moment:
    """Counts what this process does to files below ``folder`` and its steps of training; ``then`` at number ``at``.

    half: at a file's last step to the disk its second half is not there yet.
    """

    def __init__(self, folder: Path, at: int, then: Callable[[], object], half: bool = False) -> None:
        self.folder, self.at, self.then, self.half, self.count = str(folder), at, then, half, 0
        fsync, step = os.fsync, Classifier.training_step
        sys.addaudithook(self._audit)
        mock.patch("os.fsync", lambda file: [self._sync(file), fsync(file)][1]).start()
        mock.patch.object(Classifier, "training_step", lambda *a, **k: [self._next(), step(*a, **k)][1]).start()

    def _audit(self, event: str, arguments: tuple) -> None:
        path = arguments[0] if arguments else None
        if event == "open":
            flags = arguments[2]
            if not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate"):
            return
        if isinstance(path, str | bytes | os.PathLike) and os.path.abspath(os.fsdecode(path)).startswith(self.folder):
            self._next()

    def _sync(self, file: int) -> None:
        if self.half and self.count + 1 == self.at:
            os.ftruncate(file, os.fstat(file).st_size // 2)
        self._next()

    def _next(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.then()


def die() -> None:
    """At once, as by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def options(name: str) -> list[str]:
    """Of an experiment, with its run in ``out``."""
    return [t for field, value in {**TINY, **EXPERIMENTS[name]}.items() for t in (f"--{field}", value)]


class Runs:
    """Runs experiments below ``root``, at first undisturbed in ``root/whole-NAME``; script: that of sweeps/run.py."""

    def __init__(self, root: Path, script: Script) -> None:
        self.root, self.script = root, script
        self.events: dict[str, int] = {}
        for name in EXPERIMENTS:
            folder = root / f"whole-{name}"
            folder.mkdir(parents=True)
            ended = processes.end(self.begin(name, folder, count=True))
            if ended.code:
                raise RuntimeError(f"the run that the others are compared with failed:\n{ended.err}")
            self.events[name] = int((folder / "count").read_text())
            (folder / "count").unlink()

    def begin(
        self,
        name: str,
        folder: Path,
        *more: str,
        at: int = 0,
        then: Callable[[], object] = die,
        half: bool = False,
        count: bool = False,
        limits: Mapping[int, int] | None = None,
        first: Callable[[], object] | None = None,
    ) -> Begun:
        """Begin the experiment in ``folder``, or go on with ``--resume`` in ``more``."""

        def act() -> None:
            moment = Moment(folder, at, then, half)
            try:
                if first:
                    first()
                call(self.script, [*options(name), *more])
            finally:
                if count:
                    (folder / "count").write_text(str(moment.count))

        home = {"HOME": str(self.root), "RAY_ADDRESS": None, "FEDCOMMONS_DATA": None}
        return processes.begin(act, folder, home, seconds=120, limits=limits)

    def differences(self, name: str, folder: Path) -> list[Fault]:
        """Where the files of the run are not those of the run that nobody disturbed; users' files are no part of it."""
        whole = self.root / f"whole-{name}"
        there, here = _files(whole), _files(folder)
        faults = [Fault("lost", f"not there in the end: {p}") for p in sorted(there.keys() - here.keys())[:3]]
        # what was half written in the store stays: another process may be writing it
        more = sorted(p for p in here.keys() - there.keys() if not (p.startswith("store/") and p.endswith(".tmp")))
        faults += [Fault("leftover", f"{_plain(p)}") for p in more[:3]]
        altered = [p for p in there.keys() & here.keys() if there[p] != here[p] and Path(p).name not in OF_THE_ATTEMPT]
        return faults + [Fault("silent", f"another {p}") for p in sorted(altered)[:3]]

    def resumed(self, name: str, folder: Path) -> list[Fault]:
        """Go on to the end, beside files of the user's, and compare."""
        out = folder / "out"
        if (out / "config.yaml").exists():
            places.decoys(out, USERS)
        before = {p: c for p, c in places.contents(folder).items() if c.startswith(b'{"mine"')}
        ended = processes.end(self.begin(name, folder, "--resume"))
        faults = [Fault("lost", f"a user's {p.relative_to(folder)}") for p in places.lost(before)[:3]]
        if ended.code:
            return [*faults, Fault("silent", f"does not go on: {failure(ended)}", ended.err[-300:])]
        return faults + self.differences(name, folder)


def call(script: Script, argv: Sequence[str]) -> None:
    """A script as from the command line."""
    sys.argv = ["script", *argv]
    cli.main(script)


def failure(ended: Ended) -> str:
    """How it ended, in a few words."""
    return f"exit {ended.code}{', late' * ended.late}: {(ended.err.strip().splitlines() or [''])[-1][:160]}"


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a run and its store, without the user's."""
    return {
        str(p.relative_to(folder)): content
        for part in ("out", "store")
        for p, content in places.contents(folder / part).items()
        if not content.startswith(b'{"mine"')
    }


def _plain(path: str) -> str:
    return re.sub(r"[0-9a-f]{4,}", "#", path)


def wait_for(path: Path) -> None:
    """Until there is such a file."""
    while not path.exists():
        time.sleep(0.005)


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
