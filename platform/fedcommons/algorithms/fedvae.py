"""FedVAE: FedAvg of a classifying autoencoder (encoder, decoder and classifier), without exchange of data.

It is FedDPMS without its second stage, a baseline of FedDPMS's paper (Chen and Vikalo, "Federated learning in non-IID
settings aided by differentially private synthetic data", arXiv:2206.00686).   x: server model;  y_i: client i's model,
trained on the joint loss;  w_i: client i's weight;  n_i: number of client i's examples.

Departs from the paper: ``federation.weighting`` sets the clients' weights; the paper uses samples. By default the
learning rate does not decay, as in the released code. The paper halves the learning rate every 10 epochs, so the last
of its 50 rounds of 5 epochs would use 2^-24 of the initial learning rate.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.latents import AUTOENCODER, decayed
from fedcommons.core.algorithm import Message, Reply
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Payload, flat


@dataclass(frozen=True)
class FedVAE:
    """FedAvg of encoder, decoder and classifier, trained on their joint loss.

    x <- x + sum_i w_i (y_i - x) / sum_i w_i.  x: server model;  y_i: client i's model;  w_i: client i's
    weight, 1 or number of examples.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True, needs=AUTOENCODER)

    decay: Annotated[float, "(0, 1]"] = 1.0
    """factor by which the learning rate is multiplied after every 10 local epochs (paper: 0.5)"""

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        trained = work.local(x, data, seed, lr=decayed(work, self.decay, round))
        return weighted_reply(x, trained, work.weight(data))
