"""User-defined stages and methods: row owners, example weights, bytes, and undeclared disclosure in the ledger."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from five_clients import DATASET, N, dealt

from fedcommons.core.algorithm import Common
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, UserError
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import Assigned, Contribution, Contributions, share, share_by_method

N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
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
    assert shared.p == pytest.approx(25 / (N_TOTAL + 25))
    assert shared.data.pool is not None
    assert shared.data.pool.sizes == [5]
    assert shared.disclosed == 0  # an image that is computed from real ones is none of them
    data, own = shared.data.clients[2], shared.data.own[2]
    assert data.weight is not None
    assert torch.allclose(data.weight, torch.cat([torch.ones(259), torch.full((5,), 0.2)]) * (264 / 260))  # mean 1
    assert data.size == pytest.approx(260)
    assert torch.equal(data.x[:259], own.x)
    assert own.weight is None
    assert torch.equal(data.x[-3], own.x.float().mean(0).to(torch.uint8))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        *(({"n_own": n_own}, UserError, "n_own .*0 or more")
          for n_own in ([-1], 3, ["x"] * 5, [float("nan")] * 5, [1, 2, 3, 4], [-1] * 5)),
        *(({"once": once}, UserError, "once .*number of bytes") for once in (-1, 1.5, "x", float("nan"))),
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


def _around(released: Contributions) -> list[np.ndarray]:
    """Each client's contributions for the next client."""
    each = released.of_each(5)
    return [each[-1], *each[:-1]]


MOVES: dict[str, tuple[Callable[[Dealt, Contributions], Assigned], int]] = {
    "to all others": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5), 10 + 4 * 10),
    "to all others, each row listed three times": (lambda d, r: Assigned(d.own.rows, [np.tile(r.rows, 3)] * 5), 50),
    "to all, out of a pool": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5, pool=[r.rows]), 10 + 5 * 10),
    "to the next client, as if kept": (
        lambda d, r: Assigned([np.concatenate(b) for b in zip(d.own.rows, _around(r), strict=True)], [NONE] * 5), 20
    ),
    "to a server that drops half of them": (
        lambda d, r: Assigned(d.own.rows, [r.rows[:5], *[r.rows[:0]] * 4], pool=[r.rows[:5]]), 10 + 5
    ),
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


@dataclass(frozen=True)
class Sharing:
    """A method that shares three examples and declares no release."""

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
