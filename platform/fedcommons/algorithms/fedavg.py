"""FedAvg: clients train the server model on their data, and the server averages the results.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
arXiv:1602.05629, algorithm 1.   x: server model;  y_i: client i's model after local training;  w_i: client i's weight;
n_i: number of client i's examples.

Departs from the paper: by default all selected clients have the same weight w_i = 1, as in Fedssyn. The paper has
``weighting="samples"``, that is w_i = n_i.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat


@dataclass(frozen=True)
class FedAvg:
    """The server averages the clients' models:  x <- x + sum_i w_i (y_i - x) / sum_i w_i.

    x: server model;  y_i: client i's model after local SGD from x;  w_i: client i's weight, 1 or number of examples.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    # ``self`` may be another class: other methods reuse these functions, as in ``start = FedAvg.start``.

    def start(self: object, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self: object, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(
        self: object, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int
    ) -> Reply:
        x = flat(message.common, "model")
        return weighted_reply(x, work.local(x, data, seed), work.weight(data))

    def merge(
        self: object, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> State:
        return {"model": weighted_mean(flat(state, "model"), total, replies)}
