"""Disks that are full, files that are too large and readers that are gone: one sentence, exit code 1, and resumable."""

import os
import random
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

from faults import processes
from faults.processes import TRACEBACK, Ended
from faults.runs import EXPERIMENTS, Found, Runs, failure, fresh
from faults.verdicts import Fault, place

N = 24


def trials(runs: Runs, seed: int, numbers: range) -> Iterator[tuple[str, list[Found]]]:
    """For each number how the trial was, in words, and what went wrong."""
    for number in numbers:
        rng = random.Random(f"disks {seed} {number}")
        name = list(EXPERIMENTS)[number % len(EXPERIMENTS)]
        way = (_too_large, _full, _no_reader, _full, _full_device, _too_large)[number // 2 % 6]
        folder = fresh(runs.root / f"disk-{number}")
        line, faults = way(runs, name, folder, rng)
        yield f"{name}: {line}", [Found(number, fault, f"{name}: {line}") for fault in faults]


def said_well(ended: Ended) -> list[Fault]:
    """Whether a run that could not go on said so; one that had what it needed may have ended."""
    if ended.code == 0:
        return []
    if ended.code == TRACEBACK or "Traceback" in ended.err:
        return [Fault("traceback", place(ended.err), ended.err[-300:])]
    lines = ended.err.strip().splitlines()  # exit code 2: before any work
    if ended.code not in (1, 2) or len([x for x in lines if x.startswith("error: ")]) != 1:
        return [Fault("sentence", failure(ended), ended.err[-300:])]
    return []


def _too_large(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """A bound on the size of files, as ulimit -f or a quota has it."""
    size = int(400 * 2 ** rng.uniform(0, 8))
    ended = processes.end(runs.begin(name, folder, limits={resource.RLIMIT_FSIZE: size}))
    return f"files of at most {size} bytes: {failure(ended)}", said_well(ended) + runs.resumed(name, folder)


def _full(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """A real disk of some kB, which grows when the run has failed."""
    whole = sum(p.stat().st_size for p in (runs.root / f"whole-{name}").rglob("*") if p.is_file()) // 1024
    size = rng.randrange(8, whole)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        return "no right to mount a small disk: left out", []
    try:
        ended = processes.end(runs.begin(name, folder))
        faults = said_well(ended)
        subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True, capture_output=True)
        return f"a disk of {size} of {whole} kB: {failure(ended)}", faults + runs.resumed(name, folder)
    finally:
        subprocess.run(["umount", folder], check=True, capture_output=True)


def _no_reader(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """Standard output is a pipe whose reader goes away at some event (| head)."""
    at, held = rng.randrange(1, runs.events[name]), []  # before the last thing that a run prints

    def into_a_pipe() -> None:  # in the run's process
        reading, writing = os.pipe()
        held.append(reading)
        os.dup2(writing, 1)

    ended = processes.end(runs.begin(name, folder, first=into_a_pipe, at=at, then=lambda: os.close(held[0])))
    return f"the reader is gone at event {at}: {failure(ended)}", _must(ended) + runs.resumed(name, folder)


def _full_device(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """Standard output goes to a file on a full disk."""

    def into_it() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    ended = processes.end(runs.begin(name, folder, first=into_it))
    return f"output to /dev/full: {failure(ended)}", _must(ended) + runs.resumed(name, folder)


def _must(ended: Ended) -> list[Fault]:
    """Output was lost, so it cannot have ended well."""
    return said_well(ended) if ended.code else [Fault("silent", "its output was lost, and it ended with 0")]
