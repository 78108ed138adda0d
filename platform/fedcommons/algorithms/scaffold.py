"""SCAFFOLD: control variates take the clients' drift out of local SGD.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", ICML 2020, arXiv:1910.06378,
algorithm 1, with server step 1.   x: server model;  y_i: client i's model after K steps of rate eta;  c, c_i: controls
of server and client, zero at first;  w_i: weight of client i;  S: the clients of the round;  N: all of them.

Departs from the paper: with ``weighting="samples"`` the paper's 1/|S| and 1/N become w_i over the sum of w_i, over S
for the model and over all N for c, so that c is the weighted mean of c_i and the joint optimum that of sum_i n_i f_i.
The gradient of option I is the full one at x, in evaluation mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcommons.core.algorithm import Facts, Message, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD, Work, constant
from fedcommons.core.weighting import total_weight, weight
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, flat, scalar, scale, sub, zeros_like


@dataclass(frozen=True)
class SCAFFOLD:
    """y <- y - eta (g_i(y) - c_i + c);  x <- x + mean_S(y_i - x);  c <- c + (1/N) sum_S (c_i+ - c_i).

    c_i+ = c_i - c + (x - y_i)/(K eta) (option 2), or grad f_i(x) (option 1).
    """

    local: LocalSGD
    weighting: str = "uniform"
    option: int = 2

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        everybody = torch.tensor(total_weight(self.weighting, facts), dtype=torch.float64)
        return {"model": model, "control": zeros_like(model), "everybody": everybody}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"], "control": state["control"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        x, c, w = flat(message.common, "model"), flat(message.common, "control"), weight(self.weighting, len(data))
        c_i = flat(memory, "control") if memory else zeros_like(c)
        eta, _ = work.sgd(f"SCAFFOLD with option {self.option}", momentum=self.option == 1)
        at_x = self.local.gradient(work, x, data) if self.option == 1 else None
        y, metrics = self.local.run(work, x, data, seed, add_to_grad=constant(sub(c, c_i)))
        delta = sub(y, x)
        new = add(sub(c_i, c), delta, -1 / (float(metrics["steps"]) * eta)) if at_x is None else at_x
        sums = {"delta": scale(delta, w), "control": scale(sub(new, c_i), w)}
        return Reply(sums, weight=w, memory={"control": new}, metrics=metrics)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        return {
            "model": add(flat(state, "model"), flat(total, "delta"), 1 / sum(r.weight for r in replies)),
            "control": add(flat(state, "control"), flat(total, "control"), 1 / scalar(state, "everybody")),
            "everybody": state["everybody"],
        }
