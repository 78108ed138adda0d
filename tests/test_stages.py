"""The stages without noise: who gets which examples, what generators' receipts cover, and what leaves whom."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from five_clients import DATASET, RECEIPT
from torch import Tensor

from fedcommons.accounting.communication import images_nbytes
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_pool import OnPool
from fedcommons.config.sections import Partition
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.federation.at_server import AtServer
from fedcommons.generators.generator import Receipt
from fedcommons.runs import inputs
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.local_synthetic import LocalSynthetic
from fedcommons.sharing.raw_copies import RawCopies
from fedcommons.sharing.server_synthetic import ServerSynthetic
from fedcommons.sharing.shuffled_real import ShuffledReal
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import Contribution, Contributions, Shared, Stage, share
from fedcommons.testing import Federation
from lightning_modules import Classifier
from lightning_modules.networks import Linear

N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
SIZES = (300, 10, 41, 0, 123)


def clients() -> Dealt:
    """The digits of five unequal clients."""
    rows = inputs.deal(Partition("dirichlet_niid", n_clients=5), DATASET.train.y.numpy(), 10, 0).rows
    return Dealt(Clients(DATASET.train, rows), 10, DATASET.flip, 0)


def sized(*sizes: int) -> Dealt:
    """Clients of these sizes."""
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return Dealt(Clients(DATASET.train, rows), 10, False, 0)


def synthetic(receipt: Receipt | None = None) -> list[Contribution]:
    """Contributions of which every image says whose it is and which: no two are the same."""
    sets = []
    for client, n in enumerate(SIZES):
        x = torch.zeros(n, *DATASET.shape, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1], x[:, 0, 0, 2] = client, torch.arange(n) % 256, torch.arange(n) // 256
        sets.append(Contribution(Examples(x, torch.arange(n) % 10), receipt))
    return sets


POOLED = torch.cat([one.examples.x for one in synthetic()])


def extra(shared: Shared, client: int) -> Tensor:
    """Images the client trains on that are not its own, which come first."""
    start, data = clients().own[client], shared.data.clients[client]
    assert data.n_own == len(start)
    assert torch.equal(data.x[: len(start)], start.x)
    assert torch.equal(data.y[: len(start)], start.y)
    more = data.x[len(start) :]
    assert torch.equal((more[:, 0, 0, 1].long() + 256 * more[:, 0, 0, 2].long()) % 10, data.y[len(start) :])
    return more


def test_local_synthetic_gives_every_client_its_own_images_and_sends_none() -> None:
    shared = share(LocalSynthetic(), clients(), synthetic())
    for client, contributed in enumerate(synthetic()):
        assert torch.equal(extra(shared, client), contributed.examples.x)
    assert shared.p == pytest.approx(sum(SIZES) / (N_TOTAL + sum(SIZES)))
    assert shared.traffic.once == 0


def test_shuffled_synthetic_conserves_the_pool_and_mixes_it_with_its_labels() -> None:
    shared = share(ShuffledSynthetic(), clients(), synthetic())
    each = [extra(shared, client) for client in range(5)]
    received = Counter(x.numpy().tobytes() for of in each for x in of)
    assert received == Counter(x.numpy().tobytes() for x in POOLED)
    assert max(received.values()) == 1
    assert [len(of) for of in each] == list(SIZES)
    sources = each[0][:, 0, 0, 0]
    assert set(sources.tolist()) == {0, 1, 2, 4}  # images of client i may come from any client (3 gave none)
    assert abs(float((sources == 0).float().mean()) - 300 / 474) < 4 * (300 / 474 * 174 / 474 / 300) ** 0.5
    assert shared.p == pytest.approx(sum(SIZES) / (N_TOTAL + sum(SIZES)))
    assert not shared.data.serves


def _at_server(data: RunData) -> RunData:
    """What a job at the server can see."""
    federation = Federation(data, lambda: Classifier(Linear(DATASET.shape, 10), lr=0.1, mean=(0.0,), std=(1.0,)))
    return AtServer(federation.serial(FedAvg())).map(_seen, OnPool(federation.model, 1, 1), [0])[0]


def _seen(worker: Worker, task: OnPool, seed: int) -> RunData:
    return worker.data


def test_the_servers_pool_reaches_no_client_and_travels_one_way() -> None:
    """Clients hold what they had; at the server the pool is a store of its own, without the clients' images."""
    shared = share(ServerSynthetic(), clients(), synthetic())
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
    start = clients()
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
    [(LocalSynthetic, 0.0038, 1 / 261), (ShuffledSynthetic, 0.0038, 1 / 261), (ServerSynthetic, 0.0038, 1 / 261),
     (ShuffledReal, 0.0076, 1 / 130)],
    ids=["local", "shuffled", "server", "real"],
)  # fmt: skip
def test_a_share_that_gives_no_client_an_image_is_refused(kind: type, p: float, least: float) -> None:
    with pytest.raises(UserError, match=rf"sharing\.p = {p:g} .*not one image"):
        kind(p).check_dealt(sized(129, 130))
    assert p < least
    for enough in (0.0, least * 1.001, 0.5):
        kind(enough).check_dealt(sized(129, 130))
    if kind is ShuffledReal:
        with pytest.raises(UserError, match=r"sharing\.p must be set"):
            kind().check({})


@pytest.mark.parametrize("stage", [LocalSynthetic(), ShuffledSynthetic(), ServerSynthetic()], ids=str)
def test_synthetic_images_are_as_covered_as_their_generators_say(stage: LocalSynthetic) -> None:
    """Also those that stay: a real image has a part in many of them. Client 3 contributed none."""
    for receipt in (RECEIPT, None, Receipt()):
        releases = share(stage, clients(), synthetic(receipt)).releases
        assert [r.client for r in releases] == [0, 1, 2, 4]
        for r in releases:
            assert r.what == ("synthetic images",)
            assert r.covered == (receipt is RECEIPT)
            if receipt is RECEIPT:
                assert (r.q, r.sigma, r.sensitivity, r.steps) == (0.1, 1.5, 1.0, 20)


@pytest.mark.parametrize("stage", [ShuffledReal(0.5), RawCopies(0.5, d=2)], ids=str)
def test_bytes_of_shared_examples_are_those_of_their_type(stage: Stage) -> None:
    for dtype, itemsize in ((torch.uint8, 1), (torch.float32, 4), (torch.int64, 8)):
        store = Examples(torch.zeros(80, 30, dtype=dtype), torch.arange(80) % 2)
        start = Dealt(Clients(store, list(np.arange(80).reshape(4, 20))), 2, False, 0)
        moved = 2 * 40 if isinstance(stage, ShuffledReal) else 40 + 2 * 40  # up, and down to one or two
        assert share(stage, start).traffic.once == moved * (30 * itemsize + 1)
        assert images_nbytes(7, (30,), itemsize) == 7 * (30 * itemsize + 1)
        sizes = [replace(start, n_classes=n).label_nbytes for n in (None, 1, 2, 256, 257, 65_536, 65_537)]
        assert sizes == [0, 1, 1, 1, 2, 2, 3]


def test_contributions_of_another_type_would_change_the_real_examples() -> None:
    """Put behind uint8 images in one tensor, floats would make all of them floats."""
    x = torch.zeros(2, *DATASET.shape)
    with pytest.raises(ValueError, match=r"torch\.uint8 \(1, 8, 8\)"):
        Contributions.of_made(clients(), [Contribution(Examples(x, torch.zeros(2, dtype=torch.int64)))] * 5)
