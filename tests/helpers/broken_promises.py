"""Algorithms that each break one promise of the contract of methods, by the check that must detect the fault."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons import Capabilities, ClientData, Clients, Common, Executor, Facts, Message, Replies, Reply, State, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.data.examples import Examples
from fedcommons.flat_tensors import Flat, Payload, add, copy, data, flat, scale, select, sub
from fedcommons.privacy.release import Release

Total = Mapping[str, Flat | Tensor]


@dataclass(frozen=True)
class Sound:
    """FedAvg with client memory m_i <- m_i / 2 + (y_i - x), x <- x + mean(m_i). It keeps all promises.

    x: server model; y_i: model of client i after local training. The classes below break one promise each.
    """

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]}, {"client": torch.tensor(client)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, metrics, spent = work.local(x, data, seed)
        moment = add(sub(y, x), flat(memory, "moment"), 0.5) if memory else sub(y, x)
        each, released = {"n": torch.tensor(len(data))}, [spent.with_names("step", "n")]
        return Reply({"step": moment}, each, memory={"moment": moment}, metrics=metrics, releases=released)

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "step"), 1 / len(replies))}


def _size(worker: Any, shared: Mapping[str, Any], which: str) -> float:
    return float(shared[which].buffer.norm())


class RunsJobs(Sound):
    """Its server runs a job whose shared data do not state their bytes."""

    def merge(self, executor: Executor, state: State, total: Total, *rest: Any, **named: Any) -> State:
        (size,) = executor.map(_size, {"step": flat(total, "step"), "none": None}, ["step"])
        return {**super().merge(executor, state, total, *rest, **named), "size": torch.tensor(size)}


@dataclass(frozen=True)
class KnowsItsProcess(Sound):
    """A method whose replies are different in another process."""

    home: int = field(default_factory=os.getpid)

    def client(self, *args: Any, **named: Any) -> Reply:
        reply = super().client(*args, **named)
        return _with_step(reply, scale(_step(reply), 1 if os.getpid() == self.home else 2))


NOTES: dict[str, Any] = {}
"""Values that a faulty algorithm keeps outside the server state and the clients' memory."""


@dataclass(frozen=True)
class Broken(Sound):
    """``Sound`` with faults: each function below changes one value of the method."""

    begin: Callable[[Flat], Any] = lambda model: model
    """Returns the initial model of the run."""
    message: Callable[[State, Message, int], Message] = lambda state, message, client: message
    prepare: Callable[[Any], object] = lambda inputs: None
    """Changes a client's inputs: work, message, memory, data and seed."""
    reply: Callable[[Reply, Any], Reply] = lambda reply, inputs: reply
    total: Callable[[State, Total, Replies], Total | None] = lambda state, total, replies: total
    merged: Callable[[Flat], Flat] = lambda model: model
    server_lr: float = 1.0

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": self.begin(model)}

    def down(self, state: State, round: int, client: int) -> Message:
        return self.message(state, super().down(state, round, client), client)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        inputs = SimpleNamespace(work=work, message=message, memory=memory, data=data, seed=seed)
        self.prepare(inputs)
        return self.reply(super().client(work, inputs.message, inputs.memory, data, round, inputs.seed), inputs)

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        step = flat(self.total(state, total, replies) or total, "step")
        return {"model": self.merged(add(flat(state, "model"), step, self.server_lr / len(replies)))}


def _step(reply: Reply) -> Flat:
    return flat(reply.sums, "step")


def _with_step(reply: Reply, step: Flat) -> Reply:
    return replace(reply, sums={"step": step})


def spoil(x: Any) -> Any:
    """Change a tensor in place."""
    data(x).add_(1)
    return x


def _forget_the_statistics(reply: Reply, inputs: Any) -> Reply:
    inputs.work.load_buffers(inputs.work.initial_buffers)
    return reply


def _noisy(reply: Reply, inputs: Any) -> Reply:
    step = _step(reply)
    return _with_step(reply, Flat(step.layout, step.buffer + 1e-3 * inputs.noise))


def _draw(inputs: Any) -> None:
    """Draw from a generator that no seed has set, before the training, which sets torch's."""
    inputs.noise = torch.from_numpy(np.random.normal(size=flat(inputs.message.common, "model").layout.size)).float()  # noqa: NPY002


def _declares(*names: str) -> Broken:
    return Broken(reply=lambda reply, inputs: replace(reply, releases=[Release(what=names)]))


class FreeReply(Reply):
    @property
    def nbytes(self) -> int:
        return 0


def _with_momentum(state: State, total: Total, replies: Replies) -> Total:
    NOTES["velocity"] = add(flat(total, "step"), NOTES["velocity"], 0.5)
    return {"step": NOTES["velocity"]}


def _after_the_last_client(reply: Reply, inputs: Any) -> Reply:
    NOTES["last"] = add(_step(reply), NOTES["last"], 0.01)
    return _with_step(reply, NOTES["last"])


def _begin_with(name: str) -> Callable[[Flat], Flat]:
    """Return a function that stores a zero vector in ``NOTES`` when a run starts."""

    def begin(model: Flat) -> Flat:
        NOTES[name] = scale(model, 0.0)
        return model

    return begin


@dataclass(frozen=True)
class Personally(Broken):
    """A method whose personal models are ``personalise(server model, whether the client took part)``."""

    personalise: Callable[[Flat, bool], Flat] = lambda model, took_part: model

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {"model": self.personalise(flat(state, "model"), bool(memory))}


def _moved(model: Flat, took_part: bool) -> Flat:
    model.buffer.mul_(0.9)
    return copy(model)


@dataclass(frozen=True)
class Repeats(FedAvg):
    """FedAvg that claims to repeat work as often as ``steps`` says."""

    capabilities = Capabilities(repeats={"polish": "steps"})
    steps: Any = 10


class DeniesItsLocalSteps(FedAvg):
    capabilities = Capabilities(trains_locally=False)


DRAWS_FROM_NUMPY = Broken(prepare=_draw, reply=_noisy)
SPOILS_MEMORY = Broken(prepare=lambda inputs: spoil(inputs.memory["moment"]) if inputs.memory else None)
SPOILS_MESSAGE = Broken(prepare=lambda inputs: spoil(inputs.message.common["model"]))
LAST_CLIENT = Broken(_begin_with("last"), reply=_after_the_last_client)


class SharesSums(Sound):
    """Its clients share sums of rows before round 1, of another shape than an image, and read them in each round."""

    def share(self, clients: Clients, n_classes: int | None, seed: int) -> Common:
        return Common(Examples(torch.stack([x.x.float().sum((0, 1, 2)) for x in clients]), torch.arange(len(clients))))

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, *when: int) -> Reply:
        assert data.commons is not None
        assert data.commons.x.shape[1:] == (8,)
        return super().client(work, message, memory, data, *when)


class SharesNothing(Sound):
    """Its clients have only their own examples."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, *when: int) -> Reply:
        assert data.commons is None
        return super().client(work, message, memory, data, *when)


class SharesAnyhow(SharesSums):
    """It draws what clients share from numpy's global generator."""

    def share(self, clients: Clients, n_classes: int | None, seed: int) -> Common:
        common = super().share(clients, n_classes, seed)
        noise = torch.from_numpy(np.random.rand(*common.examples.x.shape))  # noqa: NPY002
        return Common(Examples(common.examples.x + noise, common.examples.y))


class SpoilsShared(Broken, SharesSums):
    """``Broken`` with shared data."""


BROKEN: dict[str, tuple[Any, ...]] = {
    "two_rounds_keep_names_shapes_and_types": (
        Broken(merged=lambda model: Flat(model.layout, model.buffer.double())),
        Broken(reply=lambda reply, inputs: replace(reply, metrics={})),
    ),
    "the_loss_falls": (Broken(server_lr=-1.0), Broken(server_lr=0.0)),
    "same_seed_same_bits_other_seed_other_bits": (
        DRAWS_FROM_NUMPY, SharesAnyhow(), Broken(prepare=lambda inputs: vars(inputs).update(seed=0)),
    ),
    "nothing_that_is_handed_in_is_changed": (
        SPOILS_MESSAGE, SPOILS_MEMORY, Broken(begin=spoil), Broken(prepare=lambda inputs: spoil(inputs.data.x)),
        SpoilsShared(prepare=lambda inputs: spoil(inputs.data.commons.x)),
        Broken(message=lambda state, message, client: Message({"model": spoil(state["model"])}, message.individual)),
        Broken(total=lambda state, total, replies: {"step": spoil(total["step"])}),
        Broken(total=lambda _, total, replies: {**total, "spoilt": spoil(next(iter(replies.values())).each["n"])}),
    ),
    "what_a_client_returned_is_not_the_workers_buffer": (
        Broken(reply=lambda reply, inputs: replace(reply, each={"y": inputs.work.params})),
    ),
    "memory_is_never_sent": (Broken(reply=lambda reply, inputs: replace(reply, each=dict(inputs.memory))),),
    "messages_replies_and_state_survive_pickling": (
        Broken(reply=lambda reply, inputs: replace(reply, each=MappingProxyType(dict(reply.each)))),
    ),
    "all_clients_of_a_round_get_the_same_common": (
        Broken(message=lambda state, message, client: Message({**message.common, "to": torch.tensor(client)})),
    ),
    "bytes_are_those_of_the_tensors": (Broken(reply=lambda reply, inputs: FreeReply(**vars(reply))),),
    "clients_with_one_sample_take_part": (
        Broken(reply=lambda reply, inputs: replace(reply, weight=len(inputs.data) - 1.0)),
    ),
    "a_client_that_sits_out_keeps_its_memory": (SPOILS_MEMORY,),
    "stragglers_change_nothing": (SPOILS_MEMORY,),
    "late_clients_by_any_rule_break_no_promise": (SPOILS_MEMORY, LAST_CLIENT),
    "continuing_from_a_checkpoint_is_never_having_stopped": (Broken(_begin_with("velocity"), total=_with_momentum),),
    "neither_the_worker_nor_the_order_decides_a_bit": (LAST_CLIENT,),
    "what_a_module_draws_is_keyed_in_every_mode": (DRAWS_FROM_NUMPY, LAST_CLIENT),
    "batch_norms_statistics_follow_the_policy": (Broken(reply=_forget_the_statistics),),
    "all_that_is_sent_is_named_by_a_release": (_declares("step"), _declares("step", "n", "delta")),
    "personal_models_are_whole_and_asking_changes_nothing": (
        Personally(personalise=lambda model, took_part: select(model, [*model][1:])), Personally(personalise=_moved),
        Personally(personalise=lambda model, took_part: scale(model, 0.5 if took_part else float("nan"))),
    ),
    "clients_at_once_train_as_one_after_another": (SPOILS_MESSAGE,),
    "its_work_can_be_priced": (Repeats("many"), DeniesItsLocalSteps()),
}  # fmt: skip
"""The checks of the contract by name, each with algorithms that the check must reject."""


@dataclass(frozen=True)
class TopK(Sound):
    """Each client sends the k largest values of its update in any order, with their positions. Without error feedback.

    Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, arXiv:1704.05021.
    """

    k: int = 200

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, metrics, spent = work.local(x, data, seed)
        delta = sub(y, x).buffer
        at = delta.abs().topk(self.k).indices
        at = at[(1e6 * delta[at]).frac().argsort()]  # this order depends on the last bits of the values
        released = [spent.with_names("values", "at")]
        return Reply(each={"values": delta[at], "at": at}, metrics=metrics, releases=released)

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        x = copy(flat(state, "model"))
        for reply in replies.values():
            x.buffer.index_add_(0, data(reply.each["at"]), data(reply.each["values"]), alpha=1 / len(replies))
        return {"model": x}
