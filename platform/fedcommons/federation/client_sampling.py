"""Sampling of the clients that take part in a round: a fixed number, or each client independently (Poisson)."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # torch takes seconds to import, and options need no torch
    from fedcommons.privacy.noise import Source


def joining(n_clients: int, participation: float) -> int:
    """Return floor(N C), the number of clients per round; N: number of clients, C: participation in (0, 1]."""
    return int(n_clients * participation + 1e-9)


def participants(n_clients: int, participation: float, seed: int, round: int) -> list[int]:
    """Return the participants in ascending order, sampled uniformly without replacement; see ``joining``."""
    from fedcommons.seeding import numpy_generator

    k = joining(n_clients, participation)
    if k == n_clients:
        return list(range(n_clients))
    sampled = numpy_generator(seed, "participants", round).choice(n_clients, k, replace=False, shuffle=False)
    return np.sort(sampled).tolist()


def poisson_participants(n_clients: int, participation: float, seed: int, round: int, source: "Source") -> list[int]:
    """Return the participants in ascending order; each client takes part independently with probability C.

    source: the run's source of noise. If it has a salt, the salt keys the draw, because the accountant of Poisson
    sampling assumes secret participants. Otherwise the seed keys the draw.
    """
    from fedcommons.seeding import numpy_generator

    is_secret = bool(source.salt)
    stream = source.stream("participants", seed, round) if is_secret else numpy_generator(seed, "participants", round)
    return np.flatnonzero(stream.random(n_clients) < participation).tolist()


def accounted(n_clients: int, participation: float, seed: int, rounds: int, *, poisson: bool) -> tuple[float, int]:
    """Return the sampling rate q and the number of rounds that the accountant of ``dp.central`` counts for a client."""
    return (participation, rounds) if poisson else (1.0, most_rounds(n_clients, participation, seed, rounds))


def most_rounds(n_clients: int, participation: float, seed: int, rounds: int) -> int:
    """Return the largest number of rounds in which one client takes part, if a fixed number of clients is sampled."""
    if joining(n_clients, participation) == n_clients:
        return rounds
    counts = np.zeros(n_clients, dtype=np.int64)
    for number in range(1, rounds + 1):
        counts[participants(n_clients, participation, seed, number)] += 1
    return int(counts.max())
