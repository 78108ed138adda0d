"""MOON: a contrastive loss pulls a client's features towards the server model's, away from its previous model's.

Li et al., "Model-contrastive federated learning", CVPR 2021, arXiv:2103.16257, equation 3 and algorithm 1.
z, z_glob, z_prev: features of a batch (the input of the module's ``head``) under the local model, the server model and
the client's model after its previous round;  mu: weight of the contrast;  T: temperature.

Departs from the paper: there is a projection head only if the network has one (``model.projection``). Server model and
previous model are evaluated in evaluation mode, without gradients. In a client's first round z_prev is of the initial
model.

The server's and the previous model stand still, so z_glob and z_prev of an image are kept from a client's first epoch
to its last. They are computed in each step with augmentation, where no image is seen twice; under DP-SGD, where an
example's gradient may depend on no other one; and with ``drop_last``, where a first epoch leaves images out. At mu = 0
they are not needed: it is FedAvg.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import Head
from fedcommons.core.local_training import Batch, LocalSGD
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, copy, flat


@dataclass(frozen=True)
class MOON:
    """Local loss CE + mu l_con;  l_con = -log(e^{s_glob/T} / (e^{s_glob/T} + e^{s_prev/T})), s cosine similarities."""

    watches_head = True

    mu: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of the contrastive loss, >= 0"""
    temperature: Annotated[float, "(0, 1e38]"] = 0.5
    """temperature of the contrastive loss, > 0"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields.get("model.name") == "linear" and not fields.get("model.projection"):
            raise UserError("model.name linear has no features for moon to compare; set model.projection or use cnn.")

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, module = flat(message.common, "model"), work.module
        head, own, n = Head(module), len(data.columns), len(data)
        server = {**x, **copy(work.buffers)}  # the server's buffers, before training moves them
        if memory:
            previous = {**flat(memory, "previous"), **flat(memory, "previous buffers")}
        else:
            previous = {**work.initial, **work.initial_buffers}

        def features(model: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
            module.eval()
            with torch.no_grad():
                functional_call(module, dict(model), (inputs,))
            module.train()
            return head.inputs

        kept: list[Tensor] = []  # z_glob and z_prev of the client's images, (n, ...)

        def of_both(inputs: Tensor, rows: Tensor | None, batch: int) -> list[Tensor]:
            if rows is not None and batch >= -(-n // work.loop.batch_size):  # the first epoch is over
                return [z[rows].flatten(0, 1) for z in kept]
            both = [features(model, inputs) for model in (server, previous)]
            if rows is not None:
                parts = [z.unflatten(0, (len(inputs), -1)) for z in both]  # an image may have several embeddings
                kept[:] = kept or [z.new_empty(n, *z.shape[1:]) for z in parts]
                for z, part in zip(kept, parts, strict=True):
                    z[rows] = part
            return both

        def loss(batch: Batch, number: int) -> Tensor:
            value = module.training_step(batch[:own], number)
            assert isinstance(value, Tensor)
            if self.mu == 0:
                return value
            z = head.inputs
            others = of_both(batch[0], batch[own] if keeps else None, number)
            s = [F.cosine_similarity(z, other) for other in others]
            contrast = F.softplus((s[1] - s[0]) / self.temperature)  # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
            weighted = contrast * batch[2] if own > 2 else contrast
            return value + self.mu * weighted.mean()

        if keeps := _keeps(work.loop):
            data = replace(data, beside=(torch.arange(n, device=data.y.device),))
        with head.watched():
            trained = work.local(x, data, seed, loss=loss)
        memory = {"previous": work.snapshot(), "previous buffers": copy(work.buffers)}
        return weighted_reply(x, trained, work.weight(data), memory=memory)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": weighted_mean(flat(state, "model"), total, replies)}

    def pieces(self, facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int]) -> Mapping[str, float]:
        """Images whose features under the two models that stand still are computed."""
        passes = (self.mu > 0) * (1 if _keeps(loop) else loop.epochs)
        return {"features": passes * sum(facts.sizes[i] for i in clients)}

    def smaller(self, times: int) -> Sequence[tuple["MOON", int]]:
        """On as many images, without their features and with them."""
        return [(type(self)(mu=0.0), 32 * times), (type(self)(), 32 * times)]


def _keeps(loop: LocalSGD) -> bool:
    """Whether features are kept from a client's first epoch to its last."""
    return loop.epochs > 1 and not (loop.augment or loop.dp or loop.drop_last)
