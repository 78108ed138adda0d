"""Test sets of the clients: a sample of each client's training rows, or the test rows of the client's groups.

A group is the source of an example, such as a writer or a hospital. Sampled rows are removed from the training
examples, so that no training, no sharing and no class count can use these rows.

Client i with n_i rows and the held-out share c loses  m_i = max(1, floor(c n_i))  rows to its test set.
"""

import numpy as np
import torch

from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Dataset, Examples
from fedcommons.data.partition import Partitioned, cut
from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator


def hold_out(
    client_data: Partitioned, dataset: Dataset, share: float, seed: int
) -> tuple[Partitioned, Examples, Clients]:
    """Hold out a random ``share`` in (0, 1) of each client's rows, at least one row, as the client's test set.

    Returns the partition and the training examples, both without the test rows, and the clients' test sets.

    Raises:
        UserError: a client has fewer than two rows.
    """
    rows, train = Rows.from_lists(client_data.rows), dataset.train
    if (small := np.flatnonzero(rows.sizes < 2)).size:
        raise UserError(
            f"data.client_test needs at least two examples of each client, and client {small[0]} has one; {small.size} "
            f"of {len(rows)} clients have only one. Use fewer clients, or join groups by partition.join."
        )
    n_test = np.maximum(1, (share * rows.sizes + 1e-9).astype(np.int64))
    flat, owner = rows.flat.numpy(), np.repeat(np.arange(len(rows)), rows.sizes)
    order = np.argsort(owner + numpy_generator(seed, "client test").random(len(flat)))
    is_test = np.zeros(len(flat), bool)
    for places, n in zip(cut(order, rows.sizes), n_test, strict=True):
        is_test[places[:n]] = True
    is_training = np.ones(len(train), bool)
    is_training[flat[is_test]] = False
    number = np.cumsum(is_training) - 1  # each training row's number in the store without the test rows
    training_rows = cut(number[flat[~is_test]], rows.sizes - n_test)
    training = train[np.flatnonzero(is_training)]
    tests = Clients(train[flat[is_test]], Rows.in_order(torch.arange(int(n_test.sum())), n_test))
    return Partitioned.from_rows(training_rows, training.y.numpy(), dataset.n_classes), training, tests


def of_groups(client_data: Partitioned, dataset: Dataset) -> Clients | None:
    """Return a test set per client: the rows of the common test set that belong to the client's groups.

    Return None if there are no groups or if a group's training rows are divided between clients. A client whose groups
    have no test rows gets an empty test set.
    """
    train, test = dataset.train.groups, dataset.test.groups
    if train is None or test is None:
        return None
    rows = Rows.from_lists(client_data.rows)
    owner, groups = np.repeat(np.arange(len(rows)), rows.sizes), train[rows.flat].numpy()
    of_group = np.full(1 + max(int(train.max()), int(test.max())), -1)
    of_group[groups] = owner
    if (of_group[groups] != owner).any():
        return None
    owners = of_group[test.numpy()]
    order = owners.argsort(kind="stable")
    sizes = np.bincount(owners[owners >= 0], minlength=len(rows))
    test_rows = torch.from_numpy(order[np.count_nonzero(owners < 0) :])
    return Clients(dataset.test, Rows.in_order(test_rows, sizes))
