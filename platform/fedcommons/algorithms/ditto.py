"""Ditto: each client trains a personal model, which a proximal term pulls towards the server model.

Li et al., "Ditto: Fair and robust federated learning through personalization", ICML 2021, arXiv:2012.04221,
algorithm 1.   x: server model, by FedAvg;  y_i: client i's model after local SGD started at x;  v_i: client i's
personal model; f_i: client i's loss;  w_i: client i's weight;  eta: learning rate;  K: number of local steps;  lam:
strength of the proximal term, >= 0.

    x <- x + sum_i w_i (y_i - x) / sum_i w_i;   v_i <- v_i - eta (grad f_i(v_i) + lam (v_i - x)),  K steps

With lam = 0 each client trains v_i alone. A larger lam keeps v_i closer to the server model.

Departs from the paper: v_i starts at the server model of the client's first round; in the paper it starts at the
untrained model. A client that has not taken part yet is evaluated with the server model. v_i takes the same number of
steps as y_i, on other batches and with separate BatchNorm statistics. Under DP-SGD the privacy ledger charges both
trainings, though v_i stays with the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Message, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Payload, copy, flat
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class Ditto:
    """FedAvg trains the server model x, and each client i trains a personal model v_i near x.

    v_i <- argmin_v f_i(v) + (lam/2) ||v - x||^2 by local SGD, started at the client's last v_i.  f_i: client i's loss.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True, trains_twice=True)

    lam: Annotated[float, "[0, 1e38]"] = 0.1
    """lambda, weight of the proximal term (lambda/2) ||v - x||^2 between personal model v and server model x, >= 0"""

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        server = copy(work.buffers)
        reply = weighted_reply(x, work.local(x, data, seed), work.weight(data))
        after = copy(work.buffers)  # kept for the engine, which sends the statistics of y_i, not of v_i
        work.load_buffers(flat(memory, "statistics") if memory else server)
        anchors = dict(x)

        def pull(params: Mapping[str, nn.Parameter]) -> None:
            for name, v in params.items():
                if v.grad is not None:
                    v.grad.add_(v.detach() - anchors[name], alpha=self.lam)

        personal = work.local(flat(memory, "own") if memory else x, data, seed_for(seed, "personal"), add_to_grad=pull)
        new_memory = {"own": copy(personal.model), "statistics": copy(work.buffers)}
        work.load_buffers(after)
        metrics = {**reply.metrics, "personal_loss": personal.metrics["loss"]}
        releases = [*reply.releases, personal.spent.with_names("delta")]
        return Reply(reply.sums, weight=reply.weight, memory=new_memory, metrics=metrics, releases=releases)

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        if not memory:
            return {"model": message.common["model"]}
        return {"model": memory["own"], "buffers": memory["statistics"]}
