"""FedAvgM, FedAdagrad, FedAdam, FedYogi: FedAvg whose server uses the mean client update as a gradient.

Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019,
arXiv:1909.06335 (FedAvgM); Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv:2003.00295, algorithm 2.

x: server model;  y_i: client i's model;  Delta = sum_i w_i (y_i - x) / sum_i w_i;  eta: the server's learning rate;
m, v: first and second moment, elementwise, at first m = 0 and v = tau^2;  tau: adaptivity. There is no bias correction.

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
    """Train locally as in FedAvg and return the client's reply."""
    x = flat(message.common, "model")
    return weighted_reply(x, work.local(x, data, seed), work.weight(data))


def moments(model: Flat, tau: float) -> State:
    """Return the state before round 1: the model, m = 0 and v = tau^2."""
    zero = torch.zeros_like(model.buffer, dtype=torch.float64)
    return {"model": model, "m": Flat(model.layout, zero), "v": Flat(model.layout, zero + tau**2)}


def update_moments(state: State, total: Payload, replies: Replies, beta_1: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return m <- beta_1 m + (1 - beta_1) Delta, the old v, and Delta^2."""
    delta = flat(total, "delta").buffer.double() / summed_weight(replies)
    return flat(state, "m").buffer.lerp(delta, 1 - beta_1), flat(state, "v").buffer, delta.square()


def apply_step(state: State, m: Tensor, v: Tensor, eta: float, tau: float) -> State:
    """Return the next state, with x <- x + eta m / (sqrt(v) + tau)."""
    x = flat(state, "model")
    step = Flat(x.layout, m / (v.sqrt() + tau))
    return {"model": add(x, step, eta), "m": Flat(x.layout, m), "v": Flat(x.layout, v)}


@dataclass(frozen=True)
class FedAvgM:
    """u <- beta u + Delta;  x <- x + eta u."""

    beta: Share = 0.9
    """momentum of the server"""
    server_lr: Rate = 1.0
    """eta, the server's rate"""

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
    """m <- beta_1 m + (1 - beta_1) Delta;  v <- v + Delta^2;  x <- x + eta m / (sqrt(v) + tau)."""

    beta_1: Share = 0.0
    """decay of the first moment; the paper's experiments have none"""
    server_lr: Rate = 0.1
    """eta, the server's rate"""
    tau: Tau = 1e-3
    """adaptivity: the smaller, the more alike are the steps of all weights"""

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
    """m <- beta_1 m + (1 - beta_1) Delta;  v <- beta_2 v + (1 - beta_2) Delta^2;  x <- x + eta m / (sqrt(v) + tau)."""

    beta_1: Share = 0.9
    """decay of the first moment"""
    beta_2: Share = 0.99
    """decay of the second moment"""
    server_lr: Rate = 0.01
    """eta, the server's rate"""
    tau: Tau = 1e-3
    """adaptivity: the smaller, the more alike are the steps of all weights"""

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
    """FedAdam with  v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2):  v changes by (1 - beta_2) Delta^2 at most."""

    beta_1: Share = 0.9
    """decay of the first moment"""
    beta_2: Share = 0.99
    """1 - beta_2 is the share of Delta^2 by which the second moment changes"""
    server_lr: Rate = 0.01
    """eta, the server's rate"""
    tau: Tau = 1e-3
    """adaptivity: the smaller, the more alike are the steps of all weights"""

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
