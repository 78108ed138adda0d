"""Parts of a client's data: how much of a part is the client's own, what it weighs, and how long it trains."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedcommons.core.local import LocalSGD
from fedcommons.data.clients import ClientData, Clients, Rows

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]


def _shared(digits: "Digits") -> ClientData:
    """A client with 10 examples of its own and 10 that came through sharing."""
    store = digits().data.clients.store
    return Clients(store, [np.arange(20)], [10])[0]


def test_half_of_the_data_trains_half_as_long(digits: "Digits") -> None:
    federation = digits().training(LocalSGD(epochs=6, batch_size=5))
    data = _shared(digits)
    steps = {}
    for name, part in (
        ("all", data),
        ("half", data.subset(torch.arange(10))),
        ("quarter", data.subset(torch.arange(5))),
    ):
        work = federation.work()
        steps[name] = int(work.local(work.initial, part, 0).metrics["steps"])
    assert steps == {"all": 3 * 4, "half": 3 * 2, "quarter": 3}  # E' = 3 of 6 epochs, as half is own


@pytest.mark.parametrize(("n", "n_own"), [(10, 20.0), (20, 21.0), (7, 1e9), (5, None)])
def test_nobody_trains_longer_than_without_sharing(n: int, n_own: float | None) -> None:
    """Also where a copy of the data kept an ``n_own`` that is larger than it."""
    assert LocalSGD(epochs=6, batch_size=5).epochs_for(n, n_own) == 6
    assert LocalSGD(epochs=6, batch_size=5).epochs_for(n, n_own, share=0.5) == 3


def test_parts_weigh_together_what_the_whole_weighs(digits: "Digits") -> None:
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
    assert torch.allclose(sum(gradients), whole, rtol=1e-4, atol=1e-6)  # pyright: ignore
    for part, rows in zip(parts, cut, strict=True):
        assert part.weight is not None
        assert float(part.weight.mean()) == pytest.approx(1)
        assert part.size == pytest.approx(weights[rows.numpy()].sum())
        assert torch.equal(part.x, data.x[rows])
        assert part.ids is not None
        assert part.ids.tolist() == rows.tolist()


def test_a_part_has_what_all_clients_hold_and_what_nobody_gave_stays_nothing(digits: "Digits") -> None:
    commons = digits().data.clients.with_commons(digits().data.sets["test"])
    assert commons[0].subset(torch.tensor([0])).commons is commons.commons
    numbered = replace(commons[0], beside=(torch.arange(len(commons[0])),))
    assert [column.tolist() for column in numbered.subset(torch.tensor([2, 0])).beside] == [[2, 0]]
    bare = replace(commons[0], n_own=None, ids=None).subset(torch.tensor([1, 0]))
    assert bare.n_own is bare.ids is bare.weight is bare.total is None
    assert len(bare) == bare.size == 2


@pytest.mark.parametrize("rows", [20, 19])
def test_columns_beside_are_for_a_loss_that_takes_them(digits: "Digits", rows: int) -> None:
    """No module sees them as weights, and there is one row an example."""
    work, data = digits().work(), replace(_shared(digits), beside=(torch.zeros(rows),))
    own = None if rows == 20 else lambda batch, number: work.module.training_step(batch[:2], number)
    with pytest.raises(ValueError, match="columns beside a client's data are for a loss of the method's own, one row"):
        work.local(work.initial, data, 0, loss=own)  # pyright: ignore[reportArgumentType]
    bare = replace(data, beside=())
    assert torch.equal(work.gradient(work.initial, data).buffer, work.gradient(work.initial, bare).buffer)
