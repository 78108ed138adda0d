"""FedRep: each client trains a personal head on the shared body, then the body below the frozen head.

Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021, arXiv:2102.07078,
algorithm 1. In the symbols of ``partial_sharing.py``, x is the body (the paper's phi) and h_i client i's head.

    h_i <- local SGD on f_i(x, h_i) over h_i;   y_i = local SGD on f_i(x, h_i) over x;   x <- weighted mean of y_i

f_i: client i's loss. The head takes ``head_epochs`` epochs, the body ``client.epochs`` epochs on other batches.

Departs from the paper: clients are weighted as in FedAvg. A step also computes the frozen layers' gradients, so
``client.clip_norm`` and DP-SGD clip the gradient of all layers. Under DP-SGD the privacy ledger charges both trainings,
though h_i stays with the client, because y_i depends on h_i. Both trainings update BatchNorm's statistics.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from fedcommons.algorithms import partial_sharing
from fedcommons.algorithms.partial_sharing import freeze
from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat, put, select
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class FedRep:
    """FedAvg on the body; each client keeps its head, which it trains first in each round, with the body frozen.

    If the head contains all layers, clients train alone.

    Raises:
        UserError: a pattern matches no layer, or ``layers`` is None and the model has no ``head``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True, trains_twice=True)

    layers: str | None = None
    """head: name patterns such as network.last*, separated by commas; default: the model's head"""
    head_epochs: Annotated[int, "[1, 1e9]"] = 10
    """epochs of the head in a round, before client.epochs epochs of the body"""

    down, merge, personal = partial_sharing.down, partial_sharing.merge, partial_sharing.personal
    effective_constants = partial_sharing.effective_constants

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return partial_sharing.initial_state(model, partial_sharing.personal_layers(self, model, facts.head))

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "shared")
        start = put(work.initial, x)
        start = put(start, flat(memory, "own")) if memory else start
        head = [name for name in start if name not in x.layout.parts]
        loop = replace(work.loop, epochs=self.head_epochs)
        first = loop.run(work, start, data, seed_for(seed, "head"), add_to_grad=freeze(x.layout.names))
        h = select(first.model, head)
        trained = work.local(put(start, h), data, seed, add_to_grad=freeze(head))
        y = trained._replace(model=select(trained.model, x.layout.names))
        reply = weighted_reply(x, y, work.weight(data), memory={"own": h})
        metrics = {**reply.metrics, "head_loss": first.metrics["loss"]}
        return replace(reply, metrics=metrics, releases=[*reply.releases, first.spent.with_names("delta")])
