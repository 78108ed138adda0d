"""FedDyn: a regulariser that moves, so that the clients' stationary points become the server's.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021, arXiv:2111.04263, algorithm 1.
x: server model;  y_i: client i's model;  g_i: what client i has learnt of its own gradient, h: the mean of g_i over all
N clients, both zero at first;  alpha: strength of the regulariser, > 0;  S: the clients of the round.

Departs from the paper: gradients are clipped at norm 10, as in the authors' code; ``squared=False`` is the proximal
term as Fedssyn's released code has it, (alpha/2) ||y - x||. With ``weighting="samples"`` the paper's 1/|S| and 1/N
become w_i over the sum of w_i, over S for the mean and over all N for h.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.local import AddToGrad, LocalSGD, Work
from fedcommons.core.weighting import total_weight, weight
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, flat, scalar, scale, sub, zeros_like


@dataclass(frozen=True)
class FedDyn:
    """Local loss f_i(y) - <g_i, y> + (alpha/2) ||y - x||^2;  g_i <- g_i - alpha (y_i - x).

    h <- h - alpha (1/N) sum_S (y_i - x);  x <- mean_S y_i - h/alpha.  ``model/mean``, evaluated too, is mean_S y_i.
    """

    local: LocalSGD
    weighting: str = "uniform"
    alpha: float = 0.01
    clip: float | None = 10.0
    squared: bool = True

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        everybody = torch.tensor(total_weight(self.weighting, facts), dtype=torch.float64)
        return {"model": model, "model/mean": model, "h": zeros_like(model), "everybody": everybody}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        x, w = flat(message.common, "model"), weight(self.weighting, len(data))
        g_i = flat(memory, "gradient") if memory else zeros_like(x)
        y, metrics = self.local.run(work, x, data, seed, add_to_grad=self.regularised(x, g_i))
        delta = sub(y, x)
        memory = {"gradient": add(g_i, delta, -self.alpha)}
        return Reply({"delta": scale(delta, w)}, weight=w, memory=memory, metrics=metrics)

    def regularised(self, x: Flat, g_i: Flat) -> AddToGrad:
        """Adds -g_i + alpha (y - x) to the gradient, then clips it."""
        anchors, linear = dict(x), dict(g_i)

        def add_to_grad(params: Mapping[str, nn.Parameter]) -> None:
            moved = {name: y.detach() - anchors[name] for name, y in params.items()}
            pull = self.alpha
            if not self.squared:  # the gradient of (alpha/2) ||y - x||; zero at y = x
                distance = torch.stack([m.square().sum() for m in moved.values()]).sum().sqrt()
                pull = self.alpha / 2 / max(float(distance), 1e-12)
            for name, y in params.items():
                if y.grad is not None:
                    y.grad.sub_(linear[name]).add_(moved[name], alpha=pull)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(params.values(), self.clip)

        return add_to_grad

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        delta = flat(total, "delta")  # sum_S w_i (y_i - x), float64
        mean = add(flat(state, "model"), delta, 1 / sum(r.weight for r in replies))
        h = add(flat(state, "h"), delta, -self.alpha / scalar(state, "everybody"))
        return {"model": add(mean, h, -1 / self.alpha), "model/mean": mean, "h": h, "everybody": state["everybody"]}
