"""Who takes part in a round, and whose reply comes too late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedcommons.core.algorithm import Facts
from fedcommons.seeds import numpy_generator

Late = Callable[[Sequence[int], Facts, int, int], set[int]]
"""(joined, facts, round, seed) -> the clients in ``joined`` whose reply does not arrive."""


def participants(n_clients: int, participation: float, seed: int, round: int) -> list[int]:
    """floor(N C) clients, drawn uniformly without replacement and sorted; all clients for C = 1."""
    k = int(n_clients * participation + 1e-9)
    if k == n_clients:
        return list(range(n_clients))
    drawn = numpy_generator(seed, "participants", round).choice(n_clients, k, replace=False, shuffle=False)
    return np.sort(drawn).tolist()


@dataclass(frozen=True)
class Stragglers:
    """Each client is late with probability q, independently of the others."""

    q: float

    def __call__(self, joined: Sequence[int], facts: Facts, round: int, seed: int) -> set[int]:
        return {i for i in joined if numpy_generator(seed, "straggles", round, i).random() < self.q}
