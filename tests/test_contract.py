"""Every check of the contract can fail: each of these algorithms breaks a promise, and that check says so."""

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD
from fedcommons.core.release import Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, copy, data, flat, scale, select, sub
from fedcommons.testing import CHECKS, check_algorithm

Total = Mapping[str, Flat | Tensor]


@dataclass(frozen=True)
class _Sound:
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


class _WidensTheModel(_Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        model = flat(super().merge(executor, state, total, replies, round, seed), "model")
        return {"model": Flat(model.layout, model.buffer.double())}


class _RenamesTheModel(_Sound):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": Flat(replace(model.layout, names=model.layout.names[::-1]), model.buffer)}


class _ReportsNoLoss(_Sound):
    def client(self, *args: Any) -> Reply:
        return replace(super().client(*args), metrics={})


class _WalksUphill(_Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "step"), -1 / len(replies))}


class _StandsStill(_Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        return state


class _DrawsFromTorch(_Sound):
    def draw(self, size: int) -> Tensor:
        return torch.randn(size)

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        noise = 1e-3 * self.draw(flat(message.common, "model").layout.size).float()
        reply = super().client(work, message, memory, data, round, seed)
        step = flat(reply.sums, "step")
        return replace(reply, sums={"step": Flat(step.layout, step.buffer + noise)})


class _DrawsFromNumpy(_DrawsFromTorch):
    def draw(self, size: int) -> Tensor:
        return torch.from_numpy(np.random.normal(size=size))  # noqa: NPY002


class _DrawsFromPython(_DrawsFromTorch):
    def draw(self, size: int) -> Tensor:
        return torch.tensor([random.gauss() for _ in range(size)])


class _IgnoresTheSeed(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return super().client(work, message, memory, data, round, 0)


class _RemembersInItsModule(_Sound):
    played: ClassVar[list[float]] = []

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        self.played.append(1.0)
        return {"model": add(flat(state, "model"), flat(total, "step"), 1 / (len(replies) + len(self.played) / 100))}


class _ChangesItsMessage(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        flat(message.common, "model").buffer.mul_(0.999)
        return super().client(work, message, memory, data, round, seed)


class _ChangesItsMemory(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        if memory:
            flat(memory, "moment").buffer.mul_(0.5)
        return super().client(work, message, memory, data, round, seed)


class _ChangesItsData(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        data.x.clamp_(max=200)
        return super().client(work, message, memory, data, round, seed)


class _ChangesTheCommons(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        assert data.commons is not None
        data.commons.x.mul_(0.99)
        return super().client(work, message, memory, data, round, seed)


class _ChangesTheModelAtStart(_Sound):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        model.buffer.mul_(0.9)
        return {"model": model}


class _ChangesTheStateInDown(_Sound):
    def down(self, state: State, round: int, client: int) -> Message:
        flat(state, "model").buffer.mul_(0.999)
        return super().down(state, round, client)


class _ChangesTheStateInMerge(_Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        model = flat(state, "model")
        model.buffer.add_(flat(total, "step").buffer / len(replies))
        return {"model": copy(model)}


class _ChangesTheTotal(_Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        data(total["step"]).div_(len(replies))
        return {"model": add(flat(state, "model"), flat(total, "step"))}


class _ChangesReplies(_Sound):
    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        data(next(iter(replies.values())).each["n"]).add_(1)
        return super().merge(executor, state, total, replies, round, seed)


class _KeepsTheWorkersBuffer(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, {}, data, round, seed), memory={"last": work.params})


class _SendsTheWorkersBuffer(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, memory, data, round, seed), each={"y": work.params})


class _SendsItsMemory(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, memory, data, round, seed), each=dict(memory))


class _SendsWhatNobodyCanRead(_Sound):
    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        each, memory = (MappingProxyType(dict(payload or {})) for payload in (reply.each, reply.memory))
        return replace(reply, each=each, memory=memory)


class _SendsHalves(_Sound):
    """A ``Flat`` travels as a NumPy array, and NumPy has no bfloat16."""

    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        step = flat(reply.sums, "step")
        return replace(reply, each={"step": Flat(step.layout, step.buffer.bfloat16())})


class _WritesPersonallyToAll(_Sound):
    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"], "client": torch.tensor(client)})


class _SmugglesItsReply(_Sound):
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


class _TellsClientsNothing(_Sound):
    model: ClassVar[list[Flat]] = []

    def down(self, state: State, round: int, client: int) -> Message:
        self.model[:] = [flat(state, "model")]
        return Message({})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return super().client(work, Message({"model": self.model[0]}), memory, data, round, seed)


class _FreeReply(Reply):
    @property
    def nbytes(self) -> int:
        return 0


class _SaysItIsFree(_Sound):
    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        return _FreeReply(reply.sums, reply.each, weight=reply.weight, memory=reply.memory, metrics=reply.metrics)


class _DividesByNMinusOne(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return replace(super().client(work, message, memory, data, round, seed), weight=len(data) - 1.0)


class _OneMemoryForAll(_Sound):
    shared: ClassVar[dict[str, Flat]] = {}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.shared["moment"] = scale(model, 0.0)
        return {"model": model}

    def client(self, *args: Any) -> Reply:
        reply = super().client(*args)
        self.shared["moment"].buffer.copy_(flat(reply.sums, "step").buffer)
        return replace(reply, memory=self.shared)


class _WaitsForAllItWroteTo(_Sound):
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


class _KeepsStateToItself(_Sound):
    """Server momentum that no checkpoint holds; each start forgets it, so the same seed gives the same bits."""

    velocity: ClassVar[dict[str, Flat]] = {}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        self.velocity["v"] = scale(model, 0.0)
        return {"model": model}

    def merge(self, executor: Executor, state: State, total: Total, replies: Replies, round: int, seed: int) -> State:
        self.velocity["v"] = add(scale(self.velocity["v"], 0.5), flat(total, "step"), 1 / len(replies))
        return {"model": add(flat(state, "model"), self.velocity["v"])}


class _StartsFromTheLastClient(_Sound):
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
class _KnowsItsProcess(_Sound):
    """Only another process can tell."""

    home: int = field(default_factory=os.getpid)

    def client(self, *args: Any, **named: Any) -> Reply:
        reply = super().client(*args, **named)
        step = flat(reply.sums, "step")
        return replace(reply, sums={"step": scale(step, 1 if os.getpid() == self.home else 2)})


class _ForgetsTheStatistics(_Sound):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        work.load_buffers(work.initial_buffers)
        return reply


class _DeclaresNothing(_Sound):
    names: ClassVar[tuple[str, ...]] = ()

    def client(self, *args: Any) -> Reply:
        return replace(super().client(*args), releases=[Release(what=self.names)])


class _ForgetsATensor(_DeclaresNothing):
    names = ("step",)


class _DeclaresWhatItDoesNotSend(_DeclaresNothing):
    names = ("step", "n", "delta")


class _GivesAPartOfTheModel(_Sound):
    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        model = flat(state, "model")
        return {"model": select(model, [*model][1:])}


class _MovesTheServerModel(_Sound):
    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        flat(state, "model").buffer.mul_(0.9)
        return {"model": copy(flat(state, "model"))}


class _HasNoModelAtFirst(_Sound):
    """Clients that have not taken part yet have nothing."""

    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        return {"model": scale(flat(state, "model"), 0.5 if memory else float("nan"))}


class _DrawsAModel(_Sound):
    def personal(self, state: State, memory: Payload, message: Message) -> Payload:
        model = flat(state, "model")
        return {"model": Flat(model.layout, model.buffer + torch.randn(model.layout.size))}


class _TrainsOtherwiseWhenPlayedAgain(_Sound):
    """Starts each client of a round a little further away, by how often clients were played."""

    played: ClassVar[list[float]] = []

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        self.played.append(1.0)
        x = scale(flat(message.common, "model"), 1 + 1e-3 * len(self.played))
        return super().client(work, Message({"model": x}, message.own), memory, data, round, seed)


BROKEN: dict[str, tuple[type[_Sound], ...]] = {
    "what_a_module_draws_is_keyed_in_every_mode": (_DrawsFromNumpy, _StartsFromTheLastClient),
    "batch_norms_statistics_follow_the_policy": (_ForgetsTheStatistics,),
    "all_that_is_sent_is_named_by_a_release": (_DeclaresNothing, _ForgetsATensor, _DeclaresWhatItDoesNotSend),
    "two_rounds_keep_names_shapes_and_types": (_WidensTheModel, _RenamesTheModel, _ReportsNoLoss),
    "the_loss_falls": (_WalksUphill, _StandsStill),
    "same_seed_same_bits_other_seed_other_bits": (
        _DrawsFromTorch, _DrawsFromNumpy, _DrawsFromPython, _IgnoresTheSeed, _RemembersInItsModule),
    "nothing_that_is_handed_in_is_changed": (
        _ChangesItsMessage, _ChangesItsMemory, _ChangesItsData, _ChangesTheCommons, _ChangesTheModelAtStart,
        _ChangesTheStateInDown, _ChangesTheStateInMerge, _ChangesTheTotal, _ChangesReplies),
    "what_a_client_returned_is_not_the_workers_buffer": (_KeepsTheWorkersBuffer, _SendsTheWorkersBuffer),
    "memory_is_never_sent": (_SendsItsMemory,),
    "messages_replies_and_state_survive_pickling": (_SendsWhatNobodyCanRead, _SendsHalves),
    "all_clients_of_a_round_get_the_same_common": (_WritesPersonallyToAll,),
    "bytes_are_those_of_the_tensors": (_SmugglesItsReply, _TellsClientsNothing, _SaysItIsFree),
    "clients_with_one_sample_take_part": (_DividesByNMinusOne,),
    "a_client_that_sits_out_keeps_its_memory": (_OneMemoryForAll,),
    "stragglers_change_nothing": (_WaitsForAllItWroteTo,),
    "late_clients_by_any_rule_break_no_promise": (
        _WaitsForAllItWroteTo, _OneMemoryForAll, _KeepsStateToItself, _StartsFromTheLastClient),
    "continuing_from_a_checkpoint_is_never_having_stopped": (_KeepsStateToItself,),
    "personal_models_are_whole_and_asking_changes_nothing": (
        _GivesAPartOfTheModel, _MovesTheServerModel, _HasNoModelAtFirst, _DrawsAModel),
    "clients_at_once_train_as_one_after_another": (_TrainsOtherwiseWhenPlayedAgain,),
    "neither_the_worker_nor_the_order_decides_a_bit": (_StartsFromTheLastClient,),
}  # fmt: skip


def _named(error: AssertionError) -> list[str]:
    """The checks that the message of ``check_algorithm`` names."""
    return re.findall(r"^- (\w+): ", str(error), re.MULTILINE)


@pytest.mark.long
def test_a_sound_algorithm_passes() -> None:
    check_algorithm(_Sound(), local=LocalSGD(epochs=2, batch_size=8))


@pytest.mark.parametrize(("check", "kind"), [(check, kind) for check, kinds in BROKEN.items() for kind in kinds])
@pytest.mark.long
def test_a_broken_promise_is_found_and_named(check: str, kind: type[_Sound]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_algorithm(kind(), only=[check])
    assert _named(caught.value) == [check]
    assert str(caught.value).startswith(f"{kind.__name__} fails 1 of 1 checks\n")


def test_all_violations_come_in_one_error() -> None:
    expected = ["same_seed_same_bits_other_seed_other_bits", "neither_the_worker_nor_the_order_decides_a_bit"]
    with pytest.raises(AssertionError, match=r"^_DrawsFromNumpy fails 2 of 3 checks\n") as caught:
        check_algorithm(_DrawsFromNumpy(), only=["memory_is_never_sent", *expected])
    assert _named(caught.value) == expected


def test_every_check_has_been_seen_to_fail() -> None:
    assert {*BROKEN, "its_work_can_be_priced"} == CHECKS.keys()  # that one in test_priced_contract.py


@pytest.mark.ray
def test_real_actors_are_compared_too(ray_session: None) -> None:
    """Twice ten seconds, in which two actors import torch."""
    check_algorithm(_Sound(), actors=2)
    with pytest.raises(AssertionError) as caught:
        check_algorithm(_KnowsItsProcess(), actors=2)
    assert _named(caught.value) == ["ray_actors_give_the_bits_of_one_process"]
