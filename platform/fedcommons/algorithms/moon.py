"""MOON: a contrastive loss pulls a client's features towards the server model's, away from its previous model's.

Li et al., "Model-contrastive federated learning", CVPR 2021, arXiv:2103.16257, equation 3 and algorithm 1.
z, z_glob, z_prev: features of a batch (the input of the module's ``head``) under the local model, the server model and
the client's model after its previous round;  mu: weight of the contrast;  T: temperature.

Departs from the paper: there is a projection head only if the network has one (``model.projection``). Server model and
previous model are evaluated in evaluation mode, without gradients. In a client's first round z_prev is of the initial
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.executor import Executor
from fedcommons.core.features import Head
from fedcommons.core.local import Batch
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.tensors import Flat, Payload, copy, flat


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
        head = Head(module)
        buffers = copy(work.buffers)  # the server's, before training moves them
        server = {**x, **buffers}
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

        def loss(batch: Batch, step: int) -> Tensor:
            value = module.training_step(batch, step)
            assert isinstance(value, Tensor)
            z = head.inputs
            s = [F.cosine_similarity(z, features(model, batch[0])) for model in (server, previous)]
            contrast = F.softplus((s[1] - s[0]) / self.temperature)  # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
            weighted = contrast * batch[2] if len(batch) > 2 else contrast
            return value + self.mu * weighted.mean()

        with head.watched():
            trained = work.local(x, data, seed, loss=loss)
        kept = {"previous": work.snapshot(), "previous buffers": copy(work.buffers)}
        return weighted_reply(x, trained, work.weight(data), memory=kept)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": weighted_mean(flat(state, "model"), total, replies)}
