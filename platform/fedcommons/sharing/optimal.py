"""The placement of copies that makes a class as even over clients as it can be, where label counts are known.

Makkonen et al. (2024), section II: the sharing that minimises ||Y - 1/N||^2, which the paper names and leaves out.

h_i: examples of the class that client i owns, K in all;  o_i: those of them that are not private;  s_ij: copies of i's
that j gets;  Y_j = (h_j + sum_i s_ij)/(K + B) with B = d sum_i o_i.   Classes do not constrain each other, so each is a
problem of its own, and examples of one owner and class are alike, so that counts are enough.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, eq=False)
class Even:
    """copies: (N, N) int, s_ij. distance: ||Y - 1/N||^2 with them. bound: what the solver proves that no s is below."""

    copies: np.ndarray
    distance: float
    bound: float


@lru_cache(maxsize=1024)
def evened(owned: tuple[int, ...], opened: tuple[int, ...], d: int) -> Even:
    """The best s for the counts h (``owned``, K > 0) and o (``opened``) of one class, by integer linear programming.

    Minimise sum_j T_j^2 for T_j = h_j + sum_i s_ij, as sum_j T_j = K + B is given, subject to s_ij <= o_i, s_ii = 0 and
    sum_j s_ij = d o_i: then o_i examples can go to d distinct others each. With T_j = h_j + y_j1 + y_j2 + ..., each y
    in [0, 1] and of cost (h_j + k)^2 - (h_j + k - 1)^2, the square is linear and right at whole numbers: the costs
    rise, so the y fill up in order.

    Raises:
        RuntimeError: the solver finds no solution of whole numbers.
    """
    from scipy.optimize import Bounds, milp  # scipy takes a second to import
    from scipy.sparse import coo_array

    h, o = np.array(owned), np.array(opened)
    n, copies, total = len(h), np.zeros((len(h), len(h)), np.int64), sum(owned) + d * sum(opened)
    i, j = (np.repeat(np.flatnonzero(o), n), np.tile(np.arange(n), np.count_nonzero(o)))
    i, j = i[i != j], j[i != j]
    room = np.bincount(j, o[i], n).astype(np.int64)  # most copies that each client can get
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
        # No integrality is asked for, which takes far longer: these are flows in a network, every vertex is whole, and
        # the relaxation's value is a bound in any case.
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
    """The best placement for each class that there is; labels, owners: (M,); ``opened``: those that are not private."""

    def counts(members: np.ndarray) -> tuple[int, ...]:
        return tuple(np.bincount(owners[members], minlength=n_clients).tolist())

    of_opened = {int(label): opened[labels[opened] == label] for label in np.unique(labels)}
    return {label: evened(counts(labels == label), counts(some), d) for label, some in of_opened.items()}
