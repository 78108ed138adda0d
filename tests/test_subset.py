"""Clients as lazy views of the data, and parts of a client's data: what is its own, what it weighs, how it trains."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcommons.core.local import LocalSGD
from fedcommons.data.clients import ClientData, Clients, Rows
from fedcommons.data.examples import Examples
from fedcommons.testing import digits


def _shared() -> ClientData:
    """A client with 10 examples of its own and 10 that came through sharing."""
    return Clients(digits().data.clients.store, [np.arange(20)], [10])[0]


def test_half_of_the_data_trains_half_as_long() -> None:
    federation, data = digits().training(LocalSGD(epochs=6, batch_size=5)), _shared()
    for part, steps in ((data, 12), (data.subset(torch.arange(10)), 6), (data.subset(torch.arange(5)), 3)):
        work = federation.work()  # E' = 3 of 6 epochs, as half is own
        assert int(work.local(work.initial, part, 0).metrics["steps"]) == steps


@pytest.mark.parametrize(("n", "n_own"), [(10, 20.0), (20, 21.0), (7, 1e9), (5, None)])
def test_no_client_trains_longer_than_without_sharing(n: int, n_own: float | None) -> None:
    """Also where a copy of the data kept an ``n_own`` that is larger than it."""
    assert LocalSGD(epochs=6, batch_size=5).epochs_for(n, n_own) == 6
    assert LocalSGD(epochs=6, batch_size=5).epochs_for(n, n_own, share=0.5) == 3


def test_parts_weigh_together_what_the_whole_weighs() -> None:
    """And the weighted means of the parts' objectives make the whole's."""
    store, weights = digits().data.clients.store, np.random.default_rng(0).uniform(0.1, 3, 20)
    data = Clients(store, Rows.of([np.arange(20)], [weights]))[0]
    cut = torch.randperm(20, generator=torch.Generator().manual_seed(0)).split([4, 9, 7])
    parts = [data.subset(rows) for rows in cut]
    assert sum(part.size for part in parts) == pytest.approx(weights.sum())
    assert sum(part.n_own or 0 for part in parts) == pytest.approx(data.n_own)
    work = digits().work()
    gradients = [part.size * work.gradient(work.initial, part).buffer.double() for part in parts]
    whole = data.size * work.gradient(work.initial, data).buffer.double()
    assert torch.allclose(torch.stack(gradients).sum(0), whole, rtol=1e-4, atol=1e-6)
    for part, rows in zip(parts, cut, strict=True):
        assert part.weight is not None
        assert float(part.weight.mean()) == pytest.approx(1)
        assert part.size == pytest.approx(weights[rows.numpy()].sum())
        assert torch.equal(part.x, data.x[rows])
        assert part.ids is not None
        assert part.ids.tolist() == rows.tolist()


def test_a_part_has_what_all_clients_hold_and_what_is_missing_stays_none() -> None:
    federation = digits()
    commons = federation.data.clients.with_commons(federation.data.sets["test"])
    assert commons[0].subset(torch.tensor([0])).commons is commons.commons
    numbered = replace(commons[0], beside=(torch.arange(len(commons[0])),))
    assert [column.tolist() for column in numbered.subset(torch.tensor([2, 0])).beside] == [[2, 0]]
    bare = replace(commons[0], n_own=None, ids=None).subset(torch.tensor([1, 0]))
    assert bare.n_own is bare.ids is bare.weight is bare.total is None
    assert len(bare) == bare.size == 2


@pytest.mark.parametrize("rows", [20, 19])
def test_columns_beside_are_for_a_loss_that_takes_them(rows: int) -> None:
    """No module sees them as weights, and there is one row an example."""
    work, data = digits().work(), replace(_shared(), beside=(torch.zeros(rows),))
    own = None if rows == 20 else lambda batch, number: work.module.training_step(batch[:2], number)
    with pytest.raises(ValueError, match="columns beside"):
        work.local(work.initial, data, 0, loss=own)  # pyright: ignore[reportArgumentType]
    bare = replace(data, beside=())
    assert torch.equal(work.gradient(work.initial, data).buffer, work.gradient(work.initial, bare).buffer)


# Six examples whose one pixel is their row
STORE = Examples(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.arange(6) % 3)


def test_a_client_gets_copies_of_the_rows_that_are_its_own() -> None:
    clients = Clients(STORE, [np.array([4, 0]), np.array([1, 2, 5])], n_own=[1, 3])
    assert (len(clients), clients.sizes) == (2, [2, 3])
    client = clients[1]
    assert (client.x.flatten().tolist(), client.y.tolist()) == ([1, 2, 5], [1, 2, 2])
    assert client.ids is not None
    assert client.ids.tolist() == [1, 2, 5]
    assert [c.n_own for c in clients[1:]] == [3]
    assert [c.n_own for c in clients.on(clients.store)] == [1, 3]
    assert Clients(STORE, [np.array([4, 0])])[0].n_own == 2
    client.x.zero_()
    assert clients.store.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_indexing_and_slices_gather_that_clients_rows_only() -> None:
    """The other clients' rows cannot be gathered; a million clients cost no copy of the data."""
    nowhere = np.array([10**9])
    clients = Clients(STORE, [nowhere, np.array([2, 0]), nowhere])
    assert clients[1].x.flatten().tolist() == [2, 0]
    assert clients[1:2][0].x.flatten().tolist() == [2, 0]
    assert clients.sizes == [1, 2, 1]
    assert len(clients.on(clients.store)[1]) == 2
    with pytest.raises(IndexError):
        clients[0]
    rows = Rows(torch.arange(3), np.zeros(1_000_000, int), np.full(1_000_000, 2))
    many = Clients(STORE, rows)
    assert len(many) == 1_000_000
    assert many.rows is rows
    assert many[999_999].x.flatten().tolist() == [0, 1]
    assert many[500_000:500_003].store is many.store
