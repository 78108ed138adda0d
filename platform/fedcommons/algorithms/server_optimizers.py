"""FedAvgM, FedAdagrad, FedAdam, FedYogi: FedAvg whose server uses the mean client update as a gradient.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv:1909.06335 (FedAvgM); Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv:2003.00295, algorithm 2.

x: server model;  y_i: client i's model;  w_i: client i's weight;  Delta = sum_i w_i (y_i - x) / sum_i w_i: mean client
update;  eta: the server's learning rate;  m, v: first and second moment of Delta, elementwise, at first m = 0 and v =
tau^2;  tau: adaptivity, a number added to sqrt(v). There is no bias correction.

Departs from the papers: by default all selected clients have the same weight; Hsu et al. use ``weighting="samples"``.
Moments are float64, and the model is rounded once per round, so that FedAvgM with beta 0 and eta 1 is FedAvg.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import summed_weight, weighted_reply
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, add, flat

Share = Annotated[float, "[0, 1)"]
Rate = Annotated[float, "(0, 1e38]"]
Tau = Annotated[float, "[1e-30, 1e30]"]


def train_client(work: Work, message: Message, data: ClientData, seed: int) -> Reply:
    """Train locally as in FedAvg and return the client's reply with its weighted model update."""
    x = flat(message.common, "model")
    return weighted_reply(x, work.local(x, data, seed), work.weight(data))


def moments(model: Flat, tau: float) -> State:
    """Return the state before round 1: the model, first moment m = 0 and second moment v = tau^2."""
    zero = torch.zeros_like(model.buffer, dtype=torch.float64)
    return {"model": model, "m": Flat(model.layout, zero), "v": Flat(model.layout, zero + tau**2)}


def update_moments(state: State, total: Payload, replies: Replies, beta_1: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the updated first moment (decay ``beta_1``), the old second moment, and the squared mean client update."""
    delta = flat(total, "delta").buffer.double() / summed_weight(replies)
    return flat(state, "m").buffer.lerp(delta, 1 - beta_1), flat(state, "v").buffer, delta.square()


def apply_step(state: State, m: Tensor, v: Tensor, eta: float, tau: float) -> State:
    """Return the next state, with model x + eta m / (sqrt(v) + tau) and the first and second moments m and v."""
    x = flat(state, "model")
    step = Flat(x.layout, m / (v.sqrt() + tau))
    return {"model": add(x, step, eta), "m": Flat(x.layout, m), "v": Flat(x.layout, v)}


@dataclass(frozen=True)
class FedAvgM:
    """x <- x + eta u, with velocity u <- beta u + Delta; x: server model, Delta: mean client update, eta: server_lr."""

    beta: Share = 0.9
    """momentum of the server"""
    server_lr: Rate = 1.0
    """eta, learning rate of the server"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "velocity": Flat(model.layout, torch.zeros_like(model.buffer, dtype=torch.float64))}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return train_client(work, message, data, seed)

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

    beta_1: Share = 0.0
    """decay of the first moment; the paper's experiments use 0"""
    server_lr: Rate = 0.1
    """eta, learning rate of the server"""
    tau: Tau = 1e-3
    """tau, adaptivity, which is added to sqrt(v); with larger values the steps adapt less to each weight"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return moments(model, self.tau)

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return train_client(work, message, data, seed)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        m, v, squared = update_moments(state, total, replies, self.beta_1)
        return apply_step(state, m, v + squared, self.server_lr, self.tau)


@dataclass(frozen=True)
class FedAdam:
    """FedAvg with Adam on the server: m <- beta_1 m + (1 - beta_1) Delta; v <- beta_2 v + (1 - beta_2) Delta^2.

    x <- x + eta m / (sqrt(v) + tau).  x: server model;  Delta: mean client update;  m, v: moments of Delta;  eta:
    server_lr.
    """

    beta_1: Share = 0.9
    """decay of the first moment"""
    beta_2: Share = 0.99
    """decay of the second moment"""
    server_lr: Rate = 0.01
    """eta, learning rate of the server"""
    tau: Tau = 1e-3
    """tau, adaptivity, which is added to sqrt(v); with larger values the steps adapt less to each weight"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return moments(model, self.tau)

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return train_client(work, message, data, seed)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        m, v, squared = update_moments(state, total, replies, self.beta_1)
        return apply_step(state, m, v.lerp(squared, 1 - self.beta_2), self.server_lr, self.tau)


@dataclass(frozen=True)
class FedYogi:
    """FedAdam with a second moment v that changes by at most (1 - beta_2) Delta^2 per round.

    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2).  Delta: mean client update.
    """

    beta_1: Share = 0.9
    """decay of the first moment"""
    beta_2: Share = 0.99
    """1 - beta_2 is the change of the second moment per round, as a multiple of the squared mean update"""
    server_lr: Rate = 0.01
    """eta, learning rate of the server"""
    tau: Tau = 1e-3
    """tau, adaptivity, which is added to sqrt(v); with larger values the steps adapt less to each weight"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return moments(model, self.tau)

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return train_client(work, message, data, seed)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        m, v, squared = update_moments(state, total, replies, self.beta_1)
        change = (1 - self.beta_2) * squared * (v - squared).sign()
        return apply_step(state, m, v - change, self.server_lr, self.tau)
