"""Seconds per round and per step of a round, with many actors, hosts, clients or parameters.

python benchmarks/scaling.py [actors hosts clients participants parameters] [--json]

actors: 1 to 8 Ray actors on this machine. hosts: two hosts of tests/helpers/hosts.py, network namespaces that share the
machine's cores and use TLS (needs root). clients: N = 10 to 10^6 clients, ten clients per round. participants: 10 to
10^4 clients per round. parameters: models of 10^4 to 10^8 parameters. Each row is measured in a fresh process, after a
warm-up round. It has the median over rounds of these seconds:

compute     training of clients in the slowest actor
serialise   the driver writes the message and all sums of client blocks into the object store, and reads them again
transport   sending the same sums without training, minus serialise
wait        the rest of the time for all clients of a round: actors that start late, shared cores
server      the driver samples clients, builds messages, adds sums of blocks and updates the model
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from memory import forget_largest, resident
from round_time import WORKLOADS, examples, machine, network
from torch import nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device
from fedcommons.data.clients import Clients, Rows
from fedcommons.federation import rounds
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.runtime import ray_cluster
from lightning_modules import Classifier

ROOT = Path(__file__).parent.parent
PARTS = ("compute", "serialise", "transport", "wait", "server")


@dataclass(frozen=True)
class Scale:
    """One row of the table. participants: clients per round; blocks: groups of clients whose updates are summed.

    parameters: number of parameters of a linear model; None: the tiny MLP of W3 (25,450 parameters).
    """

    actors: int = 2
    clients: int = 1000
    participants: int = 100
    parameters: int | None = None
    blocks: int = 8
    rounds: int = 8
    steps: int = 1  # local steps of ten examples per client


ROWS = {
    "actors": [Scale(actors=n, steps=20) for n in (1, 2, 4, 8)],
    "hosts": [Scale(actors=n, steps=20) for n in (2, 4)]
    + [Scale(participants=2, blocks=2, rounds=5, parameters=p) for p in (10**6, 10**7)],
    "clients": [Scale(clients=10**k, participants=10) for k in range(1, 7)],
    "participants": [Scale(clients=10**4, participants=10**k) for k in range(1, 5)],
    "parameters": [Scale(participants=2, blocks=2, rounds=5, parameters=10**k) for k in range(4, 8)]
    + [Scale(actors=1, participants=1, blocks=1, rounds=3, parameters=10**8)],
}


def build(scale: Scale, data: RunData) -> Worker:
    """Return a worker with the model of this row."""
    torch.manual_seed(0)
    wide = nn.Linear(784, max(10, scale.parameters // 785)) if scale.parameters else network("W3")
    work = Work(Classifier(wide, lr=0.01), default_device(), LocalSGD(scale.steps, 10))
    return Worker(work, FedAvg(), data)


def timed(function: Callable, worker: Any, shared: Any, job: Any) -> tuple[Any, int, float]:
    """Run a block of clients in an actor, which keeps the result; return (result, process id, seconds)."""
    start = time.perf_counter()
    result = function(worker, shared, job)
    seconds = time.perf_counter() - start
    before = getattr(worker.work, "results", (0, {}))
    blocks = before[1] if before[0] == shared.round else {}
    worker.work.results = shared.round, {**blocks, job.clients[0]: result}
    return result, os.getpid(), seconds


def last_result(worker: Any, shared: Any, job: Any) -> Any:
    """Return the block's last result, which the actor stored, without training."""
    return worker.work.results[1][job.clients[0]]


def size(worker: Any, shared: Any, job: Any) -> float:
    """Return the actor's largest resident size so far, in MB."""
    return resident(largest=True)


@dataclass
class Timed:
    """An executor that measures the calls of another executor ``inner`` once ``asked`` is True."""

    inner: Executor
    asked: bool = False
    records: list[dict[str, float]] = field(default_factory=list)

    def map(self, function: Callable, shared: Any, jobs: Sequence[Any]) -> list[Any]:
        """Run all jobs in the actors (see ``Executor.map``), and measure the steps if ``asked``."""
        import ray

        if not self.asked:
            return self.inner.map(function, shared, jobs)
        begun = time.perf_counter()
        answers = self.inner.map(partial(timed, function), shared, jobs)
        whole = time.perf_counter() - begun
        by_actor: dict[int, float] = {}
        for _, process, seconds in answers:
            by_actor[process] = by_actor.get(process, 0) + seconds
        compute, results = max(by_actor.values()), [result for result, _, _ in answers]
        del answers
        start = time.perf_counter()
        for value in (shared, results):
            ray.get(ray.put(value))
        serialise = time.perf_counter() - start
        start = time.perf_counter()
        self.inner.map(last_result, shared, jobs)
        transport = max(0.0, time.perf_counter() - start - serialise)
        wait = max(0.0, whole - compute - serialise - transport)
        spent = {"map": whole, "measuring": time.perf_counter() - begun - whole}
        self.records.append(spent | {"compute": compute, "serialise": serialise, "transport": transport, "wait": wait})
        return results

    def close(self) -> None:
        """Close the inner executor."""
        self.inner.close()


def measure(scale: Scale) -> dict[str, float]:
    """Return seconds of a round, of the steps of further rounds and of the start, and largest resident sizes in MB.

    The sizes are the growth of the driver, and the size of an actor; both include memory mapped from the object store.
    """
    from fedcommons.federation.ray_executor import RayActors

    torch.set_num_threads(1)
    store = examples(WORKLOADS["W3"])
    ray_cluster.connect(scale.actors)
    before, start = resident(), time.perf_counter()
    rows = Rows(torch.arange(len(store)), np.arange(scale.clients) * 10 % len(store), np.full(scale.clients, 10))
    clients = Clients(store, rows)
    data, builder = RunData(clients, clients, {}), partial(build, scale)
    executor = Timed(RayActors(builder, data, scale.actors, 0))
    facts = Facts(scale.clients, clients.sizes, 10**9)
    algorithm, plan = FedAvg(), Plan(facts, scale.participants / scale.clients, scale.blocks, 0)
    standing = Standing(0, algorithm.start(builder(data).work.snapshot(), facts, 0))
    started = time.perf_counter() - start
    forget_largest()
    course = rounds.run(algorithm, executor, plan, standing)
    next(course)
    whole = statistics.median(seconds(course) for _ in range(scale.rounds))
    sizes = {
        "driver_mb": resident(largest=True) - before,
        "actor_mb": max(executor.map(size, ModelTask(standing.model), [0] * scale.actors)),
    }
    executor.asked, server = True, []
    for _ in range(scale.rounds):
        spent = seconds(course)
        server.append(max(0.0, spent - executor.records[-1]["map"] - executor.records[-1]["measuring"]))
    parts = {name: statistics.median(each[name] for each in executor.records) for name in PARTS[:-1]}
    executor.close()
    return {"round": whole, **parts, "server": statistics.median(server), "start": started, **sizes}


def seconds(course: Iterator) -> float:
    """Run the next round and return its wall-clock seconds."""
    start = time.perf_counter()
    next(course)
    return time.perf_counter() - start


def here(scale: Scale) -> dict[str, float]:
    """Return the result of ``measure`` for this row from a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--row", json.dumps(scale.__dict__)],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def on_two_hosts(scales: Sequence[Scale]) -> list[dict[str, float]]:
    """Measure these rows on two hosts; the driver and half of the actors run on the first host."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import hosts  # pyright: ignore[reportMissingImports]

    if why := hosts.missing():
        sys.exit(f"error: {why}.")
    with TemporaryDirectory() as shared, hosts.network(Path(shared), ["head", "worker"]) as (head, worker):
        for name in ("benchmarks", "cluster", "lightning_modules", "platform"):
            shutil.copytree(ROOT / name, Path(shared) / name)
        secrets = head.run("sh", "-c", f"sh /mnt/cluster/secrets.sh {head.ip} {worker.ip} && cp -r ~/.fedcommons /mnt/")
        assert secrets.returncode == 0, secrets.stderr
        worker.run("cp", "-r", "/mnt/.fedcommons", "/root/")
        start, results = ". /mnt/cluster/environment.sh && export PYTHONPATH=/mnt/platform:/mnt:/mnt/benchmarks", []
        for scale in scales:
            starts = [(head, f"--head --port=6379 --include-dashboard=false --node-ip-address={head.ip}")]
            starts.append((worker, f"--address={head.ip}:6379 --node-ip-address={worker.ip}"))
            for host, options in starts:
                line = f"ray start {options} --num-cpus={scale.actors // 2} --disable-usage-stats"
                done = host.run("sh", "-c", f"{start} && {line}")
                assert done.returncode == 0, done.stdout + done.stderr
            row = shlex.quote(json.dumps(scale.__dict__))
            line = f"{start} RAY_ADDRESS=auto && python /mnt/benchmarks/scaling.py --row {row}"
            done = head.run("sh", "-c", line, timeout=600)
            assert done.returncode == 0, done.stdout + done.stderr
            results.append(json.loads(done.stdout.splitlines()[-1]))
            for host in (head, worker):
                host.run("sh", "-c", "ray stop --force")
        return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help=", ".join(ROWS))
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, as the last line")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(Scale(**json.loads(options.row)))))
        return 0
    if unknown := set(options.what) - set(ROWS):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(ROWS)}")
    torch.set_num_threads(1)
    print(machine())
    everything: dict[str, list[dict[str, Any]]] = {}
    titles = ["actors", "N", "C N", "parameters", "round, s", *PARTS, "start, s", "driver, MB", "actor, MB"]
    for name in options.what or ROWS:
        print(f"\n{name}\n\n| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
        scales = ROWS[name]
        for scale, cost in zip(scales, on_two_hosts(scales) if name == "hosts" else map(here, scales), strict=True):
            sizes = (scale.actors, scale.clients, scale.participants, scale.parameters or 25_450)
            spent = [f"{cost[part]:.4f}" for part in ("round", *PARTS)]
            rest = [f"{cost['start']:.1f}", f"{cost['driver_mb']:.0f}", f"{cost['actor_mb']:.0f}"]
            print(f"| {' | '.join([*(f'{n:,}' for n in sizes), *spent, *rest])} |", flush=True)
            everything.setdefault(name, []).append(scale.__dict__ | cost)
    if options.json:
        print(json.dumps(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
