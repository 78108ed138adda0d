"""A case: something odd in a folder of its own, an action in a fork, and what is seen of it from outside.

A case's folder has ``here``, where the action begins, ``outside``, which nobody may change, and ``tmp`` and ``home``.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from faults import places, processes
from faults.processes import TRACEBACK, Begun, Ended
from faults.runs import Found, Script, call, fresh
from faults.verdicts import Fault, last, place, shown

import fedcommons as fc

GIGABYTES = 3
"""That a case may take beyond what its process was born with."""

DECOYS = ("grp", "pwd", "bz2", "lzma", "readline", "sqlite3", "cProfile", "sitecustomize", "usercustomize", "tomllib")
"""Modules in the current folder that only a process imports which has that folder on its path."""

STEPS_ASIDE = """import sys
sys.path[:] = [p for p in sys.path if p not in ("", ".", here)]
del sys.modules[__name__]
__import__(__name__)
"""
"""Then the real module is there, and what happens after it is seen too."""

VICTIMS = {"notes.txt": "mine\n", "deep/paper.txt": "mine too\n", "messages.log": "of others\n"}


@dataclass(frozen=True)
class Case:
    """What is tried.

    what: in words. furnish: makes what must be in ``here``, and may say more. judge: what went wrong of one that ended
    well. longest: of a sentence, in characters. named: a pattern of what a sentence must name.
    """

    what: str
    action: Callable[[], object]
    furnish: Callable[[Path], str | None] = lambda here: None
    judge: Callable[[Path, Ended], list[Fault]] = lambda here, ended: []
    longest: int = 600
    named: str = ""
    seconds: float = 20
    gigabytes: float = GIGABYTES
    environment: Mapping[str, str] = field(default_factory=dict)


def line(script: Script, *argv: str) -> Callable[[], object]:
    """The action of a command line."""
    return lambda: call(script, argv)


def api(action: Callable[[], object]) -> Callable[[], object]:
    """Python instead of a command line: an error that is meant for users is a sentence and exit code 2."""

    def act() -> None:
        try:
            print("gave", action())
        except (fc.UserError, fc.ClientError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return act


@dataclass(frozen=True)
class Started:
    """A case that runs; what: in words; before: the files outside, by size and time."""

    case: Case
    process: Begun
    what: str
    before: Mapping[str, tuple[int, int]]


def begin(case: Case, folder: Path) -> Started:
    """Make the case's folder and begin its action."""
    fresh(folder)
    for name in ("here", "outside", "tmp", "home"):
        (folder / name).mkdir()
    for name, text in VICTIMS.items():
        path = folder / "outside" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for name in DECOYS:
        told = f"open({str(folder / 'pwned')!r}, 'a').write({name!r})"
        (folder / "here" / f"{name}.py").write_text(f"{told}\nhere = {str(folder / 'here')!r}\n{STEPS_ASIDE}")
    what = case.what + (case.furnish(folder / "here") or "")
    environment = {
        "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "RAY_ADDRESS": None, "FEDCOMMONS_DATA": None,
        "PWNED": str(folder / "pwned"), **case.environment,
    }  # fmt: skip
    limits = processes.memory(case.gigabytes)
    before = _outside(folder)
    begun = processes.begin(case.action, folder / "here", environment, seconds=case.seconds, limits=limits)
    return Started(case, begun, what, before)


def _outside(folder: Path) -> dict[str, tuple[int, int]]:
    facts = {p: p.lstat() for p in sorted((folder / "outside").rglob("*"))}
    return {str(p.relative_to(folder)): (f.st_size, f.st_mtime_ns) for p, f in facts.items()}


def faults(started: Started, folder: Path, ended: Ended) -> list[Fault]:
    """All that went wrong."""
    case, found = started.case, _around(started, folder, ended)
    if ended.late:
        return [*found, Fault("hang", last(ended.err) or last(ended.out))]
    if ended.code == TRACEBACK or "Traceback (most recent call last)" in ended.err:
        return [*found, Fault("traceback", place(ended.err), last(ended.err))]
    if ended.code == 0:
        return [*found, *_judged(case, folder / "here", ended)]
    if ended.code in (1, 2, 130):
        return [*found, *sentence(case, ended)]
    return [*found, Fault("exit", f"code {ended.code}", last(ended.err))]


def _around(started: Started, folder: Path, ended: Ended) -> list[Fault]:
    """What was done beside the answer."""
    found = []
    if (folder / "pwned").exists():
        found.append(Fault("lost", "ran code that nobody named", (folder / "pwned").read_text()[:80]))
    before, after = started.before, _outside(folder)
    if changed := sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n)):
        found.append(Fault("lost", f"changed outside: {changed[0]}"))
    known = {"here", "outside", "tmp", "home", "pwned"}
    more = sorted({p.name for p in folder.iterdir()} - known)
    if more:
        found.append(Fault("lost", f"written beside its folder: {more[0]}"))
    if rest := sorted(p.name for p in (folder / "tmp").iterdir()):
        found.append(Fault("leftover", f"in the folder of temporary files: {re.sub(r'[0-9a-z_]{8}', '#', rest[0])}"))
    if ended.left:
        found.append(Fault("leftover", "a process"))
    if odd := [c for c in ended.out + ended.err if not c.isprintable() and c not in "\n\t\r"]:
        found.append(Fault("sentence", f"prints {odd[0]!a}", shown(ended.err[-200:], 200)))
    return found


def _judged(case: Case, here: Path, ended: Ended) -> list[Fault]:
    try:
        return case.judge(here, ended)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return [Fault("silent", f"no whole results: {type(error).__name__}", shown(str(error), 200))]


def sentence(case: Case, ended: Ended) -> list[Fault]:
    """Whether it said in one sentence why not."""
    said = [text for text in ended.err.split("\n") if text.startswith(("error: ", "stopped; "))]
    if not said:
        return [Fault("exit", f"code {ended.code} without a sentence", last(ended.err))]
    text = said[-1].removeprefix("error: ")
    if len(said) > 1:
        return [Fault("sentence", f"{len(said)} of them", shown(" / ".join(said), 200))]
    if len(text) > case.longest:
        return [Fault("sentence", f"longer than {case.longest}", f"{len(text)}: {shown(text, 400)}")]
    if len(text.split()) < 3 or "<class" in text:
        return [Fault("sentence", "no sentence", shown(text, 300))]
    if case.named and ended.code != 130 and not re.search(case.named, text):
        return [Fault("sentence", f"names none of {case.named}", shown(text, 300))]
    return []


def whole(here: Path, ended: Ended, out: str = "out") -> list[Fault]:
    """Whether there is a finished run: all rounds, each finite or told, and its summary."""
    lines = [json.loads(text) for text in (here / out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((here / out / "summary.json").read_text())
    if [one["round"] for one in lines] != list(range(summary["rounds"] + 1)):
        return [Fault("silent", "rounds are missing")]
    empty = sorted(
        {k for one in lines for k, v in one.items() if v is None or (isinstance(v, float) and not isfinite(v))}
    )
    if empty and "finite" not in ended.out + ended.err and "no accuracy" not in ended.out + ended.err:
        return [Fault("silent", f"not finite, and not a word: {empty[0]}")]
    return []


def never(what: str) -> Callable[[Path, Ended], list[Fault]]:
    """The judge of what nobody may take."""
    return lambda here, ended: [Fault("silent", f"taken: {what}", last(ended.out))]


def templates(root: Path, script: Script) -> Path:
    """Runs, a folder each, and their store, made once."""
    for name, fields in places.RUNS.items():
        base = {**places.TINY, **fields, "out": name}
        argv = [t for field, value in base.items() for t in (f"--{field}", value)]
        root.mkdir(parents=True, exist_ok=True)
        ended = processes.end(processes.begin(line(script, *argv), root, {"FEDCOMMONS_DATA": None}))
        if ended.code:
            raise RuntimeError(f"the run that the others are compared with failed:\n{ended.err}")
    return root


class Campaign:
    """Cases of one part, each keyed by (seed, number); make: the case of a number."""

    def __init__(self, root: Path, make: Callable[[int], Case]) -> None:
        self.root, self.make = root, make

    def run(self, numbers: Sequence[int], at_once: int = 2) -> Iterator[tuple[int, list[Found]]]:
        """(exit code, what went wrong) in the order in which they end."""
        begun: dict[int, Started] = {}

        def one(number: int) -> Begun:
            begun[number] = begin(self.make(number), self._folder(number))
            return begun[number].process

        for number, ended in processes.side_by_side(one, numbers, at_once):
            started = begun.pop(number)
            wrong = [Found(number, f, started.what) for f in faults(started, self._folder(number), ended)]
            remove(self._folder(number))
            yield ended.code, wrong

    def show(self, number: int) -> list[Found]:
        """Try one alone, and leave its folder; what went wrong."""
        folder = self._folder(number)
        started = begin(self.make(number), folder)
        ended = processes.end(started.process)
        print(f"{started.what}\nin {folder}: exit {ended.code}{', late' * ended.late}")
        print(ended.out[-3000:], ended.err[-6000:], sep="\n--- stderr\n")
        found = [Found(number, fault, started.what) for fault in faults(started, folder, ended)]
        for one in found:
            print(one.fault)
        return found

    def _folder(self, number: int) -> Path:
        return self.root / f"case-{number:05d}"


def remove(folder: Path) -> None:
    """The folder with all that is in it, whatever that is."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if folder.exists():
            os.system(f"rm -rf {folder}")
