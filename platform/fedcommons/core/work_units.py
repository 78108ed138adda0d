"""What an algorithm tells of its work beside local steps (``TellsWork``), checked, and what a piece of it costs.

A round takes  c + sum_k n_k s_k  seconds:  n_k pieces of kind k, of s_k seconds each, and c for all else.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

import numpy as np

from fedcommons.core.algorithm import Algorithm, Facts, TellsWork
from fedcommons.core.local_training import LocalSGD
from fedcommons.errors import UserError, name_of, shown, somebodys


def pieces_of(
    algorithm: Algorithm, facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int]
) -> Mapping[str, float]:
    """Its pieces in a round, see ``TellsWork.pieces``; none where it does not tell.

    Raises:
        UserError: they are no numbers of at least 0 by name.
    """
    if not isinstance(algorithm, TellsWork):
        return {}
    with somebodys(algorithm, "pieces", f"round {round}"):
        told: Any = algorithm.pieces(facts, loop, round, clients)
    what = f"{name_of(algorithm)}.pieces must give numbers of at least 0 by name"
    if not isinstance(told, Mapping):
        raise UserError(f"{what}, got {shown(told)}.")
    for name, n in told.items():
        if not isinstance(name, str) or not isinstance(n, Real) or not 0 <= float(n) < inf:
            raise UserError(f"{what}, got {shown(n)} of {shown(name)}.")
    return told


def smaller_of(algorithm: TellsWork, times: int) -> Sequence[tuple[Algorithm, int]]:
    """Its variants that are timed, see ``TellsWork.smaller``.

    Raises:
        UserError: they are no variants of it with numbers of examples.
    """
    with somebodys(algorithm, "smaller"):
        told: Any = algorithm.smaller(times)
    kind = type(algorithm)
    for pair in told if isinstance(told, Sequence) and told else [told]:
        match pair:
            case (Hashable() as variant, int(n)) if type(variant) is kind and n >= 1:
                continue
        raise UserError(
            f"{name_of(kind)}.smaller must give pairs of a variant, a frozen {kind.__name__} too, and how many "
            f"examples a client holds, at least 1, got {shown(pair)}."
        )
    return told


@dataclass(frozen=True)
class Timed:
    """A round that was timed. alike: rounds in which this is equal differ in their pieces only, so they share c."""

    alike: int
    pieces: Mapping[str, float]
    seconds: float


def prices(algorithm: str, rounds: Sequence[Timed]) -> dict[str, float]:
    """Seconds of a piece of each kind, none below 0, by least squares of relative errors.

    Raises:
        UserError: the rounds do not differ enough to tell; it names the ``algorithm``.
    """
    from scipy.optimize import nnls  # scipy takes a second to import

    names, groups = sorted({name for r in rounds for name in r.pieces}), sorted({r.alike for r in rounds})
    rows = [[*(r.alike == g for g in groups), *(r.pieces.get(name, 0) for name in names)] for r in rounds]
    counts, seconds = np.array(rows, float), np.array([max(r.seconds, 1e-9) for r in rounds])
    largest = counts.max(0)
    if np.linalg.matrix_rank(counts / np.where(largest, largest, 1)) < counts.shape[1]:
        raise UserError(
            f"{algorithm}.smaller does not tell the prices of {', '.join(names)} apart: it must give at least one "
            "variant more than there are kinds of pieces, and two that differ in each kind."
        )
    scale = 1 / seconds
    scaled_prices, _ = nnls(counts * scale[:, None] / largest, np.ones(len(rounds)))
    return dict(zip(names, (scaled_prices / largest)[len(groups) :].tolist(), strict=True))


def in_seconds(pieces: Mapping[str, float], prices: Mapping[str, float]) -> float:
    """Of so many pieces at these prices.

    Raises:
        UserError: there is no price of one.
    """
    if lacking := sorted(name for name, n in pieces.items() if n and name not in prices):
        raise UserError(f"--dry-run has no price of {', '.join(lacking)}: no variant of smaller has any of it.")
    return sum(n * prices[name] for name, n in pieces.items() if n)
