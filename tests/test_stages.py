"""The stages without noise and those of users: who gets which examples, what is covered, and what leaves whom."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cut_clients import SIZES, numbered, of_digits
from five_clients import DATASET, RECEIPT, N, dealt
from torch import Tensor

from fedcommons import ClientError, Clients, Common, Dealt, Examples, Receipt, UserError
from fedcommons.accounting.communication import images_nbytes
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_pool import OnPool
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.core.worker import RunData, Worker
from fedcommons.federation.at_server import AtServer
from fedcommons.sharing.local_synthetic import LocalSynthetic
from fedcommons.sharing.real import Real
from fedcommons.sharing.server_synthetic import ServerSynthetic
from fedcommons.sharing.shuffled_real import ShuffledReal
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import Assigned, Contribution, Contributions, Shared, share, share_by_method
from fedcommons.testing import Federation
from lightning_modules import Classifier
from lightning_modules.networks import Linear

N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259


def sized(*sizes: int) -> Dealt:
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return Dealt(Clients(DATASET.train, rows), 10, False, 0)


POOLED = torch.cat([one.examples.x for one in numbered()])


def extra(shared: Shared, client: int) -> Tensor:
    start, data = of_digits().own[client], shared.data.clients[client]
    assert data.n_own == len(start)
    assert torch.equal(data.x[: len(start)], start.x)
    assert torch.equal(data.y[: len(start)], start.y)
    more = data.x[len(start) :]
    assert torch.equal((more[:, 0, 0, 1].long() + 256 * more[:, 0, 0, 2].long()) % 10, data.y[len(start) :])
    return more


def test_local_synthetic_gives_every_client_its_own_images_and_sends_none() -> None:
    shared = share(LocalSynthetic(), of_digits(), numbered())
    for client, contributed in enumerate(numbered()):
        assert torch.equal(extra(shared, client), contributed.examples.x)
    assert shared.traffic.once == 0


def test_shuffled_synthetic_conserves_the_pool_and_mixes_it_with_its_labels() -> None:
    shared = share(ShuffledSynthetic(), of_digits(), numbered())
    each = [extra(shared, client) for client in range(5)]
    received = Counter(x.numpy().tobytes() for of in each for x in of)
    assert received == Counter(x.numpy().tobytes() for x in POOLED)
    assert [len(of) for of in each] == list(SIZES)
    sources = each[0][:, 0, 0, 0]
    assert set(sources.tolist()) == {0, 1, 2, 4}  # images of client i may come from any client (3 gave none)
    assert shared.p == pytest.approx(sum(SIZES) / (N_TOTAL + sum(SIZES)))


def _at_server(data: RunData) -> RunData:
    federation = Federation(data, lambda: Classifier(Linear(DATASET.shape, 10), lr=0.1, mean=(0.0,), std=(1.0,)))
    return AtServer(federation.serial(FedAvg())).map(_seen, OnPool(federation.model, 1, 1), [0])[0]


def _seen(worker: Worker, task: OnPool, seed: int) -> RunData:
    return worker.data


def test_the_servers_pool_reaches_no_client_and_travels_one_way() -> None:
    shared = share(ServerSynthetic(), of_digits(), numbered())
    assert shared.data.clients is shared.data.own
    assert (shared.p, shared.traffic.once) == (0, sum(SIZES) * (8 * 8 + 1))
    for both in (False, True):
        there = _at_server(replace(shared.data, serves=both))
        assert len(there.clients.store) == len(there.own.store) == 0
        assert (there.pool is not None) == both
    pool = _at_server(shared.data).pool
    assert pool is not None
    assert pool.sizes == [n for n in SIZES if n]
    assert torch.equal(pool.store.x, POOLED)


@pytest.mark.parametrize("p", [0.0, 0.06, 0.29, 0.9])
def test_shuffled_real_swaps_p_of_every_clients_rows_and_conserves_them(p: float) -> None:
    start = of_digits()
    shared = share(ShuffledReal(p), start)
    swapped, foreign = 0, 0
    for after, before in zip(shared.data.clients.rows, start.own.rows, strict=True):
        assert len(after) == len(before)  # n_i unchanged
        kept = len(before) - int(p * len(before) + 1e-9)
        assert set(after[:kept].tolist()) <= set(before.tolist())
        swapped, foreign = swapped + len(before) - kept, foreign + len(set(after.tolist()) - set(before.tolist()))
    assert sorted(np.concatenate(list(shared.data.clients.rows))) == sorted(np.concatenate(list(start.own.rows)))
    assert shared.p == pytest.approx(swapped / N_TOTAL)
    assert abs(shared.p - p) <= 5 / N_TOTAL  # within one image a client
    assert shared.traffic.once == 2 * swapped * (8 * 8 + 1)
    assert 0.5 * swapped <= foreign <= swapped
    assert ShuffledReal(0.29).sizes(sized(100, 99)) == [29, 28]


@pytest.mark.parametrize(
    ("kind", "p", "least"),
    [(ShuffledSynthetic, 0.0038, 1 / 261), (ShuffledReal, 0.0076, 1 / 130)],
    ids=["shuffled", "real"],
)
def test_a_share_that_gives_no_client_an_image_is_refused(kind: type, p: float, least: float) -> None:
    with pytest.raises(UserError, match=rf"sharing\.p = {p:g} .*not one image"):
        kind(p).check_dealt(sized(129, 130))
    assert p < least
    for enough in (0.0, least * 1.001):
        kind(enough).check_dealt(sized(129, 130))


@pytest.mark.parametrize("stage", [LocalSynthetic(), ShuffledSynthetic(), ServerSynthetic()], ids=str)
def test_synthetic_images_are_as_covered_as_their_generators_say(stage: LocalSynthetic) -> None:
    for receipt in (RECEIPT, None, Receipt()):
        releases = share(stage, of_digits(), numbered(receipt)).releases
        assert [r.client for r in releases] == [0, 1, 2, 4]
        for r in releases:
            assert r.what == ("synthetic images",)
            assert r.covered == (receipt is RECEIPT)
            if receipt is RECEIPT:
                assert (r.q, r.sigma, r.sensitivity, r.steps) == (0.1, 1.5, 1.0, 20)


def test_contributions_of_another_type_would_change_the_real_examples() -> None:
    x = torch.zeros(2, *DATASET.shape)
    with pytest.raises(ValueError, match=r"torch\.uint8 \(1, 8, 8\)"):
        Contributions.of_made(of_digits(), [Contribution(Examples(x, torch.zeros(2, dtype=torch.int64)))] * 5)


NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Means:
    """Every client publishes its mean image; all get all of them, together as heavy as one example."""

    declared: int = N
    change: Callable[[Assigned], Assigned] = lambda rows: rows

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        means = [client.x.float().mean(0, keepdim=True).to(torch.uint8) for client in dealt.own]
        return Contributions.of_made(dealt, [Contribution(Examples(x, torch.zeros(1).long())) for x in means])

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        noise: dict[str, Any] = {"mechanism": SAMPLED_GAUSSIAN, "sigma": 1.0, "sensitivity": 0.1, "steps": 1}
        return contributed, [Release(i, ("mean image",), **noise) for i in range(self.declared)]

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        m = len(released.rows)
        weights = [np.concatenate([np.ones(n), np.full(m, 1 / m)]) for n in dealt.own.sizes]
        every = [released.rows] * len(dealt.own)
        return self.change(Assigned(dealt.own.rows, every, weights, n_own=dealt.own.sizes, pool=[released.rows]))


def test_a_users_stage_has_owners_releases_and_weights() -> None:
    start = dealt()
    shared = share(Means(), start)
    assert [(r.client, r.covered) for r in shared.releases] == [(i, True) for i in range(5)]
    assert shared.owners is not None
    assert shared.owners[N_TOTAL:].tolist() == list(range(5))
    assert shared.disclosed == 0  # an image that is computed from real ones is none of them
    data, own = shared.data.clients[2], shared.data.own[2]
    assert data.weight is not None
    assert torch.allclose(data.weight, torch.cat([torch.ones(259), torch.full((5,), 0.2)]) * (264 / 260))  # mean 1
    assert data.size == pytest.approx(260)
    assert torch.equal(data.x[-3], own.x.float().mean(0).to(torch.uint8))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        *(({"n_own": n_own}, UserError, "n_own .*0 or more") for n_own in (3, [float("nan")] * 5, [-1] * 5)),
        *(({"once": once}, UserError, "once .*number of bytes") for once in (-1, 1.5)),
        ({"received": [NONE] * 4}, ClientError, "shorter"),
        ({"weights": [np.ones(264)] * 4}, ClientError, "one weight"),
    ],
)  # fmt: skip
def test_rows_weights_and_numbers_are_of_every_client(change: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        share(Means(change=lambda rows: replace(rows, **change)), dealt())
    assert share(Means(change=lambda rows: replace(rows, n_own=[0] * 5, once=0)), dealt()).traffic.once == 0


@dataclass(frozen=True)
class Moves(Real):
    """Hands out rows as ``how`` says, and states no bytes; client i contributes two copies of its rows."""

    how: Callable[[Dealt, Contributions], Assigned]

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        each = [dealt.own.store[rows[:2]] for rows in dealt.own.rows]
        return Contributions.of_made(dealt, [*map(Contribution, each)])

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        return self.how(dealt, released)


MOVES: dict[str, tuple[Callable[[Dealt, Contributions], Assigned], int]] = {
    "to all others": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5), 10 + 4 * 10),
    "to all others, each row listed three times": (lambda d, r: Assigned(d.own.rows, [np.tile(r.rows, 3)] * 5), 50),
    "nowhere": (lambda d, r: Assigned(d.own.rows, r.of_each(5)), 0),
    "one real row that was not contributed": (
        lambda d, r: Assigned(d.own.rows, [d.own.rows[3][:1], *r.of_each(5)[1:]], pool=[]), 2 + 1 + 1
    ),
    "what the stage states": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5, once=65 * 7), 7),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_the_engine_counts_the_bytes_of_the_rows_that_travel(name: str) -> None:
    how, examples = MOVES[name]
    assert share(Moves(how), dealt()).traffic.once == examples * (8 * 8 + 1)


def test_labels_of_shared_examples_have_as_many_bytes_as_their_classes_need() -> None:
    sizes = [replace(dealt(), n_classes=n).label_nbytes for n in (None, 1, 2, 256, 257, 65_536, 65_537)]
    assert sizes == [0, 1, 1, 1, 2, 2, 3]
    assert images_nbytes(7, (30,), 4) == 7 * (30 * 4 + 1)


@dataclass(frozen=True)
class Sharing:
    nbytes: int | None = 0

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        return Common(clients.store[slice(0, 3)], self.nbytes)


def test_what_is_not_declared_is_uncovered() -> None:
    silent = share(Means(declared=2), dealt()).releases
    assert [(r.client, r.covered) for r in silent] == [(0, True), (1, True), (2, False), (3, False), (4, False)]


def test_what_a_method_shares_is_uncovered_and_counted_unless_it_states_a_number() -> None:
    shared = share(Real(), dealt())
    for nbytes, once in ((None, 5 * 3 * (8 * 8 + 8)), (0, 0), (7, 7)):
        outcome = share_by_method(shared, Sharing(nbytes), 10, 0)
        assert outcome.traffic.once == once
        assert [(r.client, r.covered, r.seen) for r in outcome.releases] == [(i, False, 259) for i in range(5)]
    with pytest.raises(UserError, match=r"Common\.nbytes"):
        share_by_method(shared, Sharing(-1), 10, 0)
