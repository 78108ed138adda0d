"""FedMix's means: each of enough images, of nothing but the client's own, shared once and counted."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fedcommons.config import experiment as config
from fedcommons.config.experiment import Experiment, override
from fedcommons.data.clients import Clients
from fedcommons.data.datasets import load
from fedcommons.data.partition import partition
from fedcommons.sharing.means import mean_images, traffic
from fedcommons.sharing.settings import share

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
    means = mean_images(digits().data.clients, 4, 10, 0)
    of_all = 4 * len(means) * (64 + 10)
    assert traffic(means, 5).once == of_all + 4 * of_all


@pytest.mark.parametrize("algorithm", ["fedavg", "fedmix"])
def test_a_sharing_setting_gives_them_to_those_who_need_them(algorithm: str) -> None:
    values: dict[str, Any] = {"algorithm": algorithm, "sharing.setting": "shuffled_real", "sharing.p": 0.5}
    c = override(Experiment(), values)
    dataset = load(replace(config.Data("digits"), limit=200))
    dealt = partition(c.partition, dataset.train.y.numpy(), 10, 0)
    shared = share(c, dataset, dealt, None)
    if algorithm == "fedavg":
        assert shared.clients[0].commons is None
        return
    means = shared.clients[3].commons
    assert means is not None
    expected = mean_images(shared.clients, c.fedmix.mean_size, 10, 0)  # of what the clients train on
    assert torch.equal(means.x, expected.x)
    plain = share(override(c, {"algorithm": "fedavg"}), dataset, dealt, None)
    assert shared.traffic.once == plain.traffic.once + traffic(means, 10).once
    real = share(override(c, {"sharing.setting": "real"}), dataset, dealt, None)
    assert real.clients is real.own  # zeta^2 is not measured twice
