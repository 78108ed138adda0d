"""Approximate gradient coding: rescaled replies and copied examples compensate for the replies of stragglers.

Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning with
non-IID data", arXiv:2404.03524, section III; the sharing strategy ``raw_copies`` distributes the copies. M: number of
different examples;  d_j: number of clients that have example j;  q: probability that a client straggles; f_i: the
vector that client i sends;  S: the clients whose reply arrives;  W_i = sum_j 1/d_j over client i's examples: its
weighted number of examples, so sum_i W_i = M;  g_j: gradient on example j;  x, y_i: server's and client i's model.

With one full-batch step, client i sends the paper's f_i = sum_j g_j / ((1 - q) d_j). The expected sum over S is the
full sum: E_S sum_S f_i = sum_j g_j.

Several local steps are an extension of the paper's method: client i sends f_i = W_i (y_i - x) / (1 - q). The
expected server step over random S is the step without stragglers, whether or not clients straggle independently. The
proof is E sum_S v_i / P(i in S) = sum_i v_i for any v_i that do not depend on S; tests check all S. It is not
proved that this step is a descent direction of the pooled loss (clients drift as in FedAvg). It is also not proved that
copies reduce the variance of this step, as Theorem 2 is about gradients at one model.

Departs from the paper: q may differ between clients, and the server may sample clients (participation below 1). Each
client divides by the probability that its reply arrives. ``form`` sum is the paper's form, ``form`` mean that of the
released code. The learning rate decays as in the released code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, flat, scalar, scale, sub
from fedcommons.flat_tensors import data as data_of


@dataclass(frozen=True)
class GradientCoding:
    """x <- x + (1/M) sum_S W_i (y_i - x) / P(i in S), but ``form`` sum leaves out the factor 1/M.

    x: server model;  y_i: client i's model;  S: clients whose reply arrives;  W_i: weighted number of client i's
    examples; M = sum_i W_i. After k rounds with a reply, the learning rate is client.lr times decay^k.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(adds_updates=True)

    form: Annotated[str, "mean | sum"] = "mean"
    """mean: the sum of gradients is divided by the number of examples; sum: it is not divided"""
    decay: Annotated[float, "(0, 1]"] = 1.0
    """factor by which the learning rate is multiplied after each round in which a client replied"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields["client.optimizer"] != "sgd":
            raise UserError("client.optimizer must be sgd for gradient_coding, whose step is eta times a gradient.")
        if fields["straggler.partial"] == "take":
            raise UserError("straggler.partial must not be take for gradient_coding, which uses complete replies only.")

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        if facts.arrival is None or min(facts.arrival) <= 0:
            raise UserError(
                "algorithm gradient_coding divides by the probability that a client's reply arrives, which is zero or "
                "has no closed form with this straggler.rule; use straggler.rule independent, or another rule with one."
            )
        numbers = {"arrival": facts.arrival, "total": sum(facts.sizes) if self.form == "mean" else 1.0}
        fixed = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
        return {"model": model, "answered": torch.tensor(0), **fixed}

    def down(self, state: State, round: int, client: int) -> Message:
        per_client = {"arrival": data_of(state["arrival"])[client]}
        return Message({"model": state["model"], "answered": state["answered"]}, per_client)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, (eta, _) = flat(message.common, "model"), work.sgd("gradient coding", momentum=True)
        learning_rate = eta * self.decay ** int(scalar(message.common, "answered"))
        y, metrics, spent = work.local(x, data, seed, lr=learning_rate)
        coded = scale(sub(y, x), data.size / scalar(message.individual, "arrival"))
        return Reply({"coded": coded}, weight=data.size, metrics=metrics, releases=[spent.with_names("coded")])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        model = add(flat(state, "model"), flat(total, "coded"), 1 / scalar(state, "total"))
        return {**state, "model": model, "answered": data_of(state["answered"]) + 1}
