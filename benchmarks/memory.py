"""Resident memory of long runs and of clients with memory between rounds, and the cost of a million clients.

python benchmarks/memory.py [--actors] [--json]

flat: the driver's resident size in a W3 run of 1500 rounds (1000 clients, 100 per round, one step of 10 examples), in
one process and, with --actors, with two Ray actors. Goal: at most 1.05 times the size after round 100. capped: 1000
clients with 1 MB of memory each (SCAFFOLD, 250,000 parameters, 100 per round), of which 64 MB may stay in RAM, and a
checkpoint every 5 rounds. Reported: growth of the process at the end and at its largest. many: a million stateless
clients of 10 examples compared with a thousand clients, 100 per round. Goal: a start in seconds, and equal seconds per
round. Each part is measured in a fresh process; it needs Linux.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from round_time import WORKLOADS, Ours, examples, machine, network
from torch import nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Examples
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from lightning_modules import Classifier

Course = Iterator[tuple[Standing, dict[str, float]]]

AT = (100, 500, 1000, 1500)  # rounds after which ``flat`` reports the resident size
PER_ROUND = 100  # clients per round
LOCAL = LocalSGD(1, 10)


def resident(largest: bool = False) -> float:
    """Return the resident size of this process in MB; largest: its maximum since the start or ``forget_largest``."""
    name = "VmHWM:" if largest else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return (
        next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6
    )  # kB in /proc means 1024 bytes


def forget_largest() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def course(n_clients: int, algorithm: Algorithm, net: nn.Module, store: Examples, memory: ClientMemory) -> Course:
    """Return an endless iterator that runs a round per item, of clients with 10 examples each.

    With more than 1000 clients, several clients hold the same examples.
    """
    rows = Rows(torch.arange(len(store)), np.arange(n_clients) * 10 % len(store), np.full(n_clients, 10))
    clients = Clients(store, rows)

    def build(data: RunData) -> Worker:
        return Worker(Work(Classifier(net, lr=0.01), default_device(), LOCAL), algorithm, data)

    executor = Serial(build, RunData(clients, clients, {}))
    facts = Facts(n_clients, clients.sizes, 10**9)
    start = Standing(0, algorithm.start(executor.worker.work.snapshot(), facts, 0), memory)
    return rounds.run(algorithm, executor, Plan(facts, PER_ROUND / n_clients, 4, 0), start)


def flat(actors: int | None) -> dict[str, Any]:
    """Measure the driver's resident size in a long run, with ``actors`` Ray actors or in one process (None)."""
    ours, played, sizes = Ours("W3", actors), 0, {}
    for number in AT:
        ours.stretch(number - played)
        played, sizes[number] = number, round(resident(), 1)
    ours.close()
    return {"resident_mb": sizes, "ratio": round(sizes[AT[-1]] / sizes[AT[0]], 4)}


def capped(cap_mb: float = 64, upto: int = 40) -> dict[str, Any]:
    """Measure the growth of a process whose clients have more memory than ``cap_mb``, the most that may stay in RAM."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = ClientMemory(cap_bytes=cap_mb * 1e6, folder=folder / "memory")
        played = course(1000, SCAFFOLD(), nn.Linear(784, 318), examples(WORKLOADS["W3"]), memory)
        before, start, n_clients = resident(), time.perf_counter(), 0
        forget_largest()
        for now, _ in islice(played, upto):
            n_clients = len(now.memory)
            if now.round % 5 == 0:
                checkpoint.save(folder / "checkpoints", now)
        seconds = (time.perf_counter() - start) / upto
        grown = {"at_rest_mb": round(resident() - before, 1), "at_most_mb": round(resident(largest=True) - before, 1)}
        return {"clients_with_memory": n_clients, "cap_mb": cap_mb, **grown, "seconds_a_round": round(seconds, 3)}


def many(n_clients: int = 1_000_000, repeats: int = 15) -> dict[str, Any]:
    """Measure seconds until the first round can start, and seconds per round in turns with a thousand clients."""
    store, started, courses = examples(WORKLOADS["W3"]), 0.0, {}
    next(course(1000, FedAvg(), network("W3"), store, ClientMemory()))  # excludes work that a process does once
    before = resident()
    for n in (1000, n_clients):
        start = time.perf_counter()
        courses[n] = course(n, FedAvg(), network("W3"), store, ClientMemory())
        started = time.perf_counter() - start
    seconds: dict[int, list[float]] = {n: [] for n in courses}
    for repeat in range(repeats + 1):
        for n, played in courses.items():
            start = time.perf_counter()
            list(islice(played, 5))
            if repeat:
                seconds[n].append((time.perf_counter() - start) / 5)
    medians = {n: statistics.median(s) for n, s in seconds.items()}
    return {
        "start_s": round(started, 3),
        "round_s": {n: round(s, 4) for n, s in medians.items()},
        "ratio": round(medians[n_clients] / medians[1000], 3),
        "grown_mb": round(resident() - before, 1),
    }


def apart(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``measure`` from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", action="store_true", help="the long run with two Ray actors, too")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    measures = {"flat, serial": partial(flat, None), "capped": capped, "many": many}
    if options.actors:
        measures["flat, 2 actors"] = partial(flat, 2)
    results = {}
    for name, measure in measures.items():
        results[name] = apart(measure)
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in results[name].items()), flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
