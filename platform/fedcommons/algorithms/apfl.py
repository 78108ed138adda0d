"""APFL: each client mixes a local model with its copy of the server model, and trains both together.

Deng et al., "Adaptive personalized federated learning", 2020, arXiv:2003.13461, algorithm 1.   x: server model, by
FedAvg;  w: client i's copy of x, trained by local SGD;  v: client i's local model, in its memory;  alpha: client i's
mixture weight, in [0, 1];  u: the mixture;  f: client i's loss on the step's batch;  eta: ``client.lr``.

    u = alpha v + (1 - alpha) w;   w <- w - eta grad f(w);   v <- v - eta alpha grad f(u)

With ``adaptive``, each step also changes alpha by the gradient of f(u) with respect to alpha, within [0, 1]:

    alpha <- alpha - eta <v - w, grad f(u)>

All three steps use the values before the step. Client i's personal model is alpha v + (1 - alpha) x. With alpha = 0
this is FedAvg, with alpha = 1 each client trains v alone.

Departs from the paper: v starts at the server model of the client's first round. The authors' code adds 0.02 alpha to
the gradient of alpha; the paper and this file do not. (PFLlib takes the gradient at v in place of u, and stores u as
the next v.) u has separate BatchNorm statistics. ``client.clip_norm`` and ``client.weight_decay`` apply to v as to w.
Under DP-SGD the step of w is private; v and alpha, which no message depends on, are trained without noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Message, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import Batch
from fedcommons.core.step_gradients import gradient_at
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, copy, flat
from fedcommons.flat_tensors import data as values


@dataclass(frozen=True)
class APFL:
    """FedAvg trains the server model x; client i's personal model is the mixture alpha v_i + (1 - alpha) x.

    Each local step changes v_i by the gradient of client i's loss at the mixture of v_i and the client's copy of x.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    alpha: Annotated[float, "[0, 1]"] = 0.5
    """alpha, weight of the local model in the mixture; with adaptive, the initial value"""
    adaptive: bool = False
    """true: each client trains its alpha by gradient steps"""

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields["client.optimizer"] != "sgd" or fields["client.momentum"]:
            raise UserError(
                f"apfl needs SGD without momentum: client.optimizer sgd and client.momentum 0, got "
                f"{fields['client.optimizer']} and {fields['client.momentum']:g}."
            )

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        eta, _ = work.sgd("APFL", momentum=False)
        decay, clip = work.optimizer.param_groups[0]["weight_decay"], work.loop.clip_norm
        x = flat(message.common, "model")
        v, alpha = (flat(memory, "own"), values(memory["alpha"])) if memory else (x, x.buffer.new_tensor(self.alpha))
        statistics = copy(flat(memory, "statistics") if memory else work.buffers)
        total, n = torch.zeros_like(x.buffer), 0  # of a step: sum over examples of grad f(u), and number of examples

        def loss(batch: Batch, step: int) -> Tensor:
            nonlocal n
            of_w = work.buffers.buffer.clone()
            work.buffers.buffer.copy_(statistics.buffer)
            _, gradient = gradient_at(work, mixture(alpha, v, work.params), batch, step)
            statistics.buffer.copy_(work.buffers.buffer)
            work.buffers.buffer.copy_(of_w)
            total.add_(gradient.buffer, alpha=len(batch[1]))
            n += len(batch[1])
            return work.loss(batch, step)

        def train_v(params: Mapping[str, nn.Parameter]) -> None:
            nonlocal v, alpha, n
            g = total / max(1, n)  # under DP-SGD, a batch may be empty
            if clip is not None:
                g.mul_((clip / (torch.linalg.vector_norm(g) + 1e-6)).clamp(max=1))
            slope = torch.dot(v.buffer - work.params.buffer, g) if self.adaptive else 0
            v = Flat(v.layout, (1 - eta * decay) * v.buffer - eta * alpha * g)
            alpha = (alpha - eta * slope).clamp(0, 1)
            total.zero_()
            n = 0

        trained = work.local(x, data, seed, loss=loss, add_to_grad=train_v)
        new_memory = {"own": v, "alpha": alpha, "statistics": statistics}
        return weighted_reply(x, trained, work.weight(data), memory=new_memory)

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        x = flat(message.common, "model")
        if not memory:
            return {"model": x}
        model = mixture(memory["alpha"], flat(memory, "own"), x)
        return {"model": model, "buffers": memory["statistics"]}


def mixture(alpha: Flat | Tensor, v: Flat, w: Flat) -> Flat:
    """Return alpha v + (1 - alpha) w."""
    return Flat(w.layout, torch.lerp(w.buffer, v.buffer, values(alpha)))
