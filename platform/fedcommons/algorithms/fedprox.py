"""FedProx: FedAvg with a proximal term that keeps clients near the server model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, arXiv:1812.06127, algorithm 2. x: server
model;  y_i: client i's model, trained by SGD from x on f_i(y) + (mu/2) ||y - x||^2;  f_i: client i's loss;  mu >= 0:
strength of the proximal term. The new x is the weighted mean of the y_i, as in FedAvg.

Departs from the paper: all clients have the same probability of selection. As in the paper (gamma-inexact solutions),
the server uses the partial work of stragglers, unless ``straggler.partial`` is drop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Message, Reply
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import Correction
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Payload, flat


@dataclass(frozen=True)
class FedProx:
    """Local loss f_i(y) + (mu/2) ||y - x||^2;  x <- x + sum_i w_i (y_i - x) / sum_i w_i.

    x: server model;  y_i: client i's model;  f_i: client i's loss, which ``train/loss`` reports without the proximal
    term; w_i: client i's weight.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True, takes_partial=True)

    mu: Annotated[float, "[0, 1e38]"] = 0.01
    """mu, weight of the proximal term (mu/2) ||y - x||^2 between local model y and server model x, >= 0"""

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        trained = work.local(x, data, seed, add_to_grad=Correction(self.pull, (x,)))
        return weighted_reply(x, trained, work.weight(data))

    def pull(self, params: Mapping[str, nn.Parameter], x: Mapping[str, Tensor]) -> None:
        """Add the proximal term's gradient mu (y - x) to the gradients; y: the client's current weights."""
        for name, y in params.items():
            if y.grad is not None:
                y.grad.add_(y.detach() - x[name], alpha=self.mu)
