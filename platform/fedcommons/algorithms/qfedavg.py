"""q-FedAvg: fair federated learning, in which clients with a larger loss count more.

Li, Sanjabi, Beirami and Smith, "Fair resource allocation in federated learning", ICLR 2020, arXiv:1905.10497,
algorithm 2 for the q-FFL objective, min_x sum_i p_i F_i(x)^(q+1)/(q+1).   x: server model;  y_i: client i's model after
local SGD with learning rate eta from x;  F_i: client i's mean loss;  L = 1/eta;  w_i: client i's weight.

    Delta_i = F_i(x)^q L (x - y_i);   h_i = q F_i(x)^(q-1) ||L (x - y_i)||^2 + L F_i(x)^q
    x <- x - sum_i w_i Delta_i / sum_i w_i h_i

Clients send w_i Delta_i / L and w_i h_i / L, as the factor 1/L cancels; so q = 0 is FedAvg. F_i is computed in
evaluation mode without augmentation, on all training data of the client, and is at least 1e-10.

F_i depends on private data without noise. So under DP-SGD the privacy ledger lists the reply as uncovered.

Departs from the paper: clients are sampled uniformly, and p_i is the weight w_i (1, or the number of examples with
``--federation.weighting samples``); in the paper, p_i is the probability that client i is sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.ifca import mean_loss
from fedcommons.algorithms.scaffold import require_sgd
from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Payload, add, flat, scalar, scale, sub
from fedcommons.privacy.release import Release


@dataclass(frozen=True)
class QFedAvg:
    """x <- x - sum_i w_i Delta_i / sum_i w_i h_i, with updates Delta_i that grow with client i's loss F_i(x)^q.

    x: server model;  w_i: client i's weight. With q = 0 this is FedAvg.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True)

    q: Annotated[float, "[0, 10]"] = 1.0
    """fairness: 0 is FedAvg; a larger q gives more weight to clients with a large loss"""

    def check(self, fields: Mapping[str, Any]) -> None:
        require_sgd("qfedavg", fields, momentum=True)

    start, down = FedAvg.start, FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, w, q = flat(message.common, "model"), work.weight(data), self.q
        eta, _ = work.sgd("QFedAvg", momentum=True)
        f = max(float(mean_loss(work, x, data, seed)), 1e-10)
        y, metrics, _ = work.local(x, data, seed)
        delta = sub(x, y)
        h = f**q + q * f ** (q - 1) * float(delta.buffer.double().square().sum()) / eta
        sums = {"Delta": scale(delta, w * f**q), "h": torch.tensor(w * h, dtype=torch.float64)}
        release = Release(what=tuple(sums), reason="the weight of the update is a loss without noise")
        return Reply(sums, weight=w, metrics=metrics, releases=[release])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "Delta"), -1 / scalar(total, "h"))}
