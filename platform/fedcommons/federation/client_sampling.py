"""Uniform sampling of the clients that take part in a round."""

import numpy as np

from fedcommons.seeding import numpy_generator


def joining(n_clients: int, participation: float) -> int:
    """Return floor(N C), the number of clients per round; N: number of clients, C: participation in (0, 1]."""
    return int(n_clients * participation + 1e-9)


def participants(n_clients: int, participation: float, seed: int, round: int) -> list[int]:
    """Return the participants in ascending order, sampled uniformly without replacement; see ``joining``."""
    k = joining(n_clients, participation)
    if k == n_clients:
        return list(range(n_clients))
    sampled = numpy_generator(seed, "participants", round).choice(n_clients, k, replace=False, shuffle=False)
    return np.sort(sampled).tolist()
