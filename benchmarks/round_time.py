"""Seconds per round, compared with a bare PyTorch loop that does the same work, interleaved in one run.

python benchmarks/round_time.py [W1 W2 W3] [--json] [--repeats 9]

W1: small CNN, 10 of 100 clients per round x 15 steps. W2: VGG-11 (9.5 M parameters), 10 clients x 2 steps of 64
examples. W3: tiny MLP, 100 of 1000 clients x 1 step of 10. Evaluation and tracking are not timed. ``serial`` (one
process) is compared with the bare loop in one process, ``actors2`` (two Ray actors) with the bare loop in two
processes; each process has one torch thread.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.federation import rounds
from fedcommons.federation.client_sampling import participants
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.runtime import ray_cluster
from lightning_modules import Classifier


@dataclass(frozen=True)
class Workload:
    """Sizes of a workload: clients, examples per client, clients per round, local epochs, batch size, shape of x."""

    clients: int
    per_client: int
    per_round: int
    epochs: int
    batch: int
    shape: tuple[int, ...]
    lr: float
    timed: int  # rounds that are timed together


WORKLOADS = {
    "W1": Workload(100, 60, 10, 5, 20, (1, 28, 28), 0.05, 4),
    "W2": Workload(10, 128, 10, 1, 64, (3, 32, 32), 0.05, 1),
    "W3": Workload(1000, 10, 100, 1, 10, (784,), 0.2, 40),
}


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 32, 5, padding=2)
        self.f1, self.f2 = nn.Linear(32 * 7 * 7, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.f2(F.relu(self.f1(x.flatten(1))))


def vgg11() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for v in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if v == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, v, 3, padding=1), nn.ReLU(inplace=True)]
            channels = v
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 512), nn.ReLU(inplace=True), nn.Linear(512, 10))


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "W1":
        return SmallCNN()
    return vgg11() if name == "W2" else nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def examples(w: Workload) -> Examples:
    draws = torch.Generator().manual_seed(1234)
    n = w.clients * w.per_client
    return Examples(torch.randn(n, *w.shape, generator=draws), torch.randint(0, 10, (n,), generator=draws))


def bare_client(
    model: nn.Module, weights: list[Tensor], total: list[Tensor], x: Tensor, y: Tensor, w: Workload
) -> None:
    """Train a client from the server's weights and add the trained weights to ``total``."""
    with torch.no_grad():
        for p, q in zip(model.parameters(), weights, strict=True):
            p.copy_(q)
    optimizer = torch.optim.SGD(model.parameters(), lr=w.lr)
    for _ in range(w.epochs):
        for i in range(0, len(x), w.batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[i : i + w.batch]), y[i : i + w.batch]).backward()
            optimizer.step()
    with torch.no_grad():
        for a, p in zip(total, model.parameters(), strict=True):
            a.add_(p)


def bare_worker(name: str, rank: int, n: int, shared: tuple, outer, inner, go) -> None:
    """Run process ``rank`` of ``n`` processes of the bare loop.

    Between two waits at the barrier ``outer`` it runs the workload's timed rounds, from round ``go`` on; a negative
    ``go`` ends the process. In each round, all processes meet at the barrier ``inner``.
    """
    torch.set_num_threads(1)
    w = WORKLOADS[name]
    x, y, weights, totals = shared
    model = network(name)
    while True:
        outer.wait()
        if go.value < 0:
            return
        for number in range(go.value, go.value + w.timed):
            ids = participants(w.clients, w.per_round / w.clients, 0, number)
            for t in totals[rank]:
                t.zero_()
            for i in ids[rank::n]:
                bare_client(model, weights, totals[rank], x[i], y[i], w)
            inner.wait()
            if rank == 0:
                for q, *parts in zip(weights, *totals, strict=True):
                    torch.div(sum(parts[1:], parts[0]), len(ids), out=q)
            inner.wait()
        outer.wait()


class Bare:
    """The bare loop in ``n`` processes; ``stretch`` runs the workload's timed rounds."""

    def __init__(self, name: str, n: int) -> None:
        w = WORKLOADS[name]
        data = examples(w)
        x, y = data.x.view(w.clients, w.per_client, *w.shape), data.y.view(w.clients, w.per_client)
        weights = [p.detach().clone().share_memory_() for p in network(name).parameters()]
        totals = [[torch.zeros_like(p).share_memory_() for p in weights] for _ in range(n)]
        context = multiprocessing.get_context("spawn")
        self.barrier, self.go = context.Barrier(n + 1), context.Value("l", 0)
        self.inner = context.Barrier(n)
        shared = (x.share_memory_(), y.share_memory_(), weights, totals)
        self.processes = [
            context.Process(
                target=bare_worker, args=(name, r, n, shared, self.barrier, self.inner, self.go), daemon=True
            )
            for r in range(n)
        ]
        for process in self.processes:
            process.start()
        self.next = 1

    def stretch(self, rounds_: int) -> None:
        self.go.value = self.next
        self.barrier.wait()
        self.barrier.wait()
        self.next += rounds_

    def close(self) -> None:
        self.go.value = -1
        self.barrier.wait()
        for process in self.processes:
            process.join()


class Ours:
    """The package's round loop, serial or with Ray actors; ``stretch`` runs ``rounds_`` rounds."""

    def __init__(self, name: str, actors: int | None, *, batched: bool = False, transport: str = "auto") -> None:
        w = WORKLOADS[name]
        data = examples(w)
        rows = np.arange(len(data)).reshape(w.clients, w.per_client)
        clients = Clients(data, list(rows))
        build = partial(build_worker, name, batched)
        self.executor: Executor
        if actors is None:
            self.executor = Serial(build, RunData(clients, clients, {}))
        else:
            from fedcommons.federation.ray_executor import RayActors

            ray_cluster.connect(num_cpus=2 * actors)  # leaves cores for the actors of another instance
            self.executor = RayActors(build, RunData(clients, clients, {}), actors, 1.0, transport=transport)
        work = build(RunData(clients, clients, {})).work
        algorithm = FedAvg()
        facts = Facts(w.clients, clients.sizes, 10**9)
        plan = Plan(facts, w.per_round / w.clients, 4, 0)
        start = Standing(0, algorithm.start(work.snapshot(), facts, 0))
        self.course: Iterator = rounds.run(algorithm, self.executor, plan, start)

    def stretch(self, rounds_: int) -> None:
        for _ in range(rounds_):
            next(self.course)

    def close(self) -> None:
        self.executor.close()


def build_worker(name: str, batched: bool, data: RunData) -> Worker:
    w = WORKLOADS[name]
    work = Work(Classifier(network(name), lr=w.lr), default_device(), LocalSGD(w.epochs, w.batch, batched=batched))
    return Worker(work, FedAvg(), data)


def compare(name: str, base: Callable[[], Bare], ours: Callable[[], Ours], repeats: int) -> tuple[float, float]:
    """Return the median seconds per round of the bare loop and of our loop, in turns, after a warm-up."""
    timed = WORKLOADS[name].timed
    sides: list[Bare | Ours] = [base(), ours()]
    times: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        for side, seconds in zip(sides, times, strict=True):
            start = time.perf_counter()
            side.stretch(timed)
            if repeat:
                seconds.append((time.perf_counter() - start) / timed)
    for side in sides:
        side.close()
    return statistics.median(times[0]), statistics.median(times[1])


def cpu_name() -> str:
    """Return the processor's name from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((s.partition(":")[2].strip() for s in lines if s.startswith("model name")), platform.processor())


def machine() -> str:
    """Return date, processor, torch threads and torch version, on which seconds depend."""
    threads = f"{torch.get_num_threads()} torch thread a process"
    return f"{date.today()}, {cpu_name()}, {threads}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="W", help="W1, W2, W3")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON, as the last line")
    parser.add_argument("--repeats", type=int, default=9, help="timed stretches of each side")
    parser.add_argument(
        "--transport", default="auto", help="messages to two actors: auto, fast (sockets) or calls (of Ray)"
    )
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    print(machine())
    print("| workload | bare, 1 process | serial | ratio | bare, 2 processes | 2 actors | ratio |\n" + 7 * "|---" + "|")
    ratios = {}
    for name in options.workloads:
        bare, serial = compare(name, partial(Bare, name, 1), partial(Ours, name, None), options.repeats)
        bare_pair, actors = compare(
            name, partial(Bare, name, 2), partial(Ours, name, 2, transport=options.transport), options.repeats
        )
        ratios[name] = {"serial": round(serial / bare, 3), "actors2": round(actors / bare_pair, 3)}
        print(f"| {name} | {bare:.4f} s | {serial:.4f} s | {serial / bare:.2f} | {bare_pair:.4f} s | {actors:.4f} s "
              f"| {actors / bare_pair:.2f} |", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    sys.exit(main())
