"""What clients train on after each sharing stage, what the exchange costs, and what of it leaves whom."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.algorithms.server_pool import OnPool
from fedcommons.config import parts
from fedcommons.config.parts import KINDS
from fedcommons.config.sections import Data, Partition
from fedcommons.core.release import SAMPLED_GAUSSIAN
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.federation.at_server import AtServer
from fedcommons.generators.generator import Receipt
from fedcommons.runs import inputs
from fedcommons.runs.inputs import deal
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.local_synthetic import LocalSynthetic
from fedcommons.sharing.real import Real
from fedcommons.sharing.server_synthetic import ServerSynthetic
from fedcommons.sharing.shuffled_real import ShuffledReal
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import (
    Contribution,
    Contributions,
    Generating,
    Shared,
    share,
    share_by_method,
)
from fedcommons.testing import Federation
from lightning_modules import Classifier
from lightning_modules.networks import Linear

DATASET = inputs.load(Data())
N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
SYNTHETIC = [LocalSynthetic(), ShuffledSynthetic()]


def dealt(name: str = "dirichlet_niid", seed: int = 0) -> Dealt:
    """The digits of five clients, unequal ones unless cut IID."""
    cut = deal(Partition(name, n_clients=5), DATASET.train.y.numpy(), DATASET.n_classes, seed)
    return Dealt(Clients(DATASET.train, cut.rows), DATASET.n_classes, DATASET.flip, seed)


def images(x: Tensor) -> Counter[bytes]:
    """Images as a multiset."""
    return Counter(image.numpy().tobytes() for image in x)


def test_only_the_synthetic_stages_need_generators() -> None:
    needing = [n for n in KINDS["sharing"].known if isinstance(parts.find("sharing", n)(), Generating)]
    assert sorted(needing) == ["local_synthetic", "server_synthetic", "shuffled_synthetic"]


# --- the stages


def synthetic(sizes: Sequence[int], receipt: Receipt | None = None) -> list[Contribution]:
    """Contributions of which every image says whose it is and which: no two are the same."""
    sets = []
    for client, n in enumerate(sizes):
        x = torch.zeros(n, *DATASET.shape, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1], x[:, 0, 0, 2] = client, torch.arange(n) % 256, torch.arange(n) // 256
        sets.append(Contribution(Examples(x, torch.arange(n) % 10), receipt))
    return sets


def extra(shared: Shared, client: int) -> Tensor:
    """Images the client trains on that are not its own."""
    data = shared.data.clients[client]
    assert data.n_own is not None
    return data.x[data.n_own :]


SIZES = (300, 10, 41, 0, 123)


def test_real_is_the_clients_own_data_and_costs_nothing() -> None:
    given = dealt()
    shared = share(Real(), given)
    assert shared.data.clients is shared.data.own
    assert shared.p == 0
    assert (shared.traffic.once, shared.traffic.up, shared.traffic.down) == (0, 0, 0)
    assert list(shared.releases) == []
    for client, rows in zip(shared.data.clients, given.own.rows, strict=True):
        assert torch.equal(client.x, DATASET.train.x[rows])
        assert torch.equal(client.y, DATASET.train.y[rows])


@pytest.mark.parametrize("stage", SYNTHETIC, ids=str)
def test_synthetic_images_are_added_to_the_clients_own(stage: ShuffledSynthetic) -> None:
    given = dealt()
    shared = share(stage, given, synthetic(SIZES))
    for client, rows in enumerate(given.own.rows):
        n = len(rows)
        data = shared.data.clients[client]
        assert data.n_own == n
        assert len(data) == n + SIZES[client]
        assert torch.equal(data.x[:n], DATASET.train.x[rows])
        assert torch.equal(data.y[:n], DATASET.train.y[rows])
        assert torch.equal(shared.data.own[client].x, DATASET.train.x[rows])
    assert shared.p == pytest.approx(sum(SIZES) / (N_TOTAL + sum(SIZES)))


def test_local_synthetic_gives_every_client_its_own_images_and_sends_none() -> None:
    shared = share(LocalSynthetic(), dealt(), synthetic(SIZES))
    for client, contributed in enumerate(synthetic(SIZES)):
        assert torch.equal(extra(shared, client), contributed.examples.x)
    assert shared.traffic.once == 0


def test_the_servers_pool_reaches_nobody_else_and_travels_one_way() -> None:
    """Clients hold what they had; at the server the pool is a store of its own, without the clients' images."""
    shared = share(ServerSynthetic(), dealt(), synthetic(SIZES))
    assert shared.data.clients is shared.data.own
    assert shared.p == 0
    assert (shared.traffic.once, shared.traffic.up, shared.traffic.down) == (sum(SIZES) * (8 * 8 + 1), 0, 0)
    for both in (False, True):
        there = _at_server(replace(shared.data, serves=both))
        assert len(there.clients.store) == len(there.own.store) == 0
        assert (there.pool is not None) == both
    assert shared.data.serves
    pool = _at_server(shared.data).pool
    assert pool is not None
    assert pool.sizes == [n for n in SIZES if n]
    assert torch.equal(pool.store.x, torch.cat([s.examples.x for s in synthetic(SIZES)]))
    assert not share(ShuffledSynthetic(), dealt(), synthetic(SIZES)).data.serves


def _at_server(data: RunData) -> RunData:
    """What a job at the server can see."""
    federation = Federation(data, lambda: Classifier(Linear(DATASET.shape, 10), lr=0.1, mean=(0.0,), std=(1.0,)))
    return AtServer(federation.serial(FedAvg())).map(_seen, OnPool(federation.model, 1, 1), [0])[0]


def _seen(worker: Worker, task: OnPool, seed: int) -> RunData:
    return worker.data


def test_shuffled_synthetic_conserves_the_pool_and_mixes_it() -> None:
    shared = share(ShuffledSynthetic(), dealt(), synthetic(SIZES))
    received = [images(extra(shared, client)) for client in range(5)]
    pooled = images(torch.cat([s.examples.x for s in synthetic(SIZES)]))
    assert max(pooled.values()) == 1  # so that equal multisets below also mean disjoint parts
    assert sum(received, Counter()) == pooled
    sources = {int(x[0, 0, 0]) for x in extra(shared, 0)}
    assert sources == {0, 1, 2, 4}  # images of client i may come from any client (3 gave none)
    share_of_own = float((extra(shared, 0)[:, 0, 0, 0] == 0).float().mean())
    assert abs(share_of_own - 300 / 474) < 4 * (300 / 474 * 174 / 474 / 300) ** 0.5


def test_shuffled_images_keep_their_labels() -> None:
    shared = share(ShuffledSynthetic(), dealt(), synthetic(SIZES))
    for data in shared.data.clients:
        x, y = data.x[data.n_own :], data.y[data.n_own :]
        assert torch.equal((x[:, 0, 0, 1].long() + 256 * x[:, 0, 0, 2].long()) % 10, y)


def test_the_shuffle_is_keyed_by_the_seed() -> None:
    def first(seed: int) -> list[int]:
        pool = Contributions.of_made(dealt(), synthetic(SIZES))
        parts = pool.shuffled(5, seed)
        assert sorted(np.concatenate(parts)) == pool.rows.tolist()
        assert [len(part) for part in parts] == list(SIZES)
        return parts[0].tolist()

    assert first(0) == first(0)
    assert first(0) != first(1)


def test_a_pool_goes_up_and_comes_down_once_as_bytes_and_labels() -> None:
    shared = share(ShuffledSynthetic(), dealt(), synthetic(SIZES))
    assert shared.traffic.once == 2 * sum(SIZES) * (8 * 8 + 1)
    assert (shared.traffic.up, shared.traffic.down) == (0, 0)


@pytest.mark.parametrize("p", [0.0, 0.06, 0.5, 0.9])
def test_shuffled_real_swaps_p_of_every_clients_rows_and_conserves_them(p: float) -> None:
    given = dealt()
    shared = share(ShuffledReal(p), given)
    swapped = 0
    for after, before in zip(shared.data.clients.rows, given.own.rows, strict=True):
        assert len(after) == len(before)  # n_i unchanged
        kept = len(before) - int(p * len(before))
        assert set(after[:kept]) <= set(before)
        swapped += len(before) - kept
    assert sorted(np.concatenate(list(shared.data.clients.rows))) == sorted(np.concatenate(list(given.own.rows)))
    assert shared.p == pytest.approx(swapped / N_TOTAL)
    assert abs(shared.p - p) <= 5 / N_TOTAL  # within one image a client
    assert shared.traffic.once == 2 * swapped * (8 * 8 + 1)
    assert [rows.tolist() for rows in shared.data.own.rows] == [rows.tolist() for rows in given.own.rows]


def test_shuffled_real_brings_clients_rows_of_others() -> None:
    given = dealt()
    shared = share(ShuffledReal(0.5), given)
    for after, before in zip(shared.data.clients.rows, given.own.rows, strict=True):
        foreign = len(set(after) - set(before)) / len(after)
        assert 0.1 < foreign <= 0.5


def test_shuffled_real_is_keyed_by_the_seed() -> None:
    given = dealt("iid")
    first, again, other = (share(ShuffledReal(0.5), replace(given, seed=s)).data.clients.rows for s in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def sized(*sizes: int) -> Dealt:
    """Clients of these sizes."""
    ends = np.cumsum([0, *sizes])
    return Dealt(Clients(DATASET.train, [np.arange(*ab) for ab in pairwise(ends)]), DATASET.n_classes, False, 0)


@pytest.mark.parametrize(
    ("kind", "p", "least"),
    [(LocalSynthetic, 0.0038, 1 / 261), (ShuffledSynthetic, 0.0038, 1 / 261), (ShuffledReal, 0.0076, 1 / 130)],
)
def test_a_share_that_gives_nobody_an_image_is_refused(kind: type, p: float, least: float) -> None:
    with pytest.raises(UserError, match=rf"sharing\.p = {p:g} of 130 images is not one image"):
        kind(p).check_dealt(sized(129, 130))
    assert p < least
    for enough in (0.0, least * 1.001, 0.5):
        kind(enough).check_dealt(sized(129, 130))


def test_shuffled_real_is_not_defined_without_p() -> None:
    with pytest.raises(UserError, match=r"sharing\.p must be set for setting shuffled_real"):
        ShuffledReal().check({})
    ShuffledReal(0.0).check({})


# --- owners and releases


@pytest.mark.parametrize("stage", [Real(), *SYNTHETIC, ServerSynthetic(), ShuffledReal(0.5)], ids=str)
def test_every_row_of_the_store_knows_the_client_it_came_from(stage: Real) -> None:
    given = dealt()
    made = synthetic(SIZES) if isinstance(stage, Generating) else []
    shared = share(stage, given, made)
    assert shared.owners is not None
    for client, rows in enumerate(given.own.rows):
        assert (shared.owners[rows] == client).all()
    behind = shared.data.clients.store.x[N_TOTAL:]
    assert len(shared.owners) == N_TOTAL + len(behind)
    assert shared.owners[N_TOTAL:].tolist() == behind[:, 0, 0, 0].tolist()  # which the images themselves say


RECEIPT = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=1.5, sensitivity=1.0, steps=20)


@pytest.mark.parametrize("stage", SYNTHETIC, ids=str)
@pytest.mark.parametrize("receipt", [RECEIPT, None, Receipt()], ids=["private", "none", "plain"])
def test_synthetic_images_are_as_covered_as_their_generators_say(stage: LocalSynthetic, receipt: Receipt) -> None:
    """Also those that stay: a real image has a part in many of them. Client 3 made none."""
    releases = share(stage, dealt(), synthetic(SIZES, receipt)).releases
    assert [r.client for r in releases] == [0, 1, 2, 4]
    for r in releases:
        assert r.what == ("synthetic images",)
        assert r.covered == (receipt is RECEIPT)
        if receipt is RECEIPT:
            assert (r.q, r.sigma, r.sensitivity, r.steps) == (0.1, 1.5, 1.0, 20)


def test_real_images_that_leave_are_uncovered_and_those_that_stay_are_no_event() -> None:
    given = sized(100, 3, 100)  # of three images 0.3 is none
    releases = share(ShuffledReal(0.3), given).releases
    assert [(r.client, r.what, r.covered) for r in releases] == [
        (0, ("real images",), False),
        (2, ("real images",), False),
    ]


# --- one store


@pytest.mark.parametrize("stage", [Real(), *SYNTHETIC, ServerSynthetic(), ShuffledReal(0.5)], ids=str)
@pytest.mark.parametrize("method", [FedAvg(), FedMix(mean_size=16)], ids=["", "fedmix"])
def test_an_actor_holds_every_example_once(stage: Real, method: FedAvg) -> None:
    """What is sent to it has each image's bytes once, also where a method shares something and after a move."""
    given = dealt()
    made = synthetic(SIZES) if isinstance(stage, Generating) else []
    shared = share_by_method(share(stage, given, made), method, 10, 0)
    data = shared.data
    n = N_TOTAL + sum(len(one.examples) for one in made)
    sent = n * (64 + 8) + sum(len(part) * 8 for part in (shared.data.clients.rows.flat, shared.data.own.rows.flat))
    common = shared.data.clients.commons
    sent += common.x.nbytes + common.y.nbytes if common else 0
    assert (common is not None) == isinstance(method, FedMix)
    for held in (data, data.to(torch.device("cpu")), pickle.loads(pickle.dumps(data))):
        assert len(pickle.dumps(held)) < sent + 8 * n + 10_000  # the pool's rows, and names
        assert held.own.store is held.clients.store
        assert held.pool is None or held.pool.store is held.clients.store
    assert made or shared.data.clients.store is given.own.store  # nothing is copied where nothing is made
    there = data.to(torch.device("meta"))
    assert there.own.store is there.clients.store
    assert there.pool is None or there.pool.store is there.clients.store


def test_contributions_of_another_type_would_change_the_real_examples() -> None:
    """Put behind uint8 images in one tensor, floats would make all of them floats, which nobody normalises."""
    x = torch.zeros(2, *DATASET.shape)
    with pytest.raises(ValueError, match=r"must be torch\.uint8 \(1, 8, 8\) like real examples, not torch\.float32"):
        Contributions.of_made(dealt(), [Contribution(Examples(x, torch.zeros(2, dtype=torch.int64)))] * 5)


@pytest.mark.parametrize("name", ["iid", "dirichlet_niid"])
def test_how_much_of_each_clients_data_a_stage_gives_away(name: str) -> None:
    """What is copied, or what a generator saw; nothing where images stay with their client."""
    given = dealt(name)
    few = Examples(255 - given.own.store.x[:10], given.own.store.y[:10])
    made = [Contribution(few, seen=n // 2) for n in given.own.sizes]
    swapped = ShuffledReal(0.3)
    for stage, seen in (
        (Real(), []),
        (swapped, swapped.sizes(given)),
        (LocalSynthetic(), [0] * 5),
        (ShuffledSynthetic(), [n // 2 for n in given.own.sizes]),
    ):
        assert [r.seen for r in share(stage, given, made).releases] == seen
    shared = share_by_method(share(Real(), given), FedMix(), 10, 0)
    assert [r.seen for r in shared.releases] == given.own.sizes
