"""Algorithms that break one promise of the contract each, by the check that must say so."""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.release import Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, copy, data, flat, scale, select, sub

Total = Mapping[str, Flat | Tensor]


@dataclass(frozen=True)
class Sound:
    """FedAvg whose clients remember: m_i <- m_i / 2 + (y_i - x), x <- x + mean(m_i).  What follows breaks it."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]}, {"client": torch.tensor(client)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, metrics, spent = work.local(x, data, seed)
        moment = add(sub(y, x), flat(memory, "moment"), 0.5) if memory else sub(y, x)
        each, released = {"n": torch.tensor(len(data))}, [spent.of("step", "n")]
        return Reply({"step": moment}, each, memory={"moment": moment}, metrics=metrics, releases=released)

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "step"), 1 / len(replies))}


class WidensTheModel(Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        model = flat(super().merge(executor, state, total, replies, round, seed), "model")
        return {"model": Flat(model.layout, model.buffer.double())}


class RenamesTheModel(Sound):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": Flat(replace(model.layout, names=model.layout.names[::-1]), model.buffer)}


class ReportsNoLoss(Sound):
    def client(self, *args: Any) -> Reply:
        return replace(super().client(*args), metrics={})


class WalksUphill(Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "step"), -1 / len(replies))}


class StandsStill(Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        return state


class DrawsFromTorch(Sound):
    def draw(self, size: int) -> Tensor:
        return torch.randn(size)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        noise = 1e-3 * self.draw(flat(message.common, "model").layout.size).float()
        reply = super().client(work, message, memory, data, round, seed)
        step = flat(reply.sums, "step")
        return replace(reply, sums={"step": Flat(step.layout, step.buffer + noise)})


class DrawsFromNumpy(DrawsFromTorch):
    def draw(self, size: int) -> Tensor:
        return torch.from_numpy(np.random.normal(size=size))  # noqa: NPY002


class DrawsFromPython(DrawsFromTorch):
    def draw(self, size: int) -> Tensor:
        return torch.tensor([random.gauss() for _ in range(size)])


class IgnoresTheSeed(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return super().client(work, message, memory, data, round, 0)


class RemembersInItsModule(Sound):
    played: ClassVar[list[float]] = []

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        self.played.append(1.0)
        return {"model": add(flat(state, "model"), flat(total, "step"), 1 / (len(replies) + len(self.played) / 100))}


class ChangesItsMessage(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        flat(message.common, "model").buffer.mul_(0.999)
        return super().client(work, message, memory, data, round, seed)


class ChangesItsMemory(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        if memory:
            flat(memory, "moment").buffer.mul_(0.5)
        return super().client(work, message, memory, data, round, seed)


class ChangesItsData(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        data.x.clamp_(max=200)
        return super().client(work, message, memory, data, round, seed)


class ChangesTheCommons(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        assert data.commons is not None
        data.commons.x.mul_(0.99)
        return super().client(work, message, memory, data, round, seed)


class ChangesTheModelAtStart(Sound):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        model.buffer.mul_(0.9)
        return {"model": model}


class ChangesTheStateInDown(Sound):
    def down(self, state: State, round: int, client: int) -> Message:
        flat(state, "model").buffer.mul_(0.999)
        return super().down(state, round, client)


class ChangesTheStateInMerge(Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        model = flat(state, "model")
        model.buffer.add_(flat(total, "step").buffer / len(replies))
        return {"model": copy(model)}


class ChangesTheTotal(Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        data(total["step"]).div_(len(replies))
        return {"model": add(flat(state, "model"), flat(total, "step"))}


class ChangesReplies(Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        data(next(iter(replies.values())).each["n"]).add_(1)
        return super().merge(executor, state, total, replies, round, seed)


class KeepsTheWorkersBuffer(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, {}, data, round, seed), memory={"last": work.params})


class SendsTheWorkersBuffer(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, memory, data, round, seed), each={"y": work.params})


class SendsItsMemory(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, memory, data, round, seed), each=dict(memory))


class SendsWhatNobodyCanRead(Sound):
    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        each, memory = (MappingProxyType(dict(payload or {})) for payload in (reply.each, reply.memory))
        return replace(reply, each=each, memory=memory)


class SendsHalves(Sound):
    """A ``Flat`` travels as a NumPy array, and NumPy has no bfloat16."""

    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        step = flat(reply.sums, "step")
        return replace(reply, each={"step": Flat(step.layout, step.buffer.bfloat16())})


class WritesPersonallyToAll(Sound):
    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"], "client": torch.tensor(client)})


class SmugglesItsReply(Sound):
    pocket: ClassVar[list[Flat]] = []

    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        self.pocket.append(flat(reply.sums, "step"))
        return replace(reply, sums={}, each={})

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        model = flat(state, "model")
        for step in self.pocket:
            model = add(model, step, 1 / len(replies))
        self.pocket.clear()
        return {"model": model}


class TellsClientsNothing(Sound):
    model: ClassVar[list[Flat]] = []

    def down(self, state: State, round: int, client: int) -> Message:
        self.model[:] = [flat(state, "model")]
        return Message({})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return super().client(work, Message({"model": self.model[0]}), memory, data, round, seed)


class FreeReply(Reply):
    @property
    def nbytes(self) -> int:
        return 0


class SaysItIsFree(Sound):
    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        return FreeReply(reply.sums, reply.each, weight=reply.weight, memory=reply.memory, metrics=reply.metrics)


class DividesByNMinusOne(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, memory, data, round, seed), weight=len(data) - 1.0)


class OneMemoryForAll(Sound):
    shared: ClassVar[dict[str, Flat]] = {}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.shared["moment"] = scale(model, 0.0)
        return {"model": model}

    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        self.shared["moment"].buffer.copy_(flat(reply.sums, "step").buffer)
        return replace(reply, memory=self.shared)


class WaitsForAllItWroteTo(Sound):
    asked: ClassVar[list[int]] = []

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.asked.clear()
        return super().start(model, facts, seed)

    def down(self, state: State, round: int, client: int) -> Message:
        self.asked.append(client)
        return super().down(state, round, client)

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        for _ in zip(self.asked, replies, strict=True):
            pass
        self.asked.clear()
        return super().merge(executor, state, total, replies, round, seed)


class KeepsStateToItself(Sound):
    """Server momentum that no checkpoint holds; each start forgets it, so the same seed gives the same bits."""

    velocity: ClassVar[dict[str, Flat]] = {}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.velocity["v"] = scale(model, 0.0)
        return {"model": model}

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        self.velocity["v"] = add(scale(self.velocity["v"], 0.5), flat(total, "step"), 1 / len(replies))
        return {"model": add(flat(state, "model"), self.velocity["v"])}


class StartsFromTheLastClient(Sound):
    """Each client adds a little of what the one before it in this process sent; each start forgets it."""

    last: ClassVar[dict[str, Flat]] = {}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.last["step"] = scale(model, 0.0)
        return {"model": model}

    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        self.last["step"] = step = add(flat(reply.sums, "step"), self.last["step"], 0.01)
        return replace(reply, sums={"step": step})


@dataclass(frozen=True)
class KnowsItsProcess(Sound):
    """Only another process can tell."""

    home: int = field(default_factory=os.getpid)

    def client(self, *args: Any, **named: Any) -> Reply:
        reply = super().client(*args, **named)
        step = flat(reply.sums, "step")
        return replace(reply, sums={"step": scale(step, 1 if os.getpid() == self.home else 2)})


class ForgetsTheStatistics(Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        work.load_buffers(work.initial_buffers)
        return reply


class DeclaresNothing(Sound):
    names: ClassVar[tuple[str, ...]] = ()

    def client(self, *args: Any) -> Reply:
        return replace(super().client(*args), releases=[Release(what=self.names)])


class ForgetsATensor(DeclaresNothing):
    names = ("step",)


class DeclaresWhatItDoesNotSend(DeclaresNothing):
    names = ("step", "n", "delta")


class GivesAPartOfTheModel(Sound):
    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        model = flat(state, "model")
        return {"model": select(model, [*model][1:])}


class MovesTheServerModel(Sound):
    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        flat(state, "model").buffer.mul_(0.9)
        return {"model": copy(flat(state, "model"))}


class HasNoModelAtFirst(Sound):
    """Clients that have not taken part yet have nothing."""

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {"model": scale(flat(state, "model"), 0.5 if memory else float("nan"))}


class DrawsAModel(Sound):
    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        model = flat(state, "model")
        return {"model": Flat(model.layout, model.buffer + torch.randn(model.layout.size))}


class TrainsOtherwiseWhenPlayedAgain(Sound):
    """Starts each client of a round a little further away, by how often clients were played."""

    played: ClassVar[list[float]] = []

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        self.played.append(1.0)
        x = scale(flat(message.common, "model"), 1 + 1e-3 * len(self.played))
        return super().client(work, Message({"model": x}, message.own), memory, data, round, seed)


BROKEN: dict[str, tuple[type[Sound], ...]] = {
    "what_a_module_draws_is_keyed_in_every_mode": (DrawsFromNumpy, StartsFromTheLastClient),
    "batch_norms_statistics_follow_the_policy": (ForgetsTheStatistics,),
    "all_that_is_sent_is_named_by_a_release": (DeclaresNothing, ForgetsATensor, DeclaresWhatItDoesNotSend),
    "two_rounds_keep_names_shapes_and_types": (WidensTheModel, RenamesTheModel, ReportsNoLoss),
    "the_loss_falls": (WalksUphill, StandsStill),
    "same_seed_same_bits_other_seed_other_bits": (
        DrawsFromTorch, DrawsFromNumpy, DrawsFromPython, IgnoresTheSeed, RemembersInItsModule),
    "nothing_that_is_handed_in_is_changed": (
        ChangesItsMessage, ChangesItsMemory, ChangesItsData, ChangesTheCommons, ChangesTheModelAtStart,
        ChangesTheStateInDown, ChangesTheStateInMerge, ChangesTheTotal, ChangesReplies),
    "what_a_client_returned_is_not_the_workers_buffer": (KeepsTheWorkersBuffer, SendsTheWorkersBuffer),
    "memory_is_never_sent": (SendsItsMemory,),
    "messages_replies_and_state_survive_pickling": (SendsWhatNobodyCanRead, SendsHalves),
    "all_clients_of_a_round_get_the_same_common": (WritesPersonallyToAll,),
    "bytes_are_those_of_the_tensors": (SmugglesItsReply, TellsClientsNothing, SaysItIsFree),
    "clients_with_one_sample_take_part": (DividesByNMinusOne,),
    "a_client_that_sits_out_keeps_its_memory": (OneMemoryForAll,),
    "stragglers_change_nothing": (WaitsForAllItWroteTo,),
    "late_clients_by_any_rule_break_no_promise": (
        WaitsForAllItWroteTo, OneMemoryForAll, KeepsStateToItself, StartsFromTheLastClient),
    "continuing_from_a_checkpoint_is_never_having_stopped": (KeepsStateToItself,),
    "personal_models_are_whole_and_asking_changes_nothing": (
        GivesAPartOfTheModel, MovesTheServerModel, HasNoModelAtFirst, DrawsAModel),
    "clients_at_once_train_as_one_after_another": (TrainsOtherwiseWhenPlayedAgain,),
    "neither_the_worker_nor_the_order_decides_a_bit": (StartsFromTheLastClient,),
}  # fmt: skip
