"""FedAvgM, FedAdagrad, FedAdam, FedYogi: FedAvg whose server uses the mean client update as a gradient.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv:1909.06335 (FedAvgM); Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv:2003.00295, algorithm 2.

x: server model;  y_i: client i's model;  w_i: client i's weight;  Delta = sum_i w_i (y_i - x) / sum_i w_i: mean client
update;  eta: the server's learning rate;  m, v: first and second moment of Delta, elementwise, at first m = 0 and v =
tau^2;  tau: adaptivity, a number added to sqrt(v). There is no bias correction.

Departs from the papers: by default all selected clients have the same weight; Hsu et al. use ``weighting="samples"``.
Moments are float64, and the model is rounded once per round, so that FedAvgM with beta 0 and eta 1 is FedAvg.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Facts, Replies, State
from fedcommons.core.averaging import summed_weight
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.executor import Executor
from fedcommons.flat_tensors import Flat, Payload, add, flat

Share = Annotated[float, "[0, 1)"]
Rate = Annotated[float, "(0, 1e38]"]
Tau = Annotated[float, "[1e-30, 1e30]"]


def adaptive_start(self: "FedAdagrad | FedAdam | FedYogi", model: Flat, facts: Facts, seed: int) -> State:
    zero = torch.zeros_like(model.buffer, dtype=torch.float64)
    return {"model": model, "m": Flat(model.layout, zero), "v": Flat(model.layout, zero + self.tau**2)}


def adaptive_step(
    self: "FedAdagrad | FedAdam | FedYogi",
    state: State,
    total: Payload,
    replies: Replies,
    second_moment: Callable[[Tensor, Tensor], Tensor],
) -> State:
    """Return the next state:  m <- beta_1 m + (1 - beta_1) Delta;  x <- x + server_lr m / (sqrt(v) + tau).

    second_moment: function of v and Delta^2 that returns the new v.
    """
    x, delta = flat(state, "model"), flat(total, "delta").buffer.double() / summed_weight(replies)
    m = flat(state, "m").buffer.lerp(delta, 1 - self.beta_1)
    v = second_moment(flat(state, "v").buffer, delta.square())
    change = Flat(x.layout, m / (v.sqrt() + self.tau))
    return {"model": add(x, change, self.server_lr), "m": Flat(x.layout, m), "v": Flat(x.layout, v)}


@dataclass(frozen=True)
class FedAvgM:
    """x <- x + eta u, with velocity u <- beta u + Delta; x: server model, Delta: mean client update, eta: server_lr."""

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    beta: Share = 0.9
    """momentum of the server"""
    server_lr: Rate = 1.0
    """eta, learning rate of the server"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "velocity": Flat(model.layout, torch.zeros_like(model.buffer, dtype=torch.float64))}

    down, client = FedAvg.down, FedAvg.client

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        x, u = flat(state, "model"), flat(state, "velocity")
        u = Flat(u.layout, self.beta * u.buffer + flat(total, "delta").buffer / summed_weight(replies))
        return {"model": add(x, u, self.server_lr), "velocity": u}


@dataclass(frozen=True)
class FedAdagrad:
    """FedAvg with Adagrad on the server: m <- beta_1 m + (1 - beta_1) Delta; v <- v + Delta^2; x <- x + s.

    x: server model;  Delta: mean client update;  m, v: moments of Delta;  s = server_lr * m / (sqrt(v) + tau): the
    step.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    beta_1: Share = 0.0
    """decay of the first moment; the paper's experiments use 0"""
    server_lr: Rate = 0.1
    """eta, learning rate of the server"""
    tau: Tau = 1e-3
    """tau, adaptivity, which is added to sqrt(v); with larger values the steps adapt less to each weight"""

    start, down, client = adaptive_start, FedAvg.down, FedAvg.client

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return adaptive_step(self, state, total, replies, lambda v, squared: v + squared)


@dataclass(frozen=True)
class FedAdam:
    """FedAvg with Adam on the server: m <- beta_1 m + (1 - beta_1) Delta; v <- beta_2 v + (1 - beta_2) Delta^2.

    x <- x + eta m / (sqrt(v) + tau).  x: server model;  Delta: mean client update;  m, v: moments of Delta;  eta:
    server_lr.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    beta_1: Share = 0.9
    """decay of the first moment"""
    beta_2: Share = 0.99
    """decay of the second moment"""
    server_lr: Rate = 0.01
    """eta, learning rate of the server"""
    tau: Tau = 1e-3
    """tau, adaptivity, which is added to sqrt(v); with larger values the steps adapt less to each weight"""

    start, down, client = adaptive_start, FedAvg.down, FedAvg.client

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return adaptive_step(self, state, total, replies, lambda v, squared: v.lerp(squared, 1 - self.beta_2))


@dataclass(frozen=True)
class FedYogi:
    """FedAdam with a second moment v that changes by at most (1 - beta_2) Delta^2 per round.

    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2).  Delta: mean client update.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(averages=True)

    beta_1: Share = 0.9
    """decay of the first moment"""
    beta_2: Share = 0.99
    """1 - beta_2 is the change of the second moment per round, as a multiple of the squared mean update"""
    server_lr: Rate = 0.01
    """eta, learning rate of the server"""
    tau: Tau = 1e-3
    """tau, adaptivity, which is added to sqrt(v); with larger values the steps adapt less to each weight"""

    start, down, client = adaptive_start, FedAvg.down, FedAvg.client

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        share = 1 - self.beta_2
        return adaptive_step(self, state, total, replies, lambda v, squared: v - share * squared * (v - squared).sign())
