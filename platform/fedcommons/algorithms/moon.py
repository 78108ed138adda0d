"""MOON: a contrastive loss draws a client's features to the server model's and off its own last ones.

Li et al., "Model-contrastive federated learning", CVPR 2021, arXiv:2103.16257, equation 3 and algorithm 1.
z, z_glob, z_prev: features of a batch (the input of the last linear layer) under the local model, the server model and
the client's model of its last round;  mu: weight of the contrast;  T: temperature.

Departs from the paper: no projection head unless the network has one (``model.projection``); server and previous model
look at the batch in evaluation mode, without gradients. At a client's first selection z_prev is the initial model's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.features import LastLayer
from fedcommons.core.local import Batch, LocalSGD, Work
from fedcommons.core.weighting import weight
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, copy, flat, scale, sub


@dataclass(frozen=True)
class MOON:
    """Local loss CE + mu l_con;  l_con = -log(e^{s_glob/T} / (e^{s_glob/T} + e^{s_prev/T})), s cosine similarities."""

    local: LocalSGD
    weighting: str = "uniform"
    mu: float = 1.0
    temperature: float = 0.5

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        x, w, module = flat(message.common, "model"), weight(self.weighting, len(data)), work.module
        last = LastLayer(module)
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
            return last.inputs

        def loss(batch: Batch, step: int) -> Tensor:
            value = module.training_step(batch, step)
            assert isinstance(value, Tensor)
            z = last.inputs
            s = [F.cosine_similarity(z, features(model, batch[0])) for model in (server, previous)]
            contrast = F.softplus((s[1] - s[0]) / self.temperature)  # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
            weighted = contrast * batch[2] if len(batch) > 2 else contrast
            return value + self.mu * weighted.mean()

        with last.watched():
            y, metrics = self.local.run(work, x, data, seed, loss=loss)
        kept = {"previous": work.snapshot(), "previous buffers": copy(work.buffers)}
        return Reply({"delta": scale(sub(y, x), w)}, weight=w, memory=kept, metrics=metrics)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        return {"model": add(flat(state, "model"), flat(total, "delta"), 1 / sum(r.weight for r in replies))}
