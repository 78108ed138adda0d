"""Who holds a copy of which example where a share of the examples is not private.

Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning with
non-IID data", arXiv:2404.03524, sections II and III-A.   c: share of examples that are not private;  d: copies of
each that others get;  N: clients;  M: examples;  K: examples of a class;  Y: shares of a class over clients after
sharing.
"""

import numpy as np

from fedcommons.sharing.optimal import plans


def n_open(c: float, n: int) -> int:
    """How many of n examples are not private:  c n to the nearest whole number, and a half is one."""
    return int(c * n + 0.5 + 1e-9)


def opened(labels: np.ndarray, owners: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    """The examples that are not private, in a random order of which a smaller c takes the first ones.

    labels, owners: (M,). There are ``n_open(c, M)``, and of each class, and of each client's examples of it, about the
    share c: the rounding is Webster's, which never takes one back as c grows. Ties are broken at random.
    """
    order = rng.permutation(len(labels))
    # an example's turn comes when less of its cell went before than of others', then when less of its class did
    for group in (owners * (labels.max() + 1) + labels, labels):
        order = order[np.argsort(_parts(group[order]), kind="stable")]
    return order[: n_open(c, len(labels))]


def _parts(group: np.ndarray) -> np.ndarray:
    """(k - 1/2)/n for the k-th of the n entries of each group: (M,)."""
    order = np.argsort(group, kind="stable")
    _, first, sizes = np.unique(group[order], return_index=True, return_counts=True)
    parts = np.empty(len(group))
    parts[order] = (np.arange(len(group)) - np.repeat(first, sizes) + 0.5) / np.repeat(sizes, sizes)
    return parts


def holdings(
    labels: np.ndarray,
    owners: np.ndarray,
    n_clients: int,
    c: float,
    d: int,
    placement: str,
    rng: np.random.Generator,
) -> np.ndarray:
    """Whether client i holds example j: (M, N) bool; its row sums are the d_j, the owner counted.

    exact: each example that is not private goes to d distinct others, uniformly. binomial: to each other client with
    probability d/(N-1), independently. optimal: to d distinct others such that the sum over classes of ||Y - 1/N||^2 is
    least, for which everybody's label counts must be known; which examples of a client and class go where is random.

    labels, owners: (M,). With the same generator a larger c copies all that a smaller one copies, and so does a larger
    d, unless the placement is optimal.
    """
    held = np.zeros((len(labels), n_clients), dtype=bool)
    held[np.arange(len(labels)), owners] = True
    chosen = opened(labels, owners, c, rng)
    if placement == "optimal":
        for label, plan in plans(labels, owners, n_clients, chosen, d).items():
            of_class = chosen[labels[chosen] == label]
            for owner in np.unique(owners[of_class]):
                of_owner = of_class[owners[of_class] == owner]
                receivers = np.repeat(np.arange(n_clients), plan.copies[owner])
                # nobody gets more than len(of_owner) in a row, so going round and round gives it none twice
                held[np.resize(of_owner, len(receivers)), receivers] = True
        return held
    draws = rng.random((len(chosen), n_clients))
    draws[np.arange(len(chosen)), owners[chosen]] = np.inf
    if placement == "exact":
        held[chosen[:, None], np.argsort(draws, 1)[:, :d]] = True
    else:
        held[chosen] |= draws < d / (n_clients - 1)
    return held
