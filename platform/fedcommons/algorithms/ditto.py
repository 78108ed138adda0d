"""Ditto: each client has a model of its own beside the server's, and is pulled towards it.

Li et al., "Ditto: Fair and robust federated learning through personalization", ICML 2021, arXiv:2012.04221,
algorithm 1.   x: server model, by FedAvg;  y_i: client i's model after local SGD started at x;  v_i: its own model;
f_i: its loss;  lam: strength of the pull, >= 0.

    x <- x + sum_i w_i (y_i - x) / sum_i w_i;   v_i <- v_i - eta (grad f_i(v_i) + lam (v_i - x)),  K steps

lam = 0: each client trains alone. The larger lam, the nearer is v_i to the server model.

Departs from the paper: v_i begins at the server model of the client's first round, which is also what a client has that
has not taken part yet; in the paper at the untrained model. v_i makes as many steps as y_i, on batches of its own, with
BatchNorm statistics of its own. Under DP-SGD both trainings are charged, though v_i stays with the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import nn

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, copy, flat
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class Ditto:
    """FedAvg, and for each client min_v f_i(v) + (lam/2) ||v - x||^2 by local SGD from its last v_i."""

    trains_twice = True

    lam: Annotated[float, "[0, 1e38]"] = 0.1
    """lambda, weight of the pull (lambda/2) ||v - x||^2 of a personal model towards the server model, >= 0"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        server = copy(work.buffers)
        reply = weighted_reply(x, work.local(x, data, seed), work.weight(data))
        after = copy(work.buffers)  # of y_i: these are the engine's
        work.load_buffers(flat(memory, "statistics") if memory else server)
        anchors = dict(x)

        def pull(params: Mapping[str, nn.Parameter]) -> None:
            for name, v in params.items():
                if v.grad is not None:
                    v.grad.add_(v.detach() - anchors[name], alpha=self.lam)

        own = work.local(flat(memory, "own") if memory else x, data, seed_for(seed, "personal"), add_to_grad=pull)
        kept = {"own": copy(own.model), "statistics": copy(work.buffers)}
        work.load_buffers(after)
        metrics = {**reply.metrics, "personal_loss": own.metrics["loss"]}
        releases = [*reply.releases, own.spent.of("delta")]
        return Reply(reply.sums, weight=reply.weight, memory=kept, metrics=metrics, releases=releases)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": weighted_mean(flat(state, "model"), total, replies)}

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        if not memory:
            return {"model": message.common["model"]}
        return {"model": memory["own"], "buffers": memory["statistics"]}
