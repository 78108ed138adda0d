"""The placement of copies on clients if a share of the examples is not private.

Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning with
non-IID data", arXiv:2404.03524, sections II and III-A.   c: share of examples that are not private;  d: copies of
such an example for other clients;  N: clients;  M: examples;  K: examples of a class;  Y: shares of a class over
clients after sharing.

The optimal placement minimises ||Y - 1/N||^2 and needs the label counts; section II names it and leaves it out.
h_i: examples of the class that client i owns, K in total;  o_i: the examples among h_i that are not private;  s_ij:
copies of client i's examples that client j gets;  Y_j = (h_j + sum_i s_ij)/(K + B) with B = d sum_i o_i.
Classes do not constrain each other, so each class is a separate problem. Examples of one owner and class are
interchangeable, so counts are enough.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


def n_open(c: float, n: int) -> int:
    """Return the number of n examples that are not private:  c n rounded to the nearest integer, halves rounded up."""
    return int(c * n + 0.5 + 1e-9)


def sample_shareable(labels: np.ndarray, owners: np.ndarray, c: float, rng: np.random.Generator) -> np.ndarray:
    """Return the examples that are not private, in a random order; a smaller c returns the first of them.

    labels, owners: (M,). The result has ``n_open(c, M)`` examples. About the share c of each class, and of a client's
    examples of a class, is not private. The rounding is Webster's, so a larger c only adds examples. Ties are broken
    at random.
    """
    order = rng.permutation(len(labels))
    # first interleave the pairs (owner, class) in proportion to their sizes, then the classes
    for group in (owners * (labels.max() + 1) + labels, labels):
        order = order[np.argsort(_parts(group[order]), kind="stable")]
    return order[: n_open(c, len(labels))]


def _parts(group: np.ndarray) -> np.ndarray:
    """Return (k - 1/2)/n for the k-th of the n entries of each group: (M,)."""
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
    """Return whether client i holds example j: (M, N) bool; the row sums d_j count the owner too.

    exact: each example that is not private goes to d distinct other clients, uniformly at random. binomial: it goes to
    each other client with probability d/(N-1), independently. optimal: it goes to d distinct other clients such that
    the sum over classes of ||Y - 1/N||^2 is minimal. This needs all clients' label counts; the examples of a client and
    class are assigned at random.

    labels, owners: (M,). With the same random generator, a larger c or d keeps all copies of a smaller c or d, unless
    the placement is optimal.
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
                # no client gets more than len(of_owner) copies, so cycling through the examples gives it none twice
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
    """The optimal copies of one class.

    copies: (N, N) int, s_ij. distance: ||Y - 1/N||^2 with these copies. bound: proven lower bound for every s.
    """

    copies: np.ndarray
    distance: float
    bound: float


@lru_cache(maxsize=1024)
def optimal_copies(owned: tuple[int, ...], opened: tuple[int, ...], d: int) -> Even:
    """Return the best s for the counts h (``owned``, K > 0) and o (``opened``) of one class, by linear programming.

    Minimise sum_j T_j^2 for T_j = h_j + sum_i s_ij, as sum_j T_j = K + B is fixed, subject to s_ij <= o_i, s_ii = 0 and
    sum_j s_ij = d o_i: then o_i examples can go to d distinct others each. With T_j = h_j + y_j1 + y_j2 + ..., each y
    in [0, 1] and of cost (h_j + k)^2 - (h_j + k - 1)^2, the square is linear and exact at integers: the costs
    rise, so the y fill up in order.

    Raises:
        RuntimeError: the solver finds no integer solution.
    """
    from scipy.optimize import Bounds, milp  # scipy takes a second to import
    from scipy.sparse import coo_array

    h, o = np.array(owned), np.array(opened)
    n, copies, total = len(h), np.zeros((len(h), len(h)), np.int64), sum(owned) + d * sum(opened)
    i, j = (np.repeat(np.flatnonzero(o), n), np.tile(np.arange(n), np.count_nonzero(o)))
    i, j = i[i != j], j[i != j]
    room = np.bincount(j, o[i], n).astype(np.int64)  # maximum number of copies that each client can get
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
        # Requiring integers would take far longer. The constraints are network flows, so every vertex is an integer
        # solution, and the value of the relaxation is a bound in any case.
        limits = Bounds(0, np.concatenate([o[i], np.ones(len(k))]))  # pyright: ignore[reportArgumentType]  (arrays too)
        solution = milp(cost, bounds=limits, constraints=(sent, right, right))
        if solution.x is None or np.abs(solution.x - np.rint(solution.x)).max() > 1e-6:
            raise RuntimeError(f"no optimal placement of copies was found: {solution.message}")
        copies[i, j] = np.rint(solution.x[: len(i)])
        least += solution.fun
    reached = float(((h + copies.sum(0)) ** 2).sum())
    # sum_j T_j^2/(K + B)^2 - 1/N is ||Y - 1/N||^2
    return Even(copies, reached / total**2 - 1 / n, least / total**2 - 1 / n)


def plans(labels: np.ndarray, owners: np.ndarray, n_clients: int, opened: np.ndarray, d: int) -> dict[int, Even]:
    """Return the best placement for each class present; labels, owners: (M,); ``opened``: examples not private."""

    def counts(members: np.ndarray) -> tuple[int, ...]:
        return tuple(np.bincount(owners[members], minlength=n_clients).tolist())

    of_opened = {int(label): opened[labels[opened] == label] for label in np.unique(labels)}
    return {label: optimal_copies(counts(labels == label), counts(some), d) for label, some in of_opened.items()}
