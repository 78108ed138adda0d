"""FedDyn: a regulariser that changes each round aligns the stationary points of clients and server.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, arXiv:2111.04263, algorithm 1. x: server
model;  y_i: client i's model;  f_i: client i's loss;  g_i: client i's estimate of its gradient;  h: mean of g_i over
all N clients;  alpha: strength of the regulariser, > 0;  S: the clients of the round;  w_i: client i's weight. g_i and
h are zero at first.

Departs from the paper: gradients are clipped at norm 10, as in the authors' code. ``squared=False`` uses the proximal
term of Fedssyn's released code, (alpha/2) ||y - x||. With ``weighting="samples"`` the weights w_i / sum_j w_j replace
the paper's 1/|S| and 1/N. The sum over j is over S for the mean of the models and over all N clients for h.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import Correction, clip_gradients
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, add, flat, scalar, scale, sub, zeros_like


@dataclass(frozen=True)
class FedDyn:
    """Local loss f_i(y) - <g_i, y> + (alpha/2) ||y - x||^2, with a linear term that changes each round.

    After local training, g_i <- g_i - alpha (y_i - x).  Server: h <- h - alpha (1/N) sum_S (y_i - x); x <- mean_S y_i -
    h/alpha.  x: server model;  y_i: client i's model;  g_i: client i's gradient estimate;  h: mean of g_i over all N
    clients;  S: the round's clients.  The engine also evaluates mean_S y_i (``model/mean``).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True)

    alpha: Annotated[float, "(0, 1e38]"] = 0.01
    """alpha, weight of the dynamic regulariser, > 0"""
    clip: Annotated[float | None, "(0, inf]"] = 10.0
    """norm to which the gradient of a local step is clipped; null: no clipping"""
    squared: bool = True
    """true: squared proximal term (paper); false: proximal term without the square (Fedssyn's released code)"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        everybody = torch.tensor(facts.total_weight, dtype=torch.float64)
        return {"model": model, "model/mean": model, "h": zeros_like(model), "everybody": everybody}

    down = FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, w = flat(message.common, "model"), work.weight(data)
        g_i = flat(memory, "gradient") if memory else zeros_like(x)
        y, metrics, spent = work.local(x, data, seed, add_to_grad=Correction(self.regularise, (x, g_i)))
        delta = sub(y, x)
        memory = {"gradient": add(g_i, delta, -self.alpha)}
        return Reply(
            {"delta": scale(delta, w)}, weight=w, memory=memory, metrics=metrics, releases=[spent.with_names("delta")]
        )

    def regularise(
        self, params: Mapping[str, nn.Parameter], x: Mapping[str, Tensor], g_i: Mapping[str, Tensor]
    ) -> None:
        """Add the regulariser's gradient -g_i + alpha (y - x) to the gradients, then clip them; y: current weights."""
        moved = {name: y.detach() - x[name] for name, y in params.items()}
        pull = torch.tensor(self.alpha, dtype=torch.float64)
        if not self.squared:
            distance = torch.stack([m.square().sum() for m in moved.values()]).sum().sqrt()
            # The clamp makes the gradient of (alpha/2) ||y - x|| zero at y = x, without a copy from the GPU.
            pull = pull / 2 / distance.double().clamp(min=1e-12)
        for name, y in params.items():
            if y.grad is not None:
                # torch.func.vmap does not support addcmul_, so y.grad gets a new tensor.
                y.grad = torch.addcmul(y.grad.sub_(g_i[name]), moved[name], pull.to(y.grad.dtype))
        if self.clip is not None:
            clip_gradients(params.values(), self.clip)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        mean = weighted_mean(flat(state, "model"), total, replies)
        h = add(flat(state, "h"), flat(total, "delta"), -self.alpha / scalar(state, "everybody"))
        return {"model": add(mean, h, -1 / self.alpha), "model/mean": mean, "h": h, "everybody": state["everybody"]}
