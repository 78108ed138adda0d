"""CPU seconds per round with clients trained at once (``client.batched``) and one after another, in turns.

python benchmarks/batched.py [--repeats 5]

Workloads: ten clients of 120 digits with the CNN of preset small, one epoch, batch size B = 10 and 32; W1 and W3 of
``round_time.py``. One process with one torch thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from round_time import WORKLOADS, examples, machine, network

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config.presets import experiment
from fedcommons.core.algorithm import Facts
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.federation import rounds
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.runs.build import build, module_of
from lightning_modules import Classifier


def course(name: str, blocks: int, *, batched: bool) -> Iterator[object]:
    """Return an endless iterator that runs one round of FedAvg per item, without evaluation.

    name: a workload of ``round_time.py`` or ``digits, B = 10``; blocks: number of blocks of clients in a round.
    """
    if name in WORKLOADS:
        w = WORKLOADS[name]
        rows = np.arange(w.clients * w.per_client).reshape(w.clients, w.per_client)
        clients, share = Clients(examples(w), list(rows)), w.per_round / w.clients
        module = Classifier(network(name), lr=w.lr)
        loop = LocalSGD(w.epochs, w.batch, batched=batched)
    else:
        config = experiment("small", "digits")
        dataset = build(config).dataset
        rows = np.arange(1200).reshape(10, 120)
        clients, share, module = Clients(dataset.train, list(rows)), 1.0, module_of(config)(dataset)
        loop = LocalSGD(1, int(name.split()[-1]), onednn=False, batched=batched)
    data = RunData(clients, clients, {})
    work = Work(module, torch.device("cpu"), loop)
    facts = Facts(len(rows), clients.sizes, 10**9)
    start = Standing(0, FedAvg().start(work.snapshot(), facts, 0))
    return rounds.run(
        FedAvg(), Serial(lambda _: Worker(work, FedAvg(), data), data), Plan(facts, share, blocks, 0), start
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="timed stretches of each side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{machine()}\n| workload | clients in a block | one after another, s | at once, s | ratio |\n"
        + 5 * "|---"
        + "|"
    )
    for name, blocks, n in (
        ("digits, B = 10", 1, 10), ("digits, B = 10", 4, 2.5), ("digits, B = 32", 1, 10), ("W1", 1, 10), ("W3", 4, 25),
        ("W3", 1, 100),
    ):  # fmt: skip
        sides = [course(name, blocks, batched=batched) for batched in (False, True)]
        seconds: list[list[float]] = [[], []]
        for repeat in range(options.repeats + 1):
            for side, times in zip(sides, seconds, strict=True):
                began = time.process_time()
                for _ in range(5):
                    next(side)
                if repeat:
                    times.append((time.process_time() - began) / 5)
        serial, batched = map(statistics.median, seconds)
        print(f"| {name} | {n:g} | {serial:.4f} | {batched:.4f} | {batched / serial:.2f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
