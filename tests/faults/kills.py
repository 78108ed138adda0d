"""kill -9 at random moments, once or twice, then a resumption: it ends as if it had never been interrupted."""

import random
import signal
from collections.abc import Iterator

from faults import processes
from faults.runs import EXPERIMENTS, Found, Runs, die, failure, fresh
from faults.verdicts import Fault

N = 20


def trials(runs: Runs, seed: int, numbers: range) -> Iterator[tuple[str, list[Found]]]:
    """For each number how the trial was, in words, and what went wrong."""
    for number in numbers:
        rng = random.Random(f"kills {seed} {number}")
        name = list(EXPERIMENTS)[number % len(EXPERIMENTS)]
        folder = fresh(runs.root / f"kill-{number}")
        said, faults = [], []
        for attempt in range(1 + (rng.random() < 0.4)):
            at, half = rng.randrange(1, runs.events[name] + 1), rng.random() < 0.4
            ended = processes.end(runs.begin(name, folder, *["--resume"] * attempt, at=at, half=half, then=die))
            said.append(f"killed at event {at}{' with half a file' * half}")
            if ended.code == 0:
                said[-1] = f"ended before event {at}"
            elif ended.code != -signal.SIGKILL:
                faults.append(Fault("traceback", f"before it was killed: {failure(ended)}", ended.err[-300:]))
        faults += runs.resumed(name, folder)
        line = f"{name}: {', then '.join(said)} of {runs.events[name]}"
        yield line, [Found(number, fault, line) for fault in faults]
