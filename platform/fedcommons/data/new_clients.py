"""Clients that join after training: a share of the clients is held out with all its examples.

Of N clients,  m = max(1, floor(share N))  are held out. The other clients are numbered anew, from 0 to N - m - 1, so
that training, sharing, class counts, measurements and statistics cannot use the examples of new clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Examples
from fedcommons.data.partition import Partitioned
from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator


@dataclass(frozen=True)
class NewClients:
    """The clients that are held out from training, with their examples only.

    numbers: their numbers in the partition of all clients. clients: training examples. tests: test examples.
    """

    numbers: Sequence[int]
    clients: Clients
    tests: Clients


def hold_out(
    partition: Partitioned, train: Examples, tests: Clients | None, share: float, seed: int
) -> tuple[Partitioned, Examples, Clients, NewClients]:
    """Hold out a ``share`` in (0, 0.9] of the clients, drawn by ``seed``.

    Returns the partition, the training examples and the test sets without the new clients, and the new clients.

    Raises:
        UserError: no client remains for training, or no new client has test examples.
    """
    n = len(partition.rows)
    n_new = max(1, int(share * n + 1e-9))
    if n_new == n:
        raise UserError(f"evaluate.new_clients {share:g} leaves no client for training: there is only one client.")
    is_new = np.zeros(n, bool)
    is_new[numpy_generator(seed, "new clients").permutation(n)[:n_new]] = True
    numbers = np.flatnonzero(is_new).tolist()
    if tests is None or not any(tests.sizes[i] for i in numbers):
        how = "set --data.client_test 0.2, or use --partition by_group with test examples that have groups"
        raise UserError(f"evaluate.new_clients needs test examples of the new clients: {how}.")
    new = NewClients(numbers, _chosen(Clients(train, partition.rows), is_new), _chosen(tests, is_new))
    is_left = np.ones(len(train), bool)
    is_left[np.concatenate([partition.rows[i] for i in numbers])] = False
    number = np.cumsum(is_left) - 1  # each remaining row's number in the store without the new clients' rows
    rows = [number[rows] for rows, is_held_out in zip(partition.rows, is_new, strict=True) if not is_held_out]
    counts = None if partition.class_counts is None else partition.class_counts[~is_new]
    return Partitioned(rows, counts), train[np.flatnonzero(is_left)], _chosen(tests, ~is_new), new


def _chosen(clients: Clients, is_chosen: np.ndarray) -> Clients:
    """Return the chosen clients with a store of their own, which has no examples of other clients."""
    rows = [each for each, chosen in zip(clients.rows, is_chosen, strict=True) if chosen]
    sizes = np.array([len(each) for each in rows])
    return Clients(clients.store[np.concatenate(rows)], Rows.in_order(torch.arange(int(sizes.sum())), sizes))
