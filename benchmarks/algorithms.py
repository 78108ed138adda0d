"""Seconds per round of every algorithm, compared with FedAvg's; rounds are interleaved in one process.

python benchmarks/algorithms.py [W1 W2] [--json] [--repeats 7] [--only fedgen,moon]

W1: small CNN, 10 of 100 clients x 15 steps per round. W2: VGG-11, 10 clients x 2 steps of 64 examples. Evaluation and
tracking are not timed. Goals, as ratios to FedAvg: fedprox, fednova 1.1; scaffold, fedpvr, feddyn 1.25; moon 2.1, as it
computes features of two further models; fedmix 3.2; feddpms (first stage) 1.1 times fedvae, as both train an
autoencoder; fedgen 1.3 without most steps of its server, that is with one step instead of fifty ("fedgen, one step of
its server"). benchmarks/feddm.py and benchmarks/distillation.py time FedDM, DENSE and Co-Boosting, whose work differs;
one_shot, fedddpm and fedcvae train at the server.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial

import numpy as np
import torch
from round_time import WORKLOADS, cpu_name, examples, network

from fedcommons.algorithms.fedmix import mean_images
from fedcommons.config import registry
from fedcommons.config.registry import KINDS
from fedcommons.core.algorithm import Facts
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import Work
from fedcommons.core.features import batch_norm_parameters, head_parameters
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import RunData, Worker, default_device
from fedcommons.data.clients import Clients
from fedcommons.federation import rounds
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from lightning_modules import Classifier, vae

CONSTANTS = {"fedgen, one step of its server": {"iterations": 1}}
"""Constants of methods that are timed a second time, by the label of that row."""

OTHER_WORK = ("feddm", "fedlap", "dense", "coboosting", "one_shot", "fedddpm", "fedcvae", "feddf")
"""Methods that do not run local steps of SGD in each round, and are not timed here."""


def course(name: str, algorithm_name: str) -> Iterator:
    """Return an endless iterator that runs one round of the algorithm on a workload per item."""
    w = WORKLOADS[name]
    rows = np.arange(w.clients * w.per_client).reshape(w.clients, w.per_client)
    clients = Clients(examples(w), list(rows))
    clients = clients.with_commons(mean_images(clients, 64, 10, 0))
    algorithm = registry.make("algorithm", algorithm_name.partition(",")[0], CONSTANTS.get(algorithm_name, {}))
    module = Classifier(network(name), lr=w.lr)
    module.head = [layer for layer, submodule in module.named_modules() if isinstance(submodule, torch.nn.Linear)][-1]
    if capabilities_of(algorithm).needs:  # methods that need an autoencoder are compared only with each other
        module = vae(tuple(clients.store.x.shape[1:]), 10, w.lr, 0.0, 0.0, "sgd", latent=64)
    work = Work(module, default_device(), LocalSGD(w.epochs, w.batch))
    executor = Serial(lambda data: Worker(work, algorithm, data), RunData(clients, clients, {}))
    arrival = [w.per_round / w.clients] * w.clients
    facts = Facts(
        w.clients, clients.sizes, 10**9, arrival=arrival, counts=partial(clients.counts, 10),
        n_classes=10, head=head_parameters(module), batch_norm=batch_norm_parameters(module),
    )  # fmt: skip
    start = Standing(0, algorithm.start(work.snapshot(), facts, 0))
    return rounds.run(algorithm, executor, Plan(facts, w.per_round / w.clients, 4, 0), start)


def measure(name: str, repeats: int, algorithms: Sequence[str]) -> dict[str, float]:
    """Return each algorithm's median seconds per round; rounds run in turns after two warm-up rounds.

    After the warm-up, the clients' memories exist.
    """
    courses = {algorithm: course(name, algorithm) for algorithm in algorithms}
    seconds: dict[str, list[float]] = {algorithm: [] for algorithm in courses}
    for repeat in range(repeats + 2):
        for algorithm, played in courses.items():
            start = time.perf_counter()
            next(played)
            if repeat >= 2:
                seconds[algorithm].append(time.perf_counter() - start)
    return {algorithm: statistics.median(s) for algorithm, s in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["W1", "W2"], metavar="W", help="W1, W2, W3")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON, as the last line")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds of each algorithm")
    parser.add_argument("--only", default="", help="algorithms beside fedavg, separated by commas; default: all")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}")
    names = (
        ["fedavg", *options.only.split(",")]
        if options.only
        else [n for n in KINDS["algorithm"].components if n not in OTHER_WORK]
    )
    chosen = [*names, *(n for n in CONSTANTS if n.partition(",")[0] in names)]
    torch.set_num_threads(1)
    print(f"{date.today()}, {cpu_name()}, one torch thread, torch {torch.__version__}")
    print("| workload | algorithm | seconds a round | ratio to fedavg |\n" + 4 * "|---" + "|")
    ratios: dict[str, dict[str, float]] = {}
    for name in options.workloads:
        seconds = measure(name, options.repeats, chosen)
        ratios[name] = {algorithm: round(s / seconds["fedavg"], 3) for algorithm, s in seconds.items()}
        for algorithm, s in seconds.items():
            print(f"| {name} | {algorithm} | {s:.4f} | {s / seconds['fedavg']:.2f} |", flush=True)
    if options.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    sys.exit(main())
