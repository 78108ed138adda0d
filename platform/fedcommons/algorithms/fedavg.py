"""FedAvg: clients train, the server averages.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
arXiv:1602.05629, algorithm 1.

Departs from the paper: every drawn client weighs the same by default (Fedssyn); ``weighting="samples"`` is the paper's.
"""

from dataclasses import dataclass

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.local import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, flat, scale, sub


@dataclass(frozen=True)
class FedAvg:
    """x <- x + sum_i w_i (y_i - x) / sum_i w_i,  y_i from local SGD started at x;  w_i = 1 or n_i."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, w = flat(message.common, "model"), work.weight(data)
        y, metrics, spent = work.local(x, data, seed)
        return Reply({"delta": scale(sub(y, x), w)}, weight=w, metrics=metrics, releases=[spent.of("delta")])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "delta"), 1 / sum(r.weight for r in replies.values()))}
