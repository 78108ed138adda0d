"""The placement of raw copies on clients, for strategies in which a share of the examples is not private.

Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning with
non-IID data", arXiv:2404.03524, sections II and III-A.   c: share of examples that are not private;  d: number of other
clients that get a copy of an example that is not private;  N: clients;  M: examples;  K: examples of a class;
Y: (N,) each client's share of the examples of a class after sharing.

The optimal placement minimises ||Y - 1/N||^2 per class. It needs the clients' label counts. Section II of the paper
mentions this placement but does not derive it. Symbols for one class:   h_i: examples that client i owns (sum over i:
K);  o_i: examples among these that are not private;  s_ij: copies of client i's examples that client j gets;
B = d sum_i o_i: all copies;  Y_j = (h_j + sum_i s_ij)/(K + B).
Classes do not constrain each other, so each class is a separate problem. Examples of one owner and class are
interchangeable, so counts are enough.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


def n_open(c: float, n: int) -> int:
    """Return how many of n examples are not private: c n, rounded to the nearest integer, halves up."""
    return int(c * n + 0.5 + 1e-9)


def sample_shareable(labels: np.ndarray, owners: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    """Choose the ``n_open(c, M)`` examples that are not private and return their numbers, in a random order.

    About the share c of each class, and of each client's examples of a class, is chosen. Shares are rounded by
    Webster's method. So with the same ``rng``, a larger c returns the examples of a smaller c first. Ties are broken at
    random. labels, owners: (M,) class and client of each example.
    """
    order = rng.permutation(len(labels))
    # Pass 1 spreads the examples of each pair (owner, class) evenly over ``order``, pass 2 the examples of each class.
    for group in (owners * (labels.max() + 1) + labels, labels):
        order = order[np.argsort(_parts(group[order]), kind="stable")]
    return order[: n_open(c, len(labels))]


def _parts(group: np.ndarray) -> np.ndarray:
    """Return for each entry of ``group`` the value (k - 1/2)/n, if the entry is the k-th of n equal entries."""
    order = np.argsort(group, kind="stable")
    _, first, sizes = np.unique(group[order], return_index=True, return_counts=True)
    parts = np.empty(len(group))
    parts[order] = (np.arange(len(group)) - np.repeat(first, sizes) + 0.5) / np.repeat(sizes, sizes)
    return parts


def holdings(
    labels: np.ndarray, owners: np.ndarray, n_clients: int, c: float, d: int, placement: str, rng: np.random.Generator
) -> np.ndarray:
    """Return whether client i holds example j: (M, N) bool. The row sum d_j counts the owner and all copies.

    Values of ``placement``, for each example that is not private:
    exact: d distinct other clients, chosen uniformly at random, get a copy.
    binomial: each other client gets a copy with probability d/(N - 1), independently.
    optimal: d distinct other clients get a copy such that the sum over classes of ||Y - 1/N||^2 is minimal. This needs
    all clients' label counts. The examples of one client and class are assigned at random.

    labels, owners: (M,) class and client of each example. c: share of examples that are not private. With the same
    ``rng``, a larger c or d keeps all copies of a smaller c or d, unless the placement is optimal.
    """
    is_held = np.zeros((len(labels), n_clients), dtype=bool)
    is_held[np.arange(len(labels)), owners] = True
    chosen = sample_shareable(labels, owners, c, rng)
    if placement == "optimal":
        for label, plan in plans(labels, owners, n_clients, chosen, d).items():
            of_class = chosen[labels[chosen] == label]
            for owner in np.unique(owners[of_class]):
                of_owner = of_class[owners[of_class] == owner]
                receivers = np.repeat(np.arange(n_clients), plan.copies[owner])
                # No client gets more than len(of_owner) copies, so no client gets the same example twice.
                is_held[np.resize(of_owner, len(receivers)), receivers] = True
        return is_held
    draws = rng.random((len(chosen), n_clients))
    draws[np.arange(len(chosen)), owners[chosen]] = np.inf
    if placement == "exact":
        is_held[chosen[:, None], np.argsort(draws, 1)[:, :d]] = True
    else:
        is_held[chosen] |= draws < d / (n_clients - 1)
    return is_held


@dataclass(frozen=True, eq=False)
class Even:
    """The optimal placement of the copies of one class.

    copies: (N, N) int, number s_ij of copies of client i's examples for client j. distance: ||Y - 1/N||^2, with Y the
    clients' shares of the class. bound: proven lower bound of the distance over all placements.
    """

    copies: np.ndarray
    distance: float
    bound: float


@lru_cache(maxsize=1024)
def optimal_copies(owned: tuple[int, ...], opened: tuple[int, ...], d: int) -> Even:
    """Return the optimal copies s_ij of one class, by linear programming (symbols: see the module's docstring).

    Minimise sum_j T_j^2 with T_j = h_j + sum_i s_ij, the number of examples of client j. (The sum of all T_j is fixed,
    so this also minimises ||Y - 1/N||^2.) The constraints s_ij <= o_i, s_ii = 0 and sum_j s_ij = d o_i ensure that each
    of the o_i examples can go to d distinct other clients. The square is made linear by T_j = h_j + y_j1 + y_j2 + ...
    with y_jk in [0, 1] and the cost (h_j + k)^2 - (h_j + k - 1)^2 of y_jk. The costs rise in k, so y_j1, y_j2, ... fill
    up in this order, and the linear cost is exact at integers.

    owned: h, number of each client's examples, with a sum K > 0. opened: o, number of each client's examples that are
    not private.

    Raises:
        RuntimeError: the solver finds no integer solution.
    """
    from scipy.optimize import Bounds, milp  # scipy takes a second to import
    from scipy.sparse import coo_array

    h, o = np.array(owned), np.array(opened)
    n, copies, total = len(h), np.zeros((len(h), len(h)), np.int64), sum(owned) + d * sum(opened)
    i, j = (np.repeat(np.flatnonzero(o), n), np.tile(np.arange(n), np.count_nonzero(o)))
    i, j = i[i != j], j[i != j]
    room = np.bincount(j, o[i], n).astype(np.int64)  # maximum number of copies for each client
    receiver = np.repeat(np.arange(n), room)
    k = np.arange(len(receiver)) - np.repeat(np.cumsum(room) - room, room) + 1
    cost = np.concatenate([np.zeros(len(i)), 2.0 * (h[receiver] + k) - 1])
    rows = np.concatenate([i, n + j, n + receiver])
    columns = np.concatenate([np.tile(np.arange(len(i)), 2), len(i) + np.arange(len(k))])
    entries = np.concatenate([np.ones(2 * len(i)), -np.ones(len(k))])
    sent = coo_array((entries, (rows, columns)), shape=(2 * n, len(cost))).tocsr()
    right = np.concatenate([d * o, np.zeros(n)])
    least = float((h**2).sum())
    if len(i):
        # The constraints are network flows, so every vertex of the linear program is an integer solution.
        # An integer program would give the same solution, but would take far longer.
        limits = Bounds(0, np.concatenate([o[i], np.ones(len(k))]))  # pyright: ignore[reportArgumentType]  (arrays too)
        solution = milp(cost, bounds=limits, constraints=(sent, right, right))
        if solution.x is None or np.abs(solution.x - np.rint(solution.x)).max() > 1e-6:
            raise RuntimeError(f"the solver returned no optimal placement of copies: {solution.message}")
        copies[i, j] = np.rint(solution.x[: len(i)])
        least += solution.fun
    reached = float(((h + copies.sum(0)) ** 2).sum())
    # If client j holds T_j of the K + B examples,  ||Y - 1/N||^2 = sum_j T_j^2/(K + B)^2 - 1/N.
    return Even(copies, reached / total**2 - 1 / n, least / total**2 - 1 / n)


def plans(labels: np.ndarray, owners: np.ndarray, n_clients: int, opened: np.ndarray, d: int) -> dict[int, Even]:
    """Return the optimal placement of copies for each class in ``labels`` (see ``optimal_copies``).

    labels, owners: (M,) class and client of each example. opened: row numbers of the examples that are not private.
    d: number of other clients that get a copy of each example that is not private.
    """

    def counts(members: np.ndarray) -> tuple[int, ...]:
        return tuple(np.bincount(owners[members], minlength=n_clients).tolist())

    of_opened = {int(label): opened[labels[opened] == label] for label in np.unique(labels)}
    return {label: optimal_copies(counts(labels == label), counts(some), d) for label, some in of_opened.items()}
