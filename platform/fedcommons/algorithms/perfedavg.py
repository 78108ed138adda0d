"""Per-FedAvg, first order: the server model is a start from which a gradient step leads to a good personal model.

Fallah et al., "Personalized federated learning with theoretical guarantees: A model-agnostic meta-learning approach",
NeurIPS 2020, arXiv:2002.07948, algorithm 1, variant FO (section 5).   w: client i's copy of the server model x;  f_i:
client i's loss;  D, D': two batches of a local step;  alpha: inner learning rate;  beta: ``client.lr``.

    u = w - alpha grad f_i(w; D);   w <- w - beta grad f_i(u; D');   x <- weighted mean of w

The exact method multiplies the last gradient by I - alpha Hess f_i(w); the first-order variant leaves it out. Client
i's personal model is x - alpha grad f_i(x) over all examples of client i, repeated ``adapt_steps`` times. It is
computed at evaluation only and sends nothing, so it has no noise and no entry in the privacy ledger.

Departs from the paper: D and D' are the halves (every second example) of one batch of ``client.batch_size`` examples,
in random order, so an epoch has as many steps as FedAvg's. A batch of one example is both D and D', as is each example
under DP-SGD. The engine's optimizer takes the step of w. alpha does not follow the learning rate schedule. Both steps
update BatchNorm's statistics. (PFLlib's inner rate is the outer rate.)
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Message, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import Batch
from fedcommons.core.step_gradients import gradient_at, with_gradient
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, add, flat
from fedcommons.seeding import numpy_generator


@dataclass(frozen=True)
class PerFedAvg:
    """Local step w <- w - beta grad f_i(w - alpha grad f_i(w; D); D');  the server averages the clients' w.

    f_i: client i's loss, which ``train/loss`` reports after the inner step;  D, D': halves of the step's batch.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    alpha: Annotated[float, "[0, 1e38]"] = 0.05
    """alpha, learning rate of the inner step and of the steps to a personal model; 0: FedAvg on half batches"""
    adapt_steps: Annotated[int, "[0, 1e9]"] = 1
    """gradient steps on all of a client's examples from the server model to the personal model, at evaluation"""

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")

        def meta_loss(batch: Batch, step: int) -> Tensor:
            first, n = int(numpy_generator(seed, "halves", step).integers(2)), len(batch[1])
            inner, outer = (slice(first, n, 2), slice(1 - first, n, 2)) if n > 1 else (slice(n), slice(n))
            _, gradient = gradient_at(work, work.params, tuple(t[inner] for t in batch), step)
            adapted = add(work.params, gradient, -self.alpha)
            return with_gradient(work, *gradient_at(work, adapted, tuple(t[outer] for t in batch), step))

        return weighted_reply(x, work.local(x, data, seed, loss=meta_loss), work.weight(data))

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {"model": message.common["model"]}

    def adapt(self, work: Work, model: Flat, data: ClientData, seed: int) -> Flat:
        for _ in range(self.adapt_steps):
            model = add(model, work.gradient(model, data), -self.alpha)
        return model
