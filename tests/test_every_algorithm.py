"""The contract that every algorithm keeps. There is no algorithm's name in here: a new one is tested by being listed.

``_StandIn`` uses all that the interface offers, so that no check is empty because no listed algorithm needs the part.
"""

import hashlib
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from fedcommons.algorithms import ALGORITHMS
from fedcommons.algorithms.algorithm import Algorithm, Facts, Message, Reply, State
from fedcommons.algorithms.local import LocalSGD, Work
from fedcommons.config import Experiment
from fedcommons.data.clients import ClientData
from fedcommons.federation import checkpoint
from fedcommons.federation.evaluation import evaluate
from fedcommons.federation.executor import Executor
from fedcommons.federation.rounds import Standing
from fedcommons.tensors import Flat, Payload, add, data, flat, scale, sub

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]


@dataclass(frozen=True)
class _StandIn:
    """Memory, an own part of the message, replies that travel singly and a second state, each with a say in the result.

    y_i from local SGD, m_i <- m_i / 2 + (y_i - x), x <- x + mean(m_i) + control, control <- a hundredth of the mean.
    """

    local: LocalSGD

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "control": scale(model, 0.0)}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message(dict(state), {"share": torch.tensor([1 / (round + client), 1.0])})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        x, control = flat(message.common, "model"), flat(message.common, "control")
        y, metrics = self.local.run(work, x, data, seed)
        moment, old, share = sub(y, x), memory.get("moment"), message.own["share"]
        assert isinstance(share, Tensor)
        if isinstance(old, Flat):
            moment = add(moment, old, 0.5)
        kept = {"moment": moment, "times": memory.get("times", torch.zeros(())) + 1}  # pyright: ignore[reportOperatorIssue]
        return Reply({"step": add(moment, control)}, {"share": share * len(data)}, 1.0, kept, metrics)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        step, shares = total["step"], [data(r.each["share"])[0] for r in replies]
        assert isinstance(step, Flat)
        mean = scale(step, 1 / len(replies))
        control = add(flat(state, "control"), mean, 0.01 * float(torch.stack(shares).mean() > 0))
        return {"model": add(flat(state, "model"), mean), "control": control}


CONTRACT = {**ALGORITHMS, "stand-in": lambda config, local: _StandIn(local)}
every_algorithm = pytest.mark.parametrize("name", CONTRACT)


def _make(name: str, **local: bool) -> Algorithm:
    return CONTRACT[name](Experiment(), replace(LocalSGD(epochs=2, batch_size=5), **local))


def _bytes(payload: Payload) -> dict[str, bytes]:
    """A copy of all numbers, to compare bit for bit."""
    return {name: data(x).numpy().tobytes() for name, x in payload.items()}


def _bits(standing: Standing) -> tuple[dict[str, bytes], dict[int, dict[str, bytes]]]:
    return _bytes(standing.state), {i: _bytes(kept) for i, kept in standing.memory.items()}


def _rows(rows: ClientData) -> dict[str, bytes]:
    return _bytes({"x": rows.x, "y": rows.y})


@dataclass(frozen=True)
class _Call:
    """One client's round."""

    message: Message
    memory: Payload
    reply: Reply
    returned: dict[str, bytes]  # what the reply held when it was returned


@dataclass
class _Spy:
    """Passes every call on, notes which inputs were changed and keeps the clients' rounds."""

    inner: Algorithm
    changed: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def _compare(self, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        self.changed += [name for name in before if before[name] != after[name]]

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        before = _bytes({"model at start": model})
        state = self.inner.start(model, facts, seed)
        self._compare(before, _bytes({"model at start": model}))
        return state

    def down(self, state: State, round: int, client: int) -> Message:
        before = {"state in down": _bytes(state)}
        message = self.inner.down(state, round, client)
        self._compare(before, {"state in down": _bytes(state)})
        return message

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        def now() -> Mapping[str, object]:
            parts = {"common": message.common, "own": message.own, "memory": memory}
            return {name: _bytes(part) for name, part in parts.items()} | {"data": _rows(data)}

        before = now()
        reply = self.inner.client(work, message, memory, data, seed)
        self._compare(before, now())
        self.calls.append(_Call(message, memory, reply, _bytes({**reply.each, **(reply.memory or {})})))
        return reply

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        def now() -> Mapping[str, object]:
            return {"state in merge": _bytes(state), "total": _bytes(total)} | {
                f"reply {i}": _bytes({**r.each, **(r.memory or {})}) for i, r in enumerate(replies)
            }

        before = now()
        after = self.inner.merge(executor, state, total, replies, seed)
        self._compare(before, now())
        return after


@every_algorithm
def test_two_rounds_run_and_leave_names_shapes_and_types_as_they_were(name: str, digits: "Digits") -> None:
    federation = digits()
    algorithm = _make(name)
    played = federation.play(algorithm, federation.plan(2))
    assert [now.round for now, _ in played] == [1, 2]
    for now, facts in played:
        model = now.model
        assert model.layout == federation.model.layout
        assert model.buffer.dtype == federation.model.buffer.dtype
        assert model.buffer.isfinite().all()
        assert math.isfinite(facts["train/loss"])
        assert (facts["clients"], facts["rejected"]) == (5, 0)


@every_algorithm
def test_the_loss_falls(name: str, digits: "Digits") -> None:
    federation = digits(sizes=(30, 40, 30, 40, 30), lr=0.2)
    algorithm, plan = _make(name), federation.plan(5)
    executor = federation.serial(algorithm)
    sizes = {"train": len(federation.data.sets["train"])}
    before = evaluate(executor, federation.start(algorithm, plan).model, sizes)
    after = evaluate(executor, federation.play(algorithm, plan, executor)[-1][0].model, sizes)
    assert after["train/loss"] < 0.9 * before["train/loss"]


@every_algorithm
def test_same_seed_same_bits_other_seed_other_bits(name: str, digits: "Digits") -> None:
    federation = digits(dropout=0.3)
    algorithm = _make(name, augment=True)
    used = federation.serial(algorithm)
    ends = [
        federation.play(algorithm, federation.plan(2, seed=seed), executor)[-1][0]
        for seed, executor in ((0, federation.serial(algorithm)), (1, used), (0, used))
    ]
    assert _bits(ends[0]) == _bits(ends[2])  # the second on a worker that has trained for another federation before
    assert _bits(ends[0])[0]["model"] != _bits(ends[1])[0]["model"]


@every_algorithm
def test_nothing_that_is_handed_in_is_changed(name: str, digits: "Digits") -> None:
    federation, spy = digits(), _Spy(_make(name))
    federation.play(spy, federation.plan(3))
    assert len(spy.calls) == 15
    assert not spy.changed


@every_algorithm
def test_what_a_client_returned_is_not_the_workers_buffer(name: str, digits: "Digits") -> None:
    """The next client trains in that buffer: memory and replies that alias it would change afterwards."""
    federation, spy = digits(), _Spy(_make(name))
    federation.play(spy, federation.plan(2))
    for call in spy.calls:
        assert _bytes({**call.reply.each, **(call.reply.memory or {})}) == call.returned


@every_algorithm
def test_memory_is_never_sent(name: str, digits: "Digits") -> None:
    """What a client has kept from earlier rounds is in no message to it or from it (numbers and zeros may coincide)."""
    federation, spy = digits(), _Spy(_make(name))
    federation.play(spy, federation.plan(3))
    for call in spy.calls:
        kept = {_bytes({"": x})[""] for x in call.memory.values() if data(x).numel() > 1 and data(x).any()}
        sent = (call.message.common, call.message.own, call.reply.sums, call.reply.each)
        assert not kept & {value for payload in sent for value in _bytes(payload).values()}


@every_algorithm
def test_messages_replies_and_state_survive_pickling(name: str, digits: "Digits") -> None:
    federation, spy = digits(), _Spy(_make(name))
    state = federation.play(spy, federation.plan(2))[-1][0].state
    assert _bytes(pickle.loads(pickle.dumps(state))) == _bytes(state)
    for call in spy.calls[-5:]:
        message, reply = pickle.loads(pickle.dumps((call.message, call.reply)))
        assert _bytes(message.common) == _bytes(call.message.common)
        assert _bytes(message.own) == _bytes(call.message.own)
        for kept, sent in ((reply.sums, call.reply.sums), (reply.each, call.reply.each)):
            assert _bytes(kept) == _bytes(sent)
        assert _bytes(reply.memory or {}) == _bytes(call.reply.memory or {})


@every_algorithm
def test_bytes_are_those_of_the_tensors(name: str, digits: "Digits") -> None:
    federation, spy = digits(), _Spy(_make(name))
    played = federation.play(spy, federation.plan(2, participation=0.4))

    def count(*payloads: Payload) -> int:
        return sum(len(value) for payload in payloads for value in _bytes(payload).values())

    down = [count(call.message.common, call.message.own) for call in spy.calls]
    up = [count(call.reply.sums, call.reply.each) for call in spy.calls]  # memory stays: it is not counted
    assert len(spy.calls) == 4
    assert min(down) > 0
    assert min(up) > 0
    for (_, facts), first in zip(played, (0, 2), strict=True):
        assert facts["comm/down_bytes"] == sum(down[first : first + 2])
        assert facts["comm/up_bytes"] == sum(up[first : first + 2])
    traffic = played[-1][0].traffic
    assert (traffic.down, traffic.up, traffic.once) == (sum(down), sum(up), 0)


@every_algorithm
@pytest.mark.parametrize("drop_last", [False, True])
def test_clients_with_one_sample_take_part(name: str, drop_last: bool, digits: "Digits") -> None:
    federation = digits(sizes=(1, 6, 1))
    played = federation.play(_make(name, drop_last=drop_last), federation.plan(2))
    assert [facts["rejected"] for _, facts in played] == [0, 0]
    assert all(math.isfinite(facts["train/loss"]) for _, facts in played)  # not the mean over no steps
    assert played[-1][0].model.buffer.isfinite().all()
    assert _bytes(played[-1][0].state)["model"] != _bytes(played[0][0].state)["model"]


@every_algorithm
def test_a_client_that_sits_out_keeps_its_memory(name: str, digits: "Digits") -> None:
    federation, spy = digits(), _Spy(_make(name))
    before: dict[int, dict[str, bytes]] = {}
    joined: set[int] = set()
    for now, facts in federation.play(spy, federation.plan(5, participation=0.4, seed=3)):
        assert facts["clients"] == 2
        calls = spy.calls[2 * now.round - 2 : 2 * now.round]
        memory = _bits(now)[1]
        new = {i for i in memory if memory[i] != before.get(i)}
        assert len(new) <= 2
        assert len(new) == sum(call.reply.memory is not None for call in calls)
        assert all(memory[i] == kept for i, kept in before.items() if i not in new)
        for call in calls:  # and gets it back when it is drawn again
            assert not call.memory or _bytes(call.memory) in before.values()
        before = memory
        joined |= new
    assert all(call.reply.memory is None for call in spy.calls) or len(joined) > 2


@every_algorithm
def test_continuing_from_a_checkpoint_is_never_having_stopped(name: str, digits: "Digits", tmp_path: Path) -> None:
    federation, algorithm = digits(dropout=0.3), _make(name, augment=True)
    whole = federation.play(algorithm, federation.plan(4, participation=0.6))
    half = federation.play(algorithm, federation.plan(2, participation=0.6))
    checkpoint.save(tmp_path, half[-1][0])
    rest = federation.play(
        algorithm, federation.plan(4, participation=0.6), start=checkpoint.load_latest(tmp_path)
    )  # with a fresh worker: all that counts is in the checkpoint
    assert _bits(rest[-1][0]) == _bits(whole[-1][0])
    assert rest[-1][0].traffic == whole[-1][0].traffic
    assert [facts for _, facts in half + rest] == [facts for _, facts in whole]


@dataclass(frozen=True)
class _AnyOf:
    """All algorithms in one: actors take seconds to start, so they serve all of them, and the message says which."""

    algorithms: Mapping[str, Algorithm]
    name: str = ""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return self.algorithms[self.name].start(model, facts, seed)

    def down(self, state: State, round: int, client: int) -> Message:
        message, number = self.algorithms[self.name].down(state, round, client), list(self.algorithms).index(self.name)
        return replace(message, common={**message.common, "algorithm": torch.tensor(number)})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, seed: int) -> Reply:
        common = dict(message.common)
        number = common.pop("algorithm")
        assert isinstance(number, Tensor)
        algorithm = list(self.algorithms.values())[int(number)]
        return algorithm.client(work, replace(message, common=common), memory, data, seed)

    def merge(
        self, executor: Executor, state: State, total: Mapping[str, Flat | Tensor], replies: Sequence[Reply], seed: int
    ) -> State:
        return self.algorithms[self.name].merge(executor, state, total, replies, seed)


@pytest.fixture(scope="module", params=[1, 2, 4])
def actors(request: pytest.FixtureRequest, digits: "Digits", ray_session: None) -> Iterator[Executor]:
    """So many actors that hold what ``federation.serial`` does in the test below."""
    from ray import cloudpickle

    from fedcommons.federation.ray_actors import RayActors

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import a test
    federation = digits(dropout=0.3)
    algorithms = _AnyOf({name: _make(name, augment=True) for name in CONTRACT})
    executor = RayActors(federation.build(algorithms), federation.data, request.param, 0)
    yield executor
    executor.close()


@pytest.mark.ray
@every_algorithm
def test_ray_actors_give_the_bits_of_the_serial_executor(name: str, actors: Executor, digits: "Digits") -> None:
    """With dropout and augmentation on; about ten seconds for each number of actors, which have to import torch."""
    federation = digits(dropout=0.3)
    algorithm = _AnyOf({name: _make(name, augment=True) for name in CONTRACT}, name)
    plan = federation.plan(3, participation=0.8, blocks=4)
    there, here = federation.play(algorithm, plan, actors), federation.play(algorithm, plan)

    def sha256(standing: Standing) -> str:
        return hashlib.sha256(_bytes(standing.state)["model"]).hexdigest()

    assert sha256(there[-1][0]) == sha256(here[-1][0])
    assert _bits(there[-1][0]) == _bits(here[-1][0])
    assert [facts for _, facts in there] == [facts for _, facts in here]
