"""What every sharing stage of the package promises: run on each in ``config/registry.py``, without a name in it."""

import pickle
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cut_clients import numbered, of_digits
from five_clients import DATASET

from fedcommons import Contribution, Generating, Stage, TakesLong
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.config import registry
from fedcommons.sharing.disclosure import require_once
from fedcommons.sharing.exchange import Shared, share, share_by_method

N_TOTAL = len(DATASET.train)
SMALL = {"p": 0.3, "c": 0.3, "noise_multiplier": 1.0, "features": 40, "per_class": 2, "steps": 3, "iterations": 3,
         "batch": 2, "width": 8}  # fmt: skip

pytestmark = pytest.mark.parametrize("name", registry.KINDS["sharing"].components)


def build(name: str, **more: Any) -> Any:
    has = registry.constants("sharing", name)
    return registry.make("sharing", name, {n: value for n, value in {**SMALL, **more}.items() if n in has})


def generate(stage: Stage) -> list[Contribution]:
    return numbered() if isinstance(stage, Generating) else []


def play(name: str, seed: int = 0) -> Shared:
    return share(stage := build(name), of_digits(seed=seed), generate(stage))


@cache
def shared(name: str) -> Any:
    return play(name)


def same(a: Shared, b: Shared) -> bool:
    rows = (a.data.clients.rows.flat, b.data.clients.rows.flat)
    return torch.equal(*rows) and torch.equal(a.data.clients.store.x, b.data.clients.store.x)


def test_real_examples_stay_as_they_are_and_each_is_held_by_some_client_once_a_client(name: str) -> None:
    start, result = of_digits(), shared(name)
    data, owners = result.data, result.owners
    assert len(owners) == len(data.clients.store)
    assert all((owners[rows] == client).all() for client, rows in enumerate(start.clients.rows))
    if isinstance(build(name), Generating):
        assert owners[N_TOTAL:].tolist() == data.clients.store.x[N_TOTAL:, 0, 0, 0].tolist()
    assert torch.equal(data.clients.store.x[:N_TOTAL], DATASET.train.x)
    assert torch.equal(data.clients.store.y[:N_TOTAL], DATASET.train.y)
    assert [rows.tolist() for rows in data.real.rows] == [rows.tolist() for rows in start.clients.rows]
    assert set(range(N_TOTAL)) <= {row for rows in data.clients.rows for row in rows.tolist()}
    for client in data.clients:
        assert len(set(client.ids.tolist())) == len(client)
        assert torch.equal(client.x, data.clients.store.x[client.ids])
        assert 0 < client.n_own <= len(client)
    assert start.now == start.before


def test_one_seed_shares_the_same_bits_and_another_seed_others(name: str) -> None:
    torch.manual_seed(99)
    again, other = play(name), play(name, 1)
    assert same(again, shared(name))
    stays = shared(name).data.clients is shared(name).data.real or not shared(name).traffic.once
    assert same(other, again) == stays


def test_what_is_declared_and_the_bytes_are_those_of_the_examples_that_travel(name: str) -> None:
    stage, start, result = build(name), of_digits(), shared(name)
    assert (result.traffic.up, result.traffic.down) == (0, 0)
    released, events = stage.release(start, stage.make(start, generate(stage)))
    assert result.releases == list(events)  # the engine sees no more leave
    require_once(stage, result.data)
    if (stated := stage.assign(start, released).nbytes) is not None:
        assert result.traffic.once == stated > 0
        return
    pool = {row for rows in (result.data.pool.rows if result.data.pool else []) for row in rows.tolist()}
    up, down = set(pool), 0
    for client, rows in enumerate(result.data.clients.rows):
        received = [row for row in rows.tolist() if result.owners[row] != client or row in pool]
        up, down = up | set(received), down + len(received)
    assert result.traffic.once == (len(up) + down) * (8 * 8 + 1)


def test_whoever_gives_something_away_has_an_event_and_raw_examples_are_uncovered(name: str) -> None:
    result = shared(name)
    pool = [row for rows in (result.data.pool.rows if result.data.pool else []) for row in rows.tolist()]
    pairs = [(i, row) for i, rows in enumerate(result.data.clients.rows) for row in rows.tolist()]
    sent_rows = {*pool, *(row for i, row in pairs if result.owners[row] != i)}
    real = {row for row in sent_rows if row < N_TOTAL}
    events = {event.client: event for event in result.releases}
    assert {int(result.owners[row]) for row in sent_rows} <= events.keys() <= set(range(5))
    assert result.facts["disclosed_raw"] == len(real) / N_TOTAL
    raw = Counter(int(result.owners[row]) for row in real)
    for client, n in raw.items():
        assert not events[client].covered
        assert events[client].n_disclosed == n
    if isinstance(build(name), Generating):  # what a generator saw is disclosed where its images leave the client
        assert {event.n_disclosed for event in result.releases} == {7 if sent_rows else 0}
    assert all(event.covered == hasattr(build(name), "noise_multiplier") for event in result.releases)


@pytest.mark.parametrize("method", [FedAvg(), FedMix(mean_size=16)], ids=["", "fedmix"])
def test_an_actor_holds_every_example_once(name: str, method: FedAvg) -> None:
    result = share_by_method(shared(name), method, 10, 0)
    data, n = result.data, len(result.data.clients.store)
    sent = n * (64 + 8) + sum(len(part) * 8 for part in (data.clients.rows.flat, data.real.rows.flat))
    sent += sum(len(client.weight) * 8 for client in data.clients if client.weight is not None)
    common = data.clients.commons
    sent += common.x.nbytes + common.y.nbytes if common else 0
    assert (common is not None) == isinstance(method, FedMix)
    for copy in (data, pickle.loads(pickle.dumps(data)), data.to(torch.device("meta"))):
        assert copy.real.store is copy.clients.store
        assert copy.pool is None or copy.pool.store is copy.clients.store
        assert copy.clients.store.x.is_meta or len(pickle.dumps(copy)) < sent + 8 * n + 10_000  # pool's rows, names
    assert (n > N_TOTAL) == (data.clients.store is not DATASET.train)  # no copy where nothing is generated


def test_a_shorter_variant_contributes_as_much_after_less_work(name: str) -> None:
    stage = build(name, steps=100, iterations=12)
    if isinstance(stage, TakesLong):
        few, times = stage.shorter()
        assert times > 1
        assert len(share(few, of_digits()).data.clients.store) == len(shared(name).data.clients.store)
        assert build(name).shorter() == (build(name), 1.0)


def test_a_share_of_zero_leaves_all_as_it_was(name: str) -> None:
    stage = build(name, p=0.0, c=0.0)
    if getattr(stage, "p", getattr(stage, "c", None)) is None or isinstance(stage, Generating):
        return
    result = share(stage, of_digits())
    assert (result.traffic.once, list(result.releases), result.p, result.disclosed) == (0, [], 0, 0)
    pairs = zip(result.data.clients.rows, of_digits().clients.rows, strict=True)
    assert all(np.array_equal(np.sort(a), np.sort(b)) for a, b in pairs)
