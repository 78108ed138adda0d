"""Methods that carry a client's data past the ledger: what the engine takes from them, charges or names.

What it cannot see (a false ``spent.with_names``, data in ``start=``, in memory, in shapes) is tried by the test of
sensitivity.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from math import comb
from typing import Any, cast

import numpy as np
import pytest
import torch
from closed_forms import Digits
from torch import Tensor

from fedcommons import ClientData, ClientError, Executor, LocalSGD, Message, Replies, Reply, State, Work
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Payload, copy, data, flat, sub
from fedcommons.privacy.dp_sgd import DPSGD, Target, compose_steps
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release

PRIVATE = LocalSGD(1, 5, dp=DPSGD(2.0, 1.0))

Act = Callable[[Any, Reply, Work, ClientData], Any]
"""(method, reply, work, data): what a client does after its training; it may return another reply."""


def client_of(act: Act) -> type[FedAvg]:

    class Hostile(FedAvg):
        def client(
            self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int
        ) -> Reply:
            reply = super().client(work, message, memory, data, round, seed)
            other = act(self, reply, work, data)
            return other if isinstance(other, Reply) else reply

    return Hostile


def in_commons(self: Any, reply: Reply, work: Work, data: ClientData) -> None:
    assert data.commons is not None
    data.commons.x[0] = data.x[0].float()


KEEPS: dict[str, Act] = {
    "method state (stolen)": lambda self, reply, work, data: object.__setattr__(self, "stolen", data.x.clone()),
    "class state (Hostile.stolen)": lambda self, reply, work, data: setattr(type(self), "stolen", data.x.clone()),
    "work (names)": lambda self, reply, work, data: setattr(work, "stolen", data.x.clone()),
    "work (initial)": lambda self, reply, work, data: work.initial.buffer[:1].fill_(float(data.x[0].float().mean())),
    "work (noise.key)": lambda self, reply, work, data: setattr(work.noise, "key", (0, 0)),
    "work (module)": lambda self, reply, work, data: setattr(work, "module", deepcopy(work.module)),
    "work (rates)": lambda self, reply, work, data: setattr(work, "rates", [float(data.x[0].float().mean())]),
    "commons": in_commons,
}
"""The name that the ledger has of what is kept, and what a client does."""


@pytest.mark.parametrize("name", KEEPS)
def test_what_a_method_keeps_of_a_client_is_named(name: str, digits: Digits) -> None:
    federation = digits(sizes=(5, 6), method=FedMix()).training(PRIVATE)  # FedMix: so that clients have commons
    ledger = federation.run(client_of(KEEPS[name])(), federation.plan(1))[-1][0].ledger
    assert name in ledger.uncovered, ledger.uncovered
    assert ledger.epsilon_of_all(0, 1e-5) is None


def test_what_a_client_does_to_its_message_reaches_no_other_client(digits: Digits) -> None:
    class Writes(FedAvg):
        def client(self, work: Work, message: Message, *rest: Any) -> Reply:
            reply = super().client(work, message, *rest)
            flat(message.common, "model").buffer.fill_(7.0)
            return reply

    federation = digits().training(PRIVATE)
    honest, hostile = (federation.run(cast("Any", m), federation.plan(2))[-1][0] for m in (FedAvg(), Writes()))
    assert torch.equal(honest.model.buffer, hostile.model.buffer)
    assert not hostile.ledger.uncovered


def _rows(worker: Worker, shared: Tensor, job: int) -> int:
    clients = worker.data.clients
    return len(clients) + len(clients.store) + clients.store.x.untyped_storage().nbytes() + len(worker.data.real)


def test_a_job_of_the_server_has_no_clients(digits: Digits) -> None:
    class Reads(FedAvg):
        def merge(self, executor: Executor, state: State, *rest: Any) -> State:
            seen = torch.tensor(executor.map(_rows, torch.zeros(1), [0]))
            return {**super().merge(executor, state, *rest), "seen": seen}

    federation, method = digits(), cast("Any", Reads())
    assert data(federation.run(method, federation.plan(1))[-1][0].state["seen"]).tolist() == [0]


def test_a_client_sees_nothing_of_the_one_before(digits: Digits) -> None:

    class Looks(FedAvg):
        def client(self, work: Work, *rest: Any) -> Reply:
            gradients = sum(p.grad is not None for p in work.named.values())
            (group,) = work.optimizer.param_groups
            moved = float((work.params.buffer - work.initial.buffer).norm())
            numbers = {"moved": moved, "gradients": gradients, "state": len(work.optimizer.state), "rate": group["lr"]}
            reply = super().client(work, *rest)
            group["lr"] = 3.0
            return replace(reply, metrics=numbers)

    federation = digits(momentum=0.9).training(PRIVATE)
    for now, facts in federation.run(cast("Any", Looks()), federation.plan(2)):
        assert [facts[f"train/{name}"] for name in ("moved", "gradients", "state", "rate")] == [0, 0, 0, 0.1]
        assert not now.ledger.uncovered


@dataclass(frozen=True)
class Twice(FedAvg):
    """It trains twice, the second time from the first result; ``names``: how many of the two it names."""

    names: int = 1
    bare: bool = False

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")

        def write(params: Any) -> None:
            next(iter(params.values())).data.add_(float(data.x.float().mean()))

        first = work.local(x, data, seed, add_to_grad=write if self.bare else None)
        spent, start = first.spent, copy(first.model)
        second = work.local(start, data, seed + 1)
        named = [second.spent.with_names("delta"), spent.with_names("delta")][: self.names]
        return Reply({"delta": sub(second.model, x)}, weight=work.weight(data), releases=named)


@pytest.mark.parametrize("names", [1, 2])
def test_every_training_is_charged_whether_it_is_named_or_not(names: int, digits: Digits) -> None:
    federation = digits().training(PRIVATE)
    ledger = federation.run(Twice(names), federation.plan(1))[-1][0].ledger
    assert ledger.updates.covered == {i: {(5 / n, 2.0): 2 * -(-n // 5)} for i, n in enumerate((9, 16, 12, 20, 7))}
    assert not ledger.uncovered
    assert ledger.updates.names == (("delta", "local training") if names == 1 else ("delta",))


def test_a_training_that_nothing_protects_is_not_hidden_behind_a_covered_one(digits: Digits) -> None:
    federation = digits().training(PRIVATE)
    ledger = federation.run(Twice(1, bare=True), federation.plan(1))[-1][0].ledger
    assert ledger.uncovered == {"local training (the loss or add_to_grad writes the weights)": 5}
    assert ledger.epsilon_of_all(0, 1e-5) is None


def test_a_reply_is_its_tensors_and_nothing_else(digits: Digits) -> None:
    """Neither fields of a subclass, nor metrics, nor attributes of a tensor, nor what a view is a part of."""

    @dataclass(frozen=True)
    class More(Reply):
        stolen: Tensor | None = None

    def act(self: Any, reply: Reply, work: Work, data: ClientData) -> Reply:
        part = data.x[:1, :1, :1, :1]
        vars(part)["stolen"] = data.x
        return More(reply.sums, {"part": part}, metrics={"pixel": float(data.x[0, 0, 0, 0])}, stolen=data.x)

    class Takes(client_of(act)):
        def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, *rest: Any) -> State:
            counts = [
                [hasattr(r, "stolen") + hasattr(r.each["part"], "stolen"), len(r.metrics),
                 data(r.each["part"]).untyped_storage().nbytes()] for r in replies.values()
            ]  # fmt: skip
            return {**super().merge(executor, state, total, replies, *rest), "found": torch.tensor(counts)}

    federation = digits().training(PRIVATE)
    now = federation.run(cast("Any", Takes()), federation.plan(1))[-1][0]
    assert data(now.state["found"]).tolist() == [[0, 0, 1]] * 5
    assert now.ledger.uncovered == {"delta": 5, "part": 5}


class Aliases(FedAvg):
    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        return replace(reply, each={"y": work.params}, memory={"moment": work.params})

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, *rest: Any) -> State:
        sent = torch.stack([data(reply.each["y"]) for reply in replies.values()])
        return {**super().merge(executor, state, total, replies, *rest), "sent": sent}


def test_memory_of_the_worker_that_a_method_sends_or_keeps_is_copied(digits: Digits) -> None:
    federation, method = digits(sizes=(9, 16)), cast("Any", Aliases())
    now = federation.run(method, federation.plan(1, blocks=1))[-1][0]
    sent = data(now.state["sent"])
    assert not torch.equal(sent[0], sent[1])  # each its own, not the last training's
    assert torch.allclose(sent.mean(0), now.model.buffer, atol=1e-6)
    assert all(torch.equal(flat(now.memory[i], "moment").buffer, row) for i, row in enumerate(sent))


TRIPLED = torch.tensor([0, 0, 0, 1, 2, 3])


def _in_place(data: ClientData) -> ClientData:
    data.x[:3] = data.x[0].clone()
    return data


LISTS: dict[str, Callable[[ClientData], ClientData]] = {
    "rows": lambda data: data.subset(TRIPLED),
    "without their numbers": lambda data: ClientData(data.x[TRIPLED], data.y[TRIPLED]),
    "as other numbers": lambda data: ClientData(data.x[TRIPLED].float() / 2, data.y[TRIPLED]),
    "in place of others": _in_place,
}


@pytest.mark.parametrize("name", LISTS)
def test_an_example_that_a_method_lists_three_times_is_charged_three_times(name: str, digits: Digits) -> None:
    class Lists(FedAvg):
        def client(
            self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int
        ) -> Reply:
            return super().client(work, message, memory, LISTS[name](data), round, seed)

    federation = digits(sizes=(6, 8)).training(LocalSGD(1, 2, dp=DPSGD(2.0, 1.0)))
    ledger = federation.run(Lists(), federation.plan(1))[-1][0].ledger
    n = {0: 6, 1: 8 if name == "in place of others" else 6}
    for i, events in ledger.updates.covered.items():
        [(key, steps)] = events.items()
        assert key == pytest.approx((1 - (1 - 2 / n[i]) ** 3, 2 / 3))
        assert steps == -(-n[i] // 2)
    once = federation.run(FedAvg(), federation.plan(1))[-1][0].ledger
    assert (ledger.epsilon_of_all(0, 1e-5) or 0) > 3 * (once.epsilon_of_all(0, 1e-5) or 1)


def test_equal_examples_of_a_client_are_not_taken_for_one_listed_twice(digits: Digits) -> None:
    federation = digits(sizes=(6, 8)).training(LocalSGD(1, 2, dp=DPSGD(2.0, 1.0)))
    work, rows = federation.work(), federation.data.clients[0]
    alike = ClientData(rows.x[TRIPLED], rows.y[TRIPLED])
    work.begin(1, alike)
    assert work.times_listed(alike) == 1
    assert work.times_listed(alike.subset(torch.tensor([0, 1, 2, 0]))) == 2
    loop = replace(work.loop, dp=DPSGD(2.0, 1.0, Target(3.0, 1e-5, 1)))
    with pytest.raises(ValueError, match="listed 2 times"):
        loop.run(work, federation.model, alike.subset(torch.tensor([3, 3])), 0)


@pytest.mark.parametrize("alpha", [1.5, 4.0, 16.0])
@pytest.mark.parametrize("q", [0.05, 0.5])
def test_what_is_charged_bounds_a_sum_with_several_copies(alpha: float, q: float) -> None:
    """The Renyi divergences of a sum with m copies of an example, each in the batch with probability q."""
    m, sigma = 3, 2.0
    step = Release(mechanism=SAMPLED_GAUSSIAN, q=q, sigma=sigma, sensitivity=1.0)
    spent = compose_steps(step, q, 1, m)
    assert spent.sigma * spent.sensitivity == pytest.approx(sigma)  # the noise that there is
    at = np.linspace(-60, 80, 70_001, dtype=np.longdouble)
    density = [np.exp(-((at - k) ** 2) / np.longdouble(2 * sigma**2)) for k in range(m + 1)]
    copies = sum(comb(m, k) * q**k * (1 - q) ** (m - k) * density[k] for k in range(m + 1))
    charged = (1 - spent.q) * density[0] + spent.q * density[round(spent.sensitivity)]

    def renyi(first: Any, other: Any) -> Any:
        return np.sum((first / other) ** alpha * other)

    assert renyi(copies, density[0]) <= renyi(charged, density[0])
    assert renyi(density[0], copies) <= renyi(density[0], charged)


@pytest.mark.parametrize(
    ("sums", "metrics", "word"),
    [({"extra": torch.ones(3, requires_grad=True)}, {}, "Reply.sums"),
     ({"extra": torch.eye(3).to_sparse()}, {}, "Reply.sums"), ({}, {"extra": 10**400}, "Reply.metrics")],
)  # fmt: skip
def test_a_bad_reply_names_the_method(sums: Payload, metrics: dict[str, Any], word: str, digits: Digits) -> None:
    def act(self: Any, reply: Reply, work: Work, data: ClientData) -> Reply:
        return replace(reply, sums={**reply.sums, **sums}, metrics={**reply.metrics, **metrics})

    federation = digits(sizes=[5], linear=True)
    with pytest.raises(ClientError, match=rf"(?s)Hostile.*{word}.*extra|{word}.*extra.*Hostile"):
        list(federation.run(client_of(act)(), federation.plan(1)))
