"""Two commands on one folder: one goes on, the other is refused by the first's process and host, and nothing mixes."""

import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from faults import processes
from faults.places import TINY
from faults.processes import Begun, Ended
from faults.runs import EXPERIMENTS, Found, Runs, Script, call, die, failure, fresh, wait_for
from faults.verdicts import Fault

N = 16


def trials(runs: Runs, table1: Script, seed: int, numbers: range) -> Iterator[tuple[str, list[Found]]]:
    """For each number how the trial was, in words, and what went wrong; the last number is that of two sweeps."""
    for number in numbers:
        rng = random.Random(f"writers {seed} {number}")
        name = list(EXPERIMENTS)[number % len(EXPERIMENTS)]
        folder = fresh(runs.root / f"writers-{number}")
        if number == N - 1:
            line, faults = _sweeps(runs, table1, folder)
        else:
            way = (_paused, _paused, _paused, _racing, _after_a_kill)[number % 5]
            line, faults = way(runs, name, folder, rng)
            line = f"{name}: {line}"
        yield line, [Found(number, fault, line) for fault in faults]


def _paused(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """The first stands still at some event, for as long as the second wants."""
    at, resume = rng.randrange(1, runs.events[name] + 1), rng.random() < 0.8
    paused, go = (runs.root / f"{folder.name}-{what}" for what in ("paused", "go"))

    def pause() -> None:
        paused.touch()
        wait_for(go)

    first = runs.begin(name, folder, "--resume", at=at, then=pause)
    while not paused.exists() and not processes.has_ended(first):
        time.sleep(0.005)
    second = runs.begin(name, folder, *["--resume"] * resume)
    ended = processes.end(second)
    go.touch()
    both = [processes.end(first), ended]
    line = f"the first paused at event {at} of {runs.events[name]}, the second {'' if resume else 'not '}with --resume"
    return _judged(runs, name, folder, line, both, [first, second])


def _racing(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """Both at about the same time."""
    wait = rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 2)))
    first = runs.begin(name, folder, "--resume")
    time.sleep(wait)
    second = runs.begin(name, folder, "--resume")
    line = f"the second {wait:.3f} s after the first"
    return _judged(runs, name, folder, line, [processes.end(p) for p in (first, second)], [first, second])


def _after_a_kill(runs: Runs, name: str, folder: Path, rng: random.Random) -> tuple[str, list[Fault]]:
    """Both want what a killed run has left, its lock too."""
    at = rng.randrange(1, runs.events[name] + 1)
    killed = processes.end(runs.begin(name, folder, at=at, then=die))
    faults = [] if killed.code == -signal.SIGKILL else [Fault("exit", f"before it was killed: {failure(killed)}")]
    line, more = _racing(runs, name, folder, rng)
    return f"killed at event {at}; then {line}", faults + more


def _judged(
    runs: Runs, name: str, folder: Path, line: str, both: Sequence[Ended], begun: Sequence[Begun]
) -> tuple[str, list[Fault]]:
    faults = judge(both, begun) + runs.differences(name, folder)
    return f"{line}: {' | '.join(failure(e) for e in both)}", faults


def judge(both: Sequence[Ended], begun: Sequence[Begun]) -> list[Fault]:
    """One goes on to the end; the other is refused, or came so late that it found a finished run."""
    went_on = [e for e in both if e.code == 0]
    if len(went_on) == 2:
        played = [e for e in both if any(text in f"\n{e.out}" for text in ("\nround ", "\ngenerator ", "cells to run"))]
        return [Fault("silent", "two processes went on with one run")] if len(played) == 2 else []
    if not went_on:
        return [Fault("silent", "neither went on", " | ".join(failure(e) for e in both))]
    refused = next(i for i, e in enumerate(both) if e.code)
    other, said = begun[1 - refused].pid, both[refused].err
    if both[refused].code != 2:
        return [Fault("traceback", f"the other: {failure(both[refused])}", said[-300:])]
    if "--resume" in said:  # a new run in a folder that has one: refused for that
        return []
    if str(other) not in said or socket.gethostname() not in said:
        return [Fault("sentence", "refused without the first's process and host", said[-300:])]
    return []


def _sweeps(runs: Runs, table1: Script, folder: Path) -> tuple[str, list[Fault]]:
    """Two sweeps, each with a Ray of its own; the second begins when the first has begun a run."""
    own = {"wandb": "off", "algorithms": "fedavg", "alphas": "0.1,1", "settings": "real", "federation.rounds": "3"}
    argv = [t for n, v in {**TINY, **own}.items() if n != "tracking.wandb" for t in (f"--{n}", v)]
    home = {"HOME": str(runs.root), "RAY_ADDRESS": None, "FEDCOMMONS_DATA": None}
    begin = partial(processes.begin, partial(call, table1, [*argv, "--resume"]), folder, home, seconds=240)
    first = begin()
    while not list(folder.glob("out/*/config.yaml")) and not processes.has_ended(first):
        time.sleep(0.01)
    second = begin()
    both = [processes.end(p) for p in (second, first)]
    faults = judge(both, [second, first])
    for one in sorted(folder.glob("out/*/config.yaml")):
        argv = ["--config", str(one), "--out", f"again-{one.parent.name}", "--tracking.wandb", "off"]
        again = processes.end(processes.begin(partial(call, runs.script, argv), folder, home))
        if again.code:
            faults.append(Fault("silent", f"a cell's config does not run: {failure(again)}"))
            continue
        for name in ("rounds.jsonl", "summary.json"):
            mine, its = one.with_name(name), folder / f"again-{one.parent.name}" / name
            if not mine.exists() or mine.read_bytes() != its.read_bytes():
                faults.append(Fault("silent", f"two sweeps: {name} of a cell is not that of the run alone"))
    if len(list(folder.glob("out/*/summary.json"))) != 2:
        faults.append(Fault("lost", "two sweeps: a cell has no summary"))
    return f"two sweeps: {' | '.join(failure(e) for e in both)}", faults
