"""Client data for tests: random images, the digits of five unequal clients, and images that encode their client."""

import numpy as np
import torch
from five_clients import DATASET

from fedcommons import ClientDatasets, Clients, Contribution, Examples, Receipt, generator
from fedcommons.config.schema import Partition
from fedcommons.runs import load_data

SHAPE = (1, 8, 8)
SIZES = (300, 10, 41, 0, 123)


def some(n: int, seed: int = 0) -> Examples:
    draws = generator(seed, "images of the test")
    x = torch.randint(256, (n, *SHAPE), generator=draws, dtype=torch.uint8)
    return Examples(x, torch.randint(10, (n,), generator=draws))


def clients(*cuts: int, n: int = 60, data: Examples | None = None) -> ClientDatasets:
    return ClientDatasets(Clients(data or some(n), np.split(np.arange(n), cuts)), 10, False, 0, False)


def of_digits(name: str = "dirichlet_niid", seed: int = 0) -> ClientDatasets:
    rows = load_data.partition_rows(name, Partition(name).constants, DATASET.train.y.numpy(), 10, 0, n_clients=5).rows
    return ClientDatasets(Clients(DATASET.train, rows), 10, DATASET.flip, seed)


def numbered(receipt: Receipt | None = None) -> list[Contribution]:
    """Contributions whose images all differ: three pixels encode the client and the number of the image."""
    sets = []
    for client, n in enumerate(SIZES):
        x = torch.zeros(n, *SHAPE, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1], x[:, 0, 0, 2] = client, torch.arange(n) % 256, torch.arange(n) // 256
        sets.append(Contribution(Examples(x, torch.arange(n) % 10), receipt, n_sources=7))
    return sets
