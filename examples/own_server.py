"""A user-defined method with jobs on the server: FedAvg whose server chooses its step size on validation examples.

x <- x + eta d.   x: server model;  d: the step of FedAvg;  eta: the step size with the lowest loss.

A job may read the server's data sets (``worker.data.sets``), but no client's data. Without validation examples, all
losses are 0, and eta is 1.

python examples/own_server.py         checks on a tiny federation that the method meets all requirements
python sweeps/run.py --algorithm examples/own_server.py:StepSearch --stepsearch.largest 4
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch.nn import functional as F

from fedcommons import Executor, Flat, Payload, Replies, State, add, check_algorithm, flat, sub
from fedcommons.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class StepSearch(FedAvg):
    """x <- x + eta d, with eta from 1, sqrt(largest) and largest."""

    largest: Annotated[float, "[1, 100]"] = 2.0
    """largest step size eta of the server"""

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> tuple[State, Mapping[str, float]]:
        x = flat(state, "model")
        delta = sub(flat(super().merge(executor, state, total, replies, round, seed), "model"), x)
        steps = [1.0, self.largest**0.5, self.largest]
        losses = executor.map(loss_at, {"model": x, "delta": delta}, steps)  # one job per step size
        eta = steps[losses.index(min(losses))]
        return {"model": add(x, delta, eta)}, {"step": eta}  # each round records the metric server/step


def loss_at(worker: Any, shared: Mapping[str, Flat], eta: float) -> float:
    """Return the validation loss of x + eta delta; a worker runs this job."""
    examples, module = worker.data.sets.get("validation"), worker.work.module
    if not examples:
        return 0.0
    worker.work.load(add(shared["model"], shared["delta"], eta))
    module.eval()
    with torch.no_grad():
        return float(F.cross_entropy(module(examples.x), examples.y))


if __name__ == "__main__":
    check_algorithm(StepSearch())
    print("StepSearch keeps every promise of a method.")
