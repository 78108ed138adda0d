"""MOON: a contrastive loss pulls a client's features towards the server model's and away from its previous model's.

Li et al., "Model-contrastive federated learning", CVPR 2021, arXiv:2103.16257, equation 3 and algorithm 1. z, z_glob,
z_prev: features of a batch (the input of the module's ``head``) under the local model, the server model and the
client's model after its previous round;  mu: weight of the contrastive loss l_con;  T: temperature.

Departs from the paper: there is a projection head only if the network has one (``model.projection``). The client
computes z_glob and z_prev in evaluation mode, without gradients. In a client's first round, the initial model gives
z_prev.

The server model and the previous model do not change during local training. So the client caches z_glob and z_prev of
each image in its first epoch. In three cases the client computes both in each step instead: with augmentation, which
never repeats an image; with DP-SGD, where an example's gradient may not depend on other examples; and with
``drop_last``, where the first epoch leaves images out. At mu = 0 the client computes neither: MOON is FedAvg.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Message, Reply
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.features import Head
from fedcommons.core.local_training import Batch
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Payload, copy, flat


@dataclass(frozen=True)
class MOON:
    """Local loss CE + mu l_con, with contrastive loss l_con = -log(e^{s_glob/T} / (e^{s_glob/T} + e^{s_prev/T})).

    CE: cross entropy;  s_glob, s_prev: cosine similarity of an image's features under the local model to those under
    the server model and under the client's previous model;  T: ``temperature``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True, watches_head=True)

    mu: Annotated[float, "[0, 1e38]"] = 1.0
    """mu, weight of the contrastive loss, >= 0"""
    temperature: Annotated[float, "(0, 1e38]"] = 0.5
    """T, temperature of the contrastive loss, > 0"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields.get("model.name") == "linear" and not fields.get("model.projection"):
            raise UserError("model.name linear has no features for moon to compare; set model.projection or use cnn.")

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, module, loop = flat(message.common, "model"), work.module, work.loop
        head, n_columns, n = Head(module), len(data.columns), len(data)
        server = {**x, **copy(work.buffers)}  # a copy, as training changes work.buffers
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

        cached: list[Tensor] = []  # z_glob and z_prev of the client's n images, each (n, ...)

        def reference_features(inputs: Tensor, rows: Tensor | None, batch: int) -> list[Tensor]:
            if rows is not None and batch * loop.batch_size >= n:  # after the first epoch, all images are cached
                return [z[rows].flatten(0, 1) for z in cached]
            both = [features(model, inputs) for model in (server, previous)]
            if rows is not None:
                parts = [z.unflatten(0, (len(inputs), -1)) for z in both]  # one row per image, with all its embeddings
                cached[:] = cached or [z.new_empty(n, *z.shape[1:]) for z in parts]
                for z, part in zip(cached, parts, strict=True):
                    z[rows] = part
            return both

        def loss(batch: Batch, number: int) -> Tensor:
            value = work.loss(batch[:n_columns], number)
            if self.mu == 0:
                return value
            z = head.inputs
            others = reference_features(batch[0], batch[n_columns] if keeps else None, number)
            s = [F.cosine_similarity(z, other) for other in others]
            contrast = F.softplus((s[1] - s[0]) / self.temperature)  # -log(e^a/(e^a + e^b)) with a = s[0]/T, b = s[1]/T
            weighted = contrast * batch[2] if n_columns > 2 else contrast
            return value + self.mu * weighted.mean()

        if keeps := loop.epochs > 1 and not (loop.augment or loop.dp or loop.drop_last):
            data = replace(data, extra_columns=(torch.arange(n, device=data.y.device),))
        with head.watched():
            trained = work.local(x, data, seed, loss=loss)
        memory = {"previous": work.snapshot(), "previous buffers": copy(work.buffers)}
        return weighted_reply(x, trained, work.weight(data), memory=memory)
