"""What clients train on in each data setting, and what the exchange costs."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.config import experiment as config
from fedcommons.config.experiment import Experiment, override
from fedcommons.data import datasets
from fedcommons.data.datasets import Examples
from fedcommons.data.partition import Partitioned, partition
from fedcommons.errors import UserError
from fedcommons.sharing.settings import Shared, needs_generators, refuse_empty_pool, share
from fedcommons.sharing.synthetic_pool import (
    shuffle,
)

DATASET = datasets.load(config.Data())
N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
FIVE = {"partition.name": "iid", "partition.n_clients": 5}


def experiment(**values: object) -> Experiment:
    """A config with these fields, dots written as double underscores."""
    return override(Experiment(), {name.replace("__", "."): value for name, value in values.items()})


def dealt(c: Experiment) -> Partitioned:
    """The partition of the digits."""
    return partition(c.partition, DATASET.train.y.numpy(), DATASET.n_classes, c.seed)


def images(x: Tensor) -> Counter[bytes]:
    """Images as a multiset."""
    return Counter(image.numpy().tobytes() for image in x)


# --- apportionment


def test_only_the_synthetic_settings_need_generators() -> None:
    needing = [s for s in config.SETTINGS if needs_generators(experiment(sharing__setting=s))]
    assert needing == ["local_synthetic", "shuffled_synthetic"]


# --- the settings


def synthetic(sizes: Sequence[int]) -> list[Examples]:
    """Contributions of which every image says whose it is and which: no two are the same."""
    sets = []
    for client, n in enumerate(sizes):
        x = torch.zeros(n, *DATASET.shape, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1], x[:, 0, 0, 2] = client, torch.arange(n) % 256, torch.arange(n) // 256
        sets.append(Examples(x, torch.arange(n) % 10))
    return sets


def apply(setting: str, sizes: Sequence[int] = (), **values: object) -> tuple[Shared, Partitioned]:
    """The setting on the digits, unequal clients."""
    c = experiment(sharing__setting=setting, partition__name="dirichlet_niid", partition__n_clients=5, **values)
    return share(c, DATASET, dealt(c), synthetic(sizes) if sizes else None), dealt(c)


def extra(shared: Shared, client: int) -> Tensor:
    """Images the client trains on that are not its own."""
    data = shared.clients[client]
    assert data.n_own is not None
    return data.x[data.n_own :]


SIZES = (300, 10, 41, 0, 123)


def test_real_is_the_clients_own_data_and_costs_nothing() -> None:
    shared, given = apply("real")
    assert shared.clients is shared.own
    assert shared.p == 0
    assert (shared.traffic.once, shared.traffic.up, shared.traffic.down) == (0, 0, 0)
    for client, rows in zip(shared.clients, given.rows, strict=True):
        assert torch.equal(client.x, DATASET.train.x[rows])
        assert torch.equal(client.y, DATASET.train.y[rows])


@pytest.mark.parametrize("setting", ["local_synthetic", "shuffled_synthetic"])
def test_synthetic_images_are_added_to_the_clients_own(setting: str) -> None:
    shared, given = apply(setting, SIZES)
    for client, rows in enumerate(given.rows):
        n = len(rows)
        data = shared.clients[client]
        assert data.n_own == n
        assert len(data) == n + SIZES[client]
        assert torch.equal(data.x[:n], DATASET.train.x[rows])
        assert torch.equal(data.y[:n], DATASET.train.y[rows])
        assert torch.equal(shared.own[client].x, DATASET.train.x[rows])
    assert shared.p == pytest.approx(sum(SIZES) / (N_TOTAL + sum(SIZES)))


def test_local_synthetic_gives_every_client_its_own_images_and_sends_none() -> None:
    shared, _ = apply("local_synthetic", SIZES)
    for client, contributed in enumerate(synthetic(SIZES)):
        assert torch.equal(extra(shared, client), contributed.x)
    assert shared.traffic.once == 0


def test_shuffled_synthetic_conserves_the_pool_and_mixes_it() -> None:
    shared, _ = apply("shuffled_synthetic", SIZES)
    received = [images(extra(shared, client)) for client in range(5)]
    pooled = images(torch.cat([s.x for s in synthetic(SIZES)]))
    assert max(pooled.values()) == 1  # so that equal multisets below also mean disjoint parts
    assert sum(received, Counter()) == pooled
    sources = {int(x[0, 0, 0]) for x in extra(shared, 0)}
    assert sources == {0, 1, 2, 4}  # images of client i may come from any client (3 gave none)
    share_of_own = float((extra(shared, 0)[:, 0, 0, 0] == 0).float().mean())
    assert abs(share_of_own - 300 / 474) < 4 * (300 / 474 * 174 / 474 / 300) ** 0.5


def test_shuffled_images_keep_their_labels() -> None:
    shared, _ = apply("shuffled_synthetic", SIZES)
    for data in shared.clients:
        x, y = data.x[data.n_own :], data.y[data.n_own :]
        assert torch.equal((x[:, 0, 0, 1].long() + 256 * x[:, 0, 0, 2].long()) % 10, y)


def test_the_shuffle_is_keyed_by_the_seed() -> None:
    def first(seed: int) -> list[int]:
        pool, parts = shuffle(synthetic(SIZES), SIZES, seed)
        assert len(pool) == sum(SIZES)
        assert [len(part) for part in parts] == list(SIZES)
        return parts[0].tolist()

    assert first(0) == first(0)
    assert first(0) != first(1)


def test_a_pool_goes_up_and_comes_down_once_as_bytes_and_labels() -> None:
    shared, _ = apply("shuffled_synthetic", SIZES)
    assert shared.traffic.once == 2 * sum(SIZES) * (8 * 8 + 1)
    assert (shared.traffic.up, shared.traffic.down) == (0, 0)


@pytest.mark.parametrize("p", [0.0, 0.06, 0.5, 0.9])
def test_shuffled_real_swaps_p_of_every_clients_rows_and_conserves_them(p: float) -> None:
    shared, given = apply("shuffled_real", sharing__p=p)
    swapped = 0
    for after, before in zip(shared.clients.rows, given.rows, strict=True):
        assert len(after) == len(before)  # n_i unchanged
        kept = len(before) - int(p * len(before))
        assert set(after[:kept]) <= set(before)
        swapped += len(before) - kept
    assert sorted(np.concatenate(shared.clients.rows)) == sorted(np.concatenate(given.rows))
    assert shared.p == pytest.approx(swapped / N_TOTAL)
    assert abs(shared.p - p) <= 5 / N_TOTAL  # within one image a client
    assert shared.traffic.once == 2 * swapped * (8 * 8 + 1)
    assert [rows.tolist() for rows in shared.own.rows] == [rows.tolist() for rows in given.rows]


def test_shuffled_real_brings_clients_rows_of_others() -> None:
    shared, given = apply("shuffled_real", sharing__p=0.5)
    for after, before in zip(shared.clients.rows, given.rows, strict=True):
        foreign = len(set(after) - set(before)) / len(after)
        assert 0.1 < foreign <= 0.5


def test_shuffled_real_is_keyed_by_the_seed() -> None:
    c = experiment(**FIVE, sharing__setting="shuffled_real", sharing__p=0.5)
    given = dealt(c)
    first, again, other = (share(override(c, {"seed": s}), DATASET, given, None).clients.rows for s in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("setting", "p", "least"), [("shuffled_synthetic", 0.0038, 1 / 261), ("shuffled_real", 0.0076, 1 / 130)]
)
def test_a_share_that_gives_nobody_an_image_is_refused(setting: str, p: float, least: float) -> None:
    def asked(p: float) -> Experiment:
        return override(Experiment(), {"sharing.setting": setting, "sharing.p": p})

    with pytest.raises(UserError, match=rf"sharing\.p = {p:g} of 130 images is not one image"):
        refuse_empty_pool(asked(p), 1300, [129, 130])
    assert p < least
    for enough in (0.0, least * 1.001, 0.5):
        refuse_empty_pool(asked(enough), 1300, [129, 130])
    refuse_empty_pool(override(asked(p), {"sharing.setting": "real"}), 1300, [130])
