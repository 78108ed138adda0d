"""pFedMe: clients minimise Moreau envelopes of their losses, whose minimisers are the personal models.

T Dinh et al., "Personalized federated learning with Moreau envelopes", NeurIPS 2020, arXiv:2006.08848, algorithm 1.
x: server model;  w: client i's copy of x;  theta: client i's personal model;  f: client i's loss on the step's batch;
lam: strength of the proximal term;  K: ``inner_steps``;  mu: ``inner_lr``;  eta: ``client.lr``;  beta: see below. A
local step is K inner steps on one batch, then a step of w:

    theta <- theta - mu (grad f(theta) + lam (theta - w)),  K times;   w <- w - eta lam (w - theta)
    x <- (1 - beta) x + beta weighted mean of w

lam (w - theta) is the gradient of the Moreau envelope min_theta f(theta) + (lam/2) ||theta - w||^2 at w if theta is the
minimiser. So the engine's optimizer takes the step of w, with client.momentum and all other options of local training.

Departs from the paper: in a round, theta starts at x, and each local step starts at the previous theta, as in the
authors' code; the paper leaves the start open. The authors' code (and PFLlib's) adds a weight decay of 0.001 to inner
steps. Only clients of the round train (paper: all clients). mu does not follow the learning rate schedule. BatchNorm's
statistics are those of theta. Under DP-SGD each example has its own theta, which starts at w, so lam (w - theta) is one
example's clipped gradient; the personal model is then w.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean, weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import Batch
from fedcommons.core.step_gradients import gradient_at, with_gradient
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Payload, add, copy, flat, scale, sub


@dataclass(frozen=True)
class PFedMe:
    """Local step w <- w - eta lam (w - theta), with theta near argmin_theta f_i(theta) + (lam/2) ||theta - w||^2.

    f_i: client i's loss, which ``train/loss`` reports at theta;  theta: client i's personal model, by K inner steps.
    x <- (1 - beta) x + beta sum_i w_i y_i / sum_i w_i, with client i's trained w called y_i, and its weight w_i.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    lam: Annotated[float, "(0, 1e38]"] = 5.0
    """lambda, weight of the proximal term (lambda/2) ||theta - w||^2, > 0 (paper: 15, with client.lr 0.005)"""
    inner_steps: Annotated[int, "[1, 1e9]"] = 5
    """K, inner steps of the personal model on each batch"""
    inner_lr: Annotated[float, "(0, 1e38]"] = 0.05
    """learning rate of inner steps"""
    beta: Annotated[float, "(0, 1e38]"] = 1.0
    """beta, step of the server towards the mean of the clients' models; 1: the mean, as in FedAvg"""

    start, down = FedAvg.start, FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        theta = x = flat(message.common, "model")

        def envelope(batch: Batch, step: int) -> Tensor:
            nonlocal theta
            w = copy(work.params)
            theta = w if work.loop.dp else theta  # under DP-SGD, a gradient may not depend on other examples
            for _ in range(self.inner_steps):
                value, gradient = gradient_at(work, theta, batch, step)
                theta = add(theta, add(gradient, sub(theta, w), self.lam), -self.inner_lr)
            return with_gradient(work, value, scale(sub(w, theta), self.lam))

        trained = work.local(x, data, seed, loss=envelope)
        personal = copy(trained.model) if work.loop.dp else theta
        return weighted_reply(x, trained, work.weight(data), memory={"own": personal})

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        x = flat(state, "model")
        return {"model": add(x, sub(weighted_mean(x, total, replies), x), self.beta)}

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {"model": memory["own"] if memory else message.common["model"]}
