"""FedMix: mixup with the means of other clients' images, to first order, so that no image is shared singly.

Yoon et al., "FedMix: Approximation of mixup under mean augmented federated learning", ICLR 2021, arXiv:2107.00233,
equation 4 and algorithm 2.   x, y: an image as the network sees it and its label;  x_bar, y_bar: mean of M images of
one client and of their labels as frequencies;  lambda (``mix``): share of the mean;  u = (1 - lambda) x.

Departs from the paper: one mean is drawn for every step, of all means of all clients, the client's own included. The
algorithm box's extra factor (1 - lambda) on the last term is ``box=True``; equation 4, the default, has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.features import LastLayer
from fedcommons.core.local import Batch, LocalSGD, Work
from fedcommons.core.weighting import weight
from fedcommons.data.clients import ClientData
from fedcommons.seeds import generator
from fedcommons.tensors import Flat, Payload, add, flat, scale, sub


@dataclass(frozen=True)
class FedMix:
    """Loss (1 - lambda) CE(f(u), y) + lambda CE(f(u), y_bar) + lambda <grad_u CE(f(u), y), x_bar>, per example.

    The means are shared before the federation and stand in ``ClientData.commons`` (``sharing/means.py``). The module's
    ``training_step`` must be a cross entropy; its ``normalise`` brings images to what the network sees.

    Raises:
        ValueError: the clients hold no means.
    """

    local: LocalSGD
    weighting: str = "uniform"
    mix: float = 0.05
    box: bool = False

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        x, w, module = flat(message.common, "model"), weight(self.weighting, len(data)), work.module
        if data.commons is None:
            raise ValueError("FedMix needs the means that clients share before the federation (sharing/means.py)")
        means, mix = data.commons, self.mix

        def see(x: Tensor) -> Tensor:
            if data.x.is_floating_point():
                return x  # features that are floating already pass as they are
            return module.normalise(x)  # pyright: ignore[reportCallIssue]

        last = LastLayer(module)
        factor = mix * (1 - mix) if self.box else mix

        def loss(batch: Batch, step: int) -> Tensor:
            images, labels, *weights = batch
            j = int(torch.randint(len(means), (), generator=generator(seed, "means", step)))
            x_bar, y_bar = see(means.x[j]), means.y[j]
            u = ((1 - mix) * see(images)).requires_grad_()
            value = module.training_step((u, labels, *weights), step)  # CE(f(u), y), the mean over the batch
            assert isinstance(value, Tensor)
            of_mean = F.cross_entropy(last.outputs, y_bar.expand(len(labels), -1), reduction="none")
            of_mean = (of_mean * weights[0] if weights else of_mean).mean()
            (gradient,) = torch.autograd.grad(value, u, create_graph=True)
            return (1 - mix) * value + mix * of_mean + factor * (gradient * x_bar).sum()

        with last.watched():
            y, metrics = self.local.run(work, x, data, seed, loss=loss)
        return Reply({"delta": scale(sub(y, x), w)}, weight=w, metrics=metrics)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        return {"model": add(flat(state, "model"), flat(total, "delta"), 1 / sum(r.weight for r in replies))}
