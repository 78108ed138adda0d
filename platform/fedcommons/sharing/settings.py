"""The data settings that every algorithm can run on.

real                D_i
local_synthetic     D_i and the client's own synthetic images
shuffled_synthetic  D_i and the client's part of the shuffled pool (Fedssyn)
shuffled_real       a share p of every client's real images swapped through the pool, n_i unchanged (Fedssyn, fig. 1c)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedcommons.accounting.communication import Traffic, images_nbytes
from fedcommons.config.experiment import Experiment
from fedcommons.data.clients import Clients
from fedcommons.data.datasets import Dataset, Examples
from fedcommons.data.partition import Partitioned
from fedcommons.errors import UserError
from fedcommons.seeds import numpy_generator
from fedcommons.sharing.means import mean_images, traffic
from fedcommons.sharing.synthetic_pool import contribution, shuffle


@dataclass(frozen=True)
class Shared:
    """What clients train on, the share p of it that came through sharing, and the bytes the exchange cost.

    pool: what is in the commons, as rows of the clients' store; None where nothing is.
    """

    clients: Clients
    own: Clients
    p: float
    traffic: Traffic
    pool: Clients | None = None


def needs_generators(config: Experiment) -> bool:
    """Whether the setting uses synthetic images."""
    return config.sharing.setting in ("local_synthetic", "shuffled_synthetic")


def n_swapped(p: float, n: int) -> int:
    """int(p n), as in Fedssyn's released code; but 0.29 * 100 = 28.999... is 29."""
    return int(round(p * n, 9))


def refuse_empty_pool(config: Experiment, n_total: int, sizes: Sequence[int]) -> None:
    """Refuse a share p > 0 of which no client gets an image, as the run would silently be one without sharing.

    Raises:
        UserError: it is so.
    """
    p, n = config.sharing.p, max(sizes)
    if not p or config.sharing.setting == "real":
        return
    synthetic = needs_generators(config)
    if (contribution(config, n_total, n) if synthetic else n_swapped(p, n)) < 1:
        least = 1 / (2 * n + 1) if synthetic else 1 / n
        raise UserError(f"sharing.p = {p:g} of {n} images is not one image; it must be 0 or more than {least:.2g}.")


def share(config: Experiment, dataset: Dataset, partition: Partitioned, synthetic: Sequence[Examples] | None) -> Shared:
    """Apply the setting, and give out FedMix's means where they are needed.

    ``synthetic``: each client's contribution, where the setting uses them.
    """
    shared = _apply_setting(config, dataset, partition, synthetic)
    if config.algorithm != "fedmix":
        return shared
    n = config.partition.n_clients
    means = mean_images(shared.clients, config.fedmix.mean_size, dataset.n_classes, config.seed)
    clients = shared.clients.with_commons(means)
    own = clients if shared.own is shared.clients else shared.own
    return Shared(clients, own, shared.p, shared.traffic + traffic(means, n), shared.pool)


def _apply_setting(
    config: Experiment, dataset: Dataset, partition: Partitioned, synthetic: Sequence[Examples] | None
) -> Shared:
    own = Clients(dataset.train, partition.rows)
    if config.sharing.setting == "real":
        return Shared(own, own, 0.0, Traffic())
    if config.sharing.setting == "shuffled_real":
        return _swap(config, dataset, own)
    assert synthetic is not None
    sizes = [len(s) for s in synthetic]
    if config.sharing.setting == "local_synthetic":
        pool = Examples(torch.cat([s.x for s in synthetic]), torch.cat([s.y for s in synthetic]))
        parts, once = np.split(np.arange(len(pool)), np.cumsum(sizes)[:-1]), 0
    else:
        pool, parts = shuffle(synthetic, sizes, config.seed)
        once = 2 * images_nbytes(len(pool), dataset.shape)  # all images go up and come down
    clients = own.with_extra(pool, parts)
    p = len(pool) / sum(clients.sizes)
    if config.sharing.setting == "local_synthetic":
        return Shared(clients, own, p, Traffic(once=once))
    return Shared(clients, own, p, Traffic(once=once), _pool(clients, [part + len(own.store) for part in parts]))


def _swap(config: Experiment, dataset: Dataset, own: Clients) -> Shared:
    kept, given = [], []
    for client, rows in enumerate(own.rows):
        n = n_swapped(config.sharing.p or 0, len(rows))
        order = numpy_generator(config.seed, "swapped", client).permutation(len(rows))
        kept.append(rows[np.sort(order[n:])])
        given.append(rows[order[:n]])
    sizes = [len(g) for g in given]
    pool = np.concatenate(given)
    dealt = np.split(numpy_generator(config.seed, "pool").permutation(pool), np.cumsum(sizes)[:-1])
    clients = Clients(dataset.train, [np.concatenate([k, d]) for k, d in zip(kept, dealt, strict=True)])
    once = 2 * images_nbytes(len(pool), dataset.shape)
    return Shared(clients, own, len(pool) / sum(own.sizes), Traffic(once=once), _pool(clients, dealt))


def _pool(clients: Clients, parts: Sequence[np.ndarray]) -> Clients | None:
    """The pool in the parts that were dealt; these rows of the clients' store."""
    filled = [part for part in parts if len(part)]
    return Clients(clients.store, filled) if filled else None
