"""The engine: who joins, fixed blocks, what is rejected, evaluation, checkpoints, traffic."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits, Problem
from torch import Tensor
from torch.nn import functional as F

from fedcommons import Capabilities, ClientData, Executor, LocalSGD, Message, Replies, Reply, State, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core import evaluation
from fedcommons.core.block_sum import BlockSum, Total, add_blocks, cut
from fedcommons.errors import ClientError, DivergenceError
from fedcommons.federation.client_sampling import participants
from fedcommons.flat_tensors import Flat, Layout, Payload, data, flat
from fedcommons.privacy.dp_sgd import DPSGD

LAYOUT = Layout(("w", "b"), ((2, 3), (1,)))
FEDAVG = FedAvg()


def test_blocks_of_clients_are_consecutive_complete_even_and_equal_on_every_machine() -> None:
    """Another cut would sum in another order: the same bits for ever need the same blocks for ever."""
    for n, blocks in product((1, 2, 3, 7, 10, 40), (1, 3, 4, 50)):
        joined = list(range(100, 100 + 3 * n, 3))
        parts = cut(joined, blocks)
        assert [i for part in parts for i in part] == joined
        assert len(parts) == min(n, blocks)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert min(map(len, parts)) > 0
    assert cut(range(10), 4) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]


def test_block_sums_are_float64_in_order_and_alias_nothing() -> None:
    draw, total = torch.Generator().manual_seed(0), BlockSum()
    values = [s * torch.randn(7, generator=draw) for s in (1e8, 1.0, 1e-8, -1e8)]  # float32 would lose the small ones
    payloads = [{"delta": Flat(LAYOUT, value.clone()), "n": value[:1].double()} for value in values]
    for payload in payloads:
        total.add(payload)
    expected = reduce(torch.add, [value.double() for value in values])
    for name, n in (("delta", 7), ("n", 1)):
        assert data(total.sums[name]).dtype == torch.float64
        assert torch.equal(data(total.sums[name]), expected[:n])
        for payload, value in zip(payloads, values, strict=True):
            assert torch.equal(data(payload[name]).float(), value[:n])  # also the first, in whose place the sum begins
    assert flat(total.sums, "delta").layout == LAYOUT
    parts = [Total({"x": np.array([v])}, {}) for v in (1e17, 1.0, -1e17, 1.0)]  # another order, another sum
    for part in parts:
        part.arrays["x"].flags.writeable = False  # as they come from Ray
    assert data(add_blocks(parts)["x"]).tolist() == [1.0]
    assert data(add_blocks(parts[:1])["x"]).tolist() == [1e17]


@pytest.mark.parametrize(("n", "share", "expected"), [(10, 0.25, 2), (100, 0.29, 29), (40, 0.1, 4), (3, 1.0, 3)])
def test_participants_are_floor_n_c_sorted_different_and_keyed(n: int, share: float, expected: int) -> None:
    for number in range(1, 20):
        joined = participants(n, share, 0, number)
        assert len(joined) == expected
        assert joined == sorted(set(joined) & set(range(n)))
        assert all(type(i) is int for i in joined)  # they become keys of checkpoints
    samples = {tuple(participants(100, 0.1, seed, number)) for seed in (0, 1) for number in (1, 2, 3, 1)}
    assert len(samples) == 6


def test_participants_are_uniform_over_rounds() -> None:
    rounds, share, together = 3000, 3 / 10, 3 / 10 * 2 / 9  # without replacement
    pairs = np.zeros((10, 10))
    for number in range(rounds):
        joined = participants(10, share, 0, number)
        pairs[np.ix_(joined, joined)] += 1
    same = np.eye(10, dtype=bool)
    assert np.abs(pairs[same] - rounds * share).max() < 4 * np.sqrt(rounds * share * (1 - share))
    assert np.abs(pairs[~same] - rounds * together).max() < 4 * np.sqrt(rounds * together * (1 - together))


@dataclass(frozen=True)
class _Wayward(FedAvg):
    """FedAvg with a memory, in which ``spoil`` changes the replies of clients ``who`` from round 2 on."""

    spoil: Callable[[Reply], Reply] = lambda reply: reply
    who: tuple[int, ...] = ()
    seen: list[Any] = field(default_factory=list)
    """The seeds of clients, and what the server sees of their memory."""

    def down(self, state: State, round: int, client: int) -> Message:
        return replace(super().down(state, round, client), individual={"where": torch.tensor([round, client])})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        where = message.individual["where"]
        assert isinstance(where, Tensor)
        assert round == where.tolist()[0]
        self.seen.append(seed)
        reply = super().client(work, message, memory, data, round, seed)
        reply = replace(reply, memory={"round": torch.tensor(round)})
        return self.spoil(reply) if round >= 2 and where.tolist()[1] in self.who else reply

    def merge(self, executor: Executor, state: State, total: Any, replies: Replies, round: int, seed: int) -> State:
        self.seen.extend(reply.memory for reply in replies.values())
        return super().merge(executor, state, total, replies, round, seed)


def test_clients_have_a_seed_of_their_own_in_every_round_and_the_server_sees_no_memory(least_squares: Problem) -> None:
    federation, algorithm = least_squares().federation(0.1), _Wayward()
    for run in (0, 1):
        federation.run(algorithm, federation.plan(3, seed=run))
    seeds = {seed for seed in algorithm.seen if isinstance(seed, int)}
    assert len(seeds) == algorithm.seen.count(None) == len(algorithm.seen) / 2 == 2 * 3 * 4


@pytest.mark.parametrize("dp", [None, DPSGD(noise_multiplier=1.0, clip=1.0)])
@pytest.mark.parametrize("knows", [False, True])
def test_a_client_knows_its_number_only_if_the_method_asks(knows: bool, dp: DPSGD | None, digits: Digits) -> None:
    """The number is no state that persists from one client to the next, so it makes no message uncovered."""

    class Numbered(FedAvg):
        capabilities = Capabilities(knows_number=knows)

        def client(self, work: Work, *arguments: Any, **named: Any) -> Reply:
            power = 0 if work.number is None else 2**work.number
            return replace(super().client(work, *arguments, **named), metrics={"power": power})

    federation = digits().training(LocalSGD(1, 5, dp=dp, batched=dp is None), "samples")
    executor = federation.serial(Numbered())
    ((now, facts),) = federation.run(Numbered(), federation.plan(1, blocks=1), executor)
    assert facts["train/power"] == (31 / 5 if knows else 0)
    assert executor.worker.work.number is None
    assert dp is None or not now.ledger.uncovered


def test_a_metric_is_averaged_over_the_clients_that_measured_it(digits: Digits) -> None:
    federation = digits()
    algorithm = _Wayward(lambda reply: replace(reply, metrics={**reply.metrics, "extra": 3.0}), (1, 3))
    first, second = (facts for _, facts in federation.run(algorithm, federation.plan(2)))
    assert "train/extra" not in first
    assert second["train/extra"] == 3.0
    assert second["rejected"] == 0


def _delta(reply: Reply, layout: Layout | None = None, dtype: Any = None, first: float | None = None) -> Reply:
    delta = flat(reply.sums, "delta")
    values = delta.buffer.to(dtype or delta.buffer.dtype).clone()
    values[0] = values[0] if first is None else first
    return replace(reply, sums={"delta": Flat(layout or delta.layout, values)})


SPOILT: dict[str, Callable[[Reply], Reply]] = {
    "names": lambda reply: _delta(reply, Layout(("v",), ((3,),))),
    "dtype": lambda reply: _delta(reply, dtype=torch.float32),
    "nan": lambda reply: _delta(reply, first=float("nan")),
    "nan in each": lambda reply: replace(reply, each={"loss": torch.tensor(float("nan"))}),
    "weight that is no number": lambda reply: replace(reply, weight=float("nan")),
    "no sums": lambda reply: replace(reply, sums={}),
}


@pytest.mark.parametrize(("name", "blocks"), [*((name, 1) for name in SPOILT), ("nan", 4)])
def test_a_bad_reply_is_rejected_counted_and_never_averaged_in(name: str, blocks: int, least_squares: Problem) -> None:
    """The others go on as if the client, the last of four, did not exist: in one block bit for bit."""
    problem = least_squares()
    federation, algorithm = problem.federation(0.1), _Wayward(SPOILT[name], who=(3,))
    (first, facts_1), (second, facts_2) = federation.run(algorithm, federation.plan(2, blocks=blocks))
    assert (facts_1["rejected"], facts_2["rejected"]) == (0, 1)
    assert (facts_1["clients"], facts_2["clients"]) == (4, 4)
    assert {i: int(data(memory["round"])) for i, memory in second.memory.items()} == {0: 2, 1: 2, 2: 2, 3: 1}
    three = type(problem)(problem.a[:3], problem.b[:3]).federation(0.1)
    expected = three.run(algorithm, three.plan(2, blocks=1), start=first)[-1][0].model.buffer
    assert torch.equal(second.model.buffer, expected) if blocks == 1 else torch.allclose(second.model.buffer, expected)


def test_a_round_in_which_every_reply_is_rejected_is_an_error_and_a_block_is_not(least_squares: Problem) -> None:
    federation = least_squares().federation(0.1)
    with pytest.raises(DivergenceError, match=r"round 2, _Wayward: every reply was rejected; client 0: .*not finite"):
        federation.run(_Wayward(SPOILT["nan"], who=(0, 1, 2, 3)), federation.plan(2))
    now, facts = federation.run(_Wayward(SPOILT["nan"], who=(0, 1)), federation.plan(2, blocks=2))[-1]
    assert facts["rejected"] == 2
    assert now.model.buffer.isfinite().all()
    huge = _Wayward(lambda r: replace(r, each={"x": torch.full((4,), 3e38)}), who=(3,))  # whose sum overflows
    assert federation.run(huge, federation.plan(2))[-1][1]["rejected"] == 0


def _fail_on_purpose(reply: Reply) -> Reply:
    raise ZeroDivisionError("of no avail")


@pytest.mark.ray
def test_an_error_in_an_actor_names_the_client_and_traceback(least_squares: Problem, ray_session: None) -> None:
    """By a socket, and then by Ray's calls, which the executor uses after an error."""
    from ray import cloudpickle

    from fedcommons.federation.ray_executor import RayActors

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actor cannot import a test
    federation, algorithm = least_squares().federation(0.1), _Wayward(_fail_on_purpose, who=(2,))
    executor = RayActors(federation.build(algorithm), federation.data, 1, 0, transport="fast")
    try:
        for by_calls in (False, True):
            assert (executor.actors[0].socket is None) == by_calls
            with pytest.raises(ClientError, match=r"client 2, round 2, _Wayward: ZeroDivisionError") as caught:
                federation.run(algorithm, federation.plan(2), executor)
            assert "in _fail_on_purpose" in caught.value.trace + str(caught.value)
    finally:
        executor.close()


def test_evaluation_in_chunks_is_evaluation_of_the_whole(digits: Digits) -> None:
    federation = digits(dropout=0.5)  # which evaluation turns off
    executor, work = federation.serial(FEDAVG), federation.work()
    model = federation.run(FEDAVG, federation.plan(2), executor)[-1][0].model
    work.load(model)
    work.module.eval()
    for chunk in (1, 7, 1000):
        task = evaluation.ModelTask(model, chunk=chunk)
        measured = evaluation.evaluate(executor, task, {"test": 100, "train": 64, "validation": 0})
        for name, part in federation.data.sets.items():
            with torch.no_grad():
                logits = work.module(part.x)
            assert measured[f"{name}/accuracy"] == float((logits.argmax(1) == part.y).sum()) / len(part)
            assert measured[f"{name}/loss"] == pytest.approx(float(F.cross_entropy(logits, part.y)), rel=1e-5)
        assert 0 < measured["train/accuracy"] < 1
        assert not [name for name in measured if name.startswith("validation")]
