"""FedMix's means: each of enough images, of nothing but the client's own, shared once and counted."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedmix import FedMix, mean_images
from fedcommons.config import experiment as config
from fedcommons.data.clients import Clients
from fedcommons.runs.inputs import deal, load
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.real import Real
from fedcommons.sharing.shuffled_real import ShuffledReal
from fedcommons.sharing.stage import share, share_by_method

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Federation

    Digits = Callable[..., Federation]


@pytest.mark.parametrize("size", [1, 4, 7, 100])
def test_means_weighted_by_their_images_are_the_clients_mean(size: int, digits: "Digits") -> None:
    """And every mean has ``size`` images or more, where the client has as many."""
    clients = digits().data.clients
    for client, rows in enumerate(clients):
        means = mean_images(Clients(clients.store, [clients.rows[client]]), size, 10, 0)
        n, groups = len(rows), max(1, len(rows) // size)
        assert len(means) == groups
        assert means.x.dtype == torch.float32
        sizes = torch.tensor([len(part) for part in torch.arange(n).tensor_split(groups)]).float()
        assert sizes.min() >= min(size, n)
        assert torch.allclose((sizes.view(-1, 1, 1, 1) * means.x).sum(0) / n, rows.x.float().mean(0), atol=1e-3)
        frequencies = torch.bincount(rows.y, minlength=10) / n
        assert torch.allclose((sizes[:, None] * means.y).sum(0) / n, frequencies, atol=1e-6)


def test_they_are_keyed_by_the_seed_and_the_client(digits: "Digits") -> None:
    clients = digits().data.clients
    first, again, other = (mean_images(clients, 4, 10, seed) for seed in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    fewer = mean_images(clients[slice(0, 2)], 4, 10, 0)  # another client changes nobody else's
    assert torch.equal(first.x[: len(fewer)], fewer.x)


def test_the_exchange_is_counted_up_once_and_down_to_the_others(digits: "Digits") -> None:
    clients = digits().data.clients
    of_all = 4 * len(mean_images(clients, 4, 10, 0)) * (64 + 10)
    shared = share_by_method(share(Real(), Dealt(clients, 10, False, 0)), FedMix(mean_size=4), 10, 0)
    assert shared.traffic.once == of_all + 4 * of_all


def test_what_leaves_every_client_is_an_event_that_nothing_covers(digits: "Digits") -> None:
    releases = FedMix(mean_size=4).share(digits().data.clients, 10, 0).releases
    assert [(r.client, r.what, r.covered) for r in releases] == [
        (client, ("means of images", "means of labels"), False) for client in range(5)
    ]


@pytest.mark.parametrize("stage", [Real(), ShuffledReal(0.5)], ids=str)
def test_they_are_of_what_clients_train_on_and_only_methods_that_share_get_any(stage: Real) -> None:
    dataset = load(replace(config.Data("digits"), limit=200))
    rows = deal(config.Partition(), dataset.train.y.numpy(), 10, 0).rows
    shared = share(stage, Dealt(Clients(dataset.train, rows), 10, False, 0))
    assert share_by_method(shared, FedAvg(), 10, 0) is shared
    ours = share_by_method(shared, FedMix(mean_size=7), 10, 0)
    means = ours.data.clients[3].commons
    assert means is not None
    expected = mean_images(shared.data.clients, 7, 10, 0)
    assert torch.equal(means.x, expected.x)
    common = FedMix(mean_size=7).share(shared.data.clients, 10, 0)
    nbytes = common.examples.x.nbytes + common.examples.y.nbytes
    assert ours.traffic.once == shared.traffic.once + len(rows) * nbytes
    assert list(ours.releases) == [*shared.releases, *common.releases]
    for data in (ours.data, shared.data):  # measured once
        assert (data.clients is data.own) == isinstance(stage, Real)
