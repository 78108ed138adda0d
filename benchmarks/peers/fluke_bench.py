# pyright: reportMissingImports=false
"""W1, W2 and W3 with fluke's FedAVG: fluke_bench.py W1 [check], with peerbench's folder, of work.py, in PYTHONPATH.

One process: fluke trains clients in several only on several GPUs (``fluke.distr``). The work is that of the bare loop,
in the same order: batches are not shuffled, clients are those of the schedule and weigh alike. What a user gets by
default stays: models stay in memory, each client that took part keeps its model and optimiser, a model is copied for
each message and the loss is read after each step. Evaluation is off and there is no logger. fluke's progress bars
cannot be switched off; where the output is a file they draw nothing.

The clock stops at the end of each round, before fluke hands the last model to all clients. With ``check`` all is in
float64, where rounding switches no ReLU; then the bare loop runs, and the largest difference of a weight is reported.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from fluke import DDict, FlukeENV, __version__
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from torch import nn
from work import W, data, local_train, make_model, report, schedule

torch.set_num_threads(1)
workload, checked = sys.argv[1], sys.argv[2:] == ["check"]
if checked:
    torch.set_default_dtype(torch.float64)
size = W[workload]
x, y = data(workload)
joining = iter(schedule(workload))
ends: list[float] = []


class Scheduled(Server):
    """fluke's server, with the clients of the schedule in place of random ones."""

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return [self.clients[i] for i in next(joining)]


class Timed(FedAVG):
    """fluke's FedAvg, with that server."""

    def get_server_class(self) -> type[Server]:
        return Scheduled


class Clock(FederationObserver):
    """When rounds ended."""

    def end_round(self, round: int) -> None:
        ends.append(time.time())


def difference(model: nn.Module) -> float:
    """Largest difference of a weight from the bare loop's."""
    bare = make_model(workload)
    for ids in schedule(workload):
        start = {name: value.clone() for name, value in bare.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for i in ids:
            bare.load_state_dict(start)
            local_train(bare, x[i], y[i], size)
            for name, value in bare.state_dict().items():
                total[name] += value
        bare.load_state_dict({name: value / len(ids) for name, value in total.items()})
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


FlukeENV().set_eval_cfg(server=False)
loaders = [FastDataLoader(x[i], y[i], num_labels=10, batch_size=size["batch"]) for i in range(size["clients"])]
container = DummyDataContainer(loaders, [None] * len(loaders), None, num_classes=10)
client = {
    "batch_size": size["batch"], "local_epochs": size["epochs"], "loss": "CrossEntropyLoss",
    "optimizer": {"name": "SGD", "lr": size["lr"]}, "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
}  # fmt: skip
settings = DDict(model=make_model(workload), client=client, server={"weighted": False})
algorithm = Timed(len(loaders), DataSplitter(container), settings)
algorithm.set_callbacks(Clock())
began = time.time()
algorithm.run(size["rounds"], size["per_round"] / size["clients"])
rounds = [end - start for start, end in zip([began, *ends], ends, strict=False)]
more: dict[str, Any] = {"version": __version__}
if checked:
    more["difference"] = difference(algorithm.server.model)
report("fluke", workload, began, rounds, algorithm.server.model, **more)
