"""Who takes part in a round."""

import numpy as np

from fedcommons.seeds import numpy_generator


def participants(n_clients: int, participation: float, seed: int, round: int) -> list[int]:
    """floor(N C) clients, uniformly without replacement, sorted; all of them for C = 1."""
    k = int(n_clients * participation + 1e-9)
    if k == n_clients:
        return list(range(n_clients))
    drawn = numpy_generator(seed, "participants", round).choice(n_clients, k, replace=False, shuffle=False)
    return np.sort(drawn).tolist()


def stragglers(joined: list[int], q: float, seed: int, round: int) -> set[int]:
    """Those of the round whose answer does not arrive: each with probability q, whoever else takes part."""
    return {i for i in joined if q and numpy_generator(seed, "straggles", round, i).random() < q}
