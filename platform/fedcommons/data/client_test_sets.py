"""Each client's own test rows: drawn from what was dealt to it, or the test rows of its groups.

Rows that are drawn leave the training examples altogether, so nothing that trains, shares or counts can hold them.

n_i: rows dealt to client i;  c: share of them that is held out;  m_i = max(1, floor(c n_i)) of them are.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Dataset, Examples
from fedcommons.data.partition import Partitioned, cut
from fedcommons.errors import UserError, shown
from fedcommons.seeding import numpy_generator


def drawn(dealt: Partitioned, dataset: Dataset, share: float, seed: int) -> tuple[Partitioned, Examples, Clients]:
    """The partition without each client's test rows, the training examples without them, and the clients' tests.

    Raises:
        UserError: a client has fewer than two rows.
    """
    rows, train = Rows.of(dealt.rows), dataset.train
    if (small := np.flatnonzero(rows.sizes < 2)).size:
        client = int(small[0])
        raise UserError(
            f"data.client_test needs at least two examples of each client, and client {client}"
            f"{_group(dealt.rows[client], dataset)} has one; {small.size} of {len(rows)} clients have. "
            "Use fewer clients or join groups."
        )
    n_test = np.maximum(1, (share * rows.sizes + 1e-9).astype(np.int64))
    flat, owner = rows.flat.numpy(), np.repeat(np.arange(len(rows)), rows.sizes)
    order = np.argsort(owner + numpy_generator(seed, "client test").random(len(flat)))
    place = np.arange(len(flat)) - np.repeat(rows.starts, rows.sizes)  # of each draw among its client's
    is_test = np.zeros(len(flat), bool)
    is_test[order[place < n_test[owner]]] = True
    stays = np.ones(len(train), bool)
    stays[flat[is_test]] = False
    number = np.cumsum(stays) - 1  # of a row among those that stay
    kept = cut(number[flat[~is_test]], rows.sizes - n_test)
    rest = train[np.flatnonzero(stays)]
    tests = Clients(train[flat[is_test]], _consecutive(n_test))
    return Partitioned.of(kept, rest.y.numpy(), dataset.n_classes), rest, tests


def of_groups(dealt: Partitioned, dataset: Dataset) -> Clients | None:
    """Each client's test rows as those of its groups, where every group is one client's; else None.

    A client whose groups have no test rows gets none.
    """
    train, test = dataset.train.groups, dataset.test.groups
    if train is None or test is None:
        return None
    rows = Rows.of(dealt.rows)
    owner, groups = np.repeat(np.arange(len(rows)), rows.sizes), train[rows.flat].numpy()
    of_group = np.full(1 + max(int(train.max()), int(test.max())), -1)
    of_group[groups] = owner
    if (of_group[groups] != owner).any():
        return None
    owners = of_group[test.numpy()]
    order = owners.argsort(kind="stable")
    sizes = np.bincount(owners[owners >= 0], minlength=len(rows))
    mine = torch.from_numpy(order[np.count_nonzero(owners < 0) :])
    return Clients(dataset.test, Rows(mine, np.cumsum(sizes) - sizes, sizes))


def _consecutive(sizes: np.ndarray) -> Rows:
    return Rows(torch.arange(int(sizes.sum())), np.cumsum(sizes) - sizes, sizes)


def _group(rows: Sequence[int] | np.ndarray, dataset: Dataset) -> str:
    """What a client's group is called, in words; empty where there are no groups."""
    groups, names = dataset.train.groups, dataset.origin.group_names if dataset.origin else None
    if groups is None or names is None:
        return ""
    return f" (group {shown(names[int(groups[int(rows[0])])].item())})"
