"""FedNova: normalised averaging, so that clients with more local steps do not count more.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020,
arXiv:2007.07481, equation 11 with the effective steps tau_eff = sum_i w_i a_i.   x: server model;  y_i: client
i's model after K steps;  r: momentum;  w_i: client i's weight, with sum_i w_i = 1 over the round;  a_i: normaliser of
client i's update (``normaliser``).

Departs from the paper: nothing known. Weight decay is part of the loss and does not change a_i, as in NIID-Bench.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.scaffold import require_sgd
from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.averaging import summed_weight
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Payload, add, flat, scalar, scale, sub


@dataclass(frozen=True)
class FedNova:
    """x <- x - (sum_i w_i a_i) (sum_i w_i d_i), with normalised client updates d_i = (x - y_i)/a_i.

    x: server model;  y_i: client i's model after its local steps;  w_i: its weight, with sum_i w_i = 1;  a_i: its
    normaliser, see ``normaliser``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True)

    def check(self, fields: Mapping[str, Any]) -> None:
        require_sgd("fednova", fields, momentum=True)

    start, down = FedAvg.start, FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, w = flat(message.common, "model"), work.weight(data)
        _, momentum = work.sgd("FedNova", momentum=True)
        y, metrics, spent = work.local(x, data, seed)
        a = normaliser(int(metrics["steps"]), momentum)
        sums = {"d": scale(sub(x, y), w / a), "a": torch.tensor(w * a, dtype=torch.float64)}
        return Reply(sums, weight=w, metrics=metrics, releases=[spent.with_names(*sums)])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        weights = summed_weight(replies)
        effective = scalar(total, "a") / weights
        return {"model": add(flat(state, "model"), flat(total, "d"), -effective / weights)}


def normaliser(steps: int, momentum: float) -> float:
    """Return the normaliser a of K local steps with momentum r:  a = [K - r (1 - r^K)/(1 - r)]/(1 - r).

    a is the sum of the weights with which the K gradients enter the local update; it is K without momentum.
    """
    r = momentum
    return (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
