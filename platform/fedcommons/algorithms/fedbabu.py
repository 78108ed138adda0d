"""FedBABU: clients train and share the body below the untrained head; each client fine-tunes the model for itself.

Oh et al., "FedBABU: Toward enhanced representation for federated image classification", ICLR 2022, arXiv:2106.06042,
algorithm 1.   x: body, on the server;  h: head at its initial values, which never changes in training and is equal for
all clients;  y_i: client i's body after local SGD started at x;  w_i: client i's weight.

    y_i = local SGD on f_i(x, h) over x;   x <- x + sum_i w_i (y_i - x) / sum_i w_i

Client i's personal model is (x, h) after ``tune_epochs`` epochs of local SGD on client i's examples. The client
fine-tunes at evaluation only and sends nothing, so this training has no noise and no entry in the privacy ledger. No
learning rate schedule applies to it.

The server has no trained head, so no server model is evaluated.

Departs from the paper: clients are weighted as in FedAvg. A step also computes the frozen layers' gradients, so
``client.clip_norm`` and DP-SGD clip the gradient of all layers.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from fedcommons.algorithms import partial_sharing
from fedcommons.algorithms.partial_sharing import freeze, personal_layers
from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.features import head_parameters
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat, put, select


@dataclass(frozen=True)
class FedBABU:
    """FedAvg on the body, below a head that stays at its initial values; personal models by fine-tuning.

    Raises:
        UserError: a pattern matches no layer, or ``layers`` is None and the model has no ``head``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    layers: str | None = None
    """head: name patterns such as network.last*, separated by commas; default: the model's head"""
    tune: Annotated[str, "all | head | body"] = "all"
    """layers that a client fine-tunes for its personal model"""
    tune_epochs: Annotated[int, "[1, 1e9]"] = 5
    """epochs of fine-tuning for a personal model, at evaluation"""

    down, merge, personal = partial_sharing.down, partial_sharing.merge, partial_sharing.personal
    effective_constants = partial_sharing.effective_constants

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return partial_sharing.initial_state(model, personal_layers(self, model, facts.head))

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "shared")
        head = [name for name in work.initial if name not in x.layout.parts]
        trained = work.local(put(work.initial, x), data, seed, add_to_grad=freeze(head))
        y = trained._replace(model=select(trained.model, x.layout.names))
        return weighted_reply(x, y, work.weight(data))

    def adapt(self, work: Work, model: Flat, data: ClientData, seed: int) -> Flat:
        chosen = personal_layers(self, model, head_parameters(work.module))
        head, body = ([name for name in model if (name in chosen) == is_head] for is_head in (True, False))
        frozen = {"all": [], "head": body, "body": head}[self.tune]
        loop = replace(work.loop, epochs=self.tune_epochs, dp=None)
        return loop.run(work, model, data, seed, add_to_grad=freeze(frozen)).model
