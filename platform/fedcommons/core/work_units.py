"""Checks of the work that an algorithm reports in addition to local steps (``TellsWork``), and time estimates.

A round takes  c + sum_k n_k s_k  seconds.  n_k: number of pieces of work of kind k, such as server steps;  s_k: seconds
per piece of kind k;  c: seconds for everything else.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

import numpy as np

from fedcommons.core.algorithm import Algorithm, Facts, TellsWork
from fedcommons.core.local_training import LocalSGD
from fedcommons.errors import UserError, name_of, quote, user_code_context


def pieces_of(
    algorithm: Algorithm, facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int]
) -> Mapping[str, float]:
    """Return, by kind, an algorithm's number of pieces of work in a round; empty if it does not report work.

    Raises:
        UserError: ``pieces`` does not map names to numbers of at least 0.
    """
    if not isinstance(algorithm, TellsWork):
        return {}
    with user_code_context(algorithm, "pieces", f"round {round}"):
        pieces: Any = algorithm.pieces(facts, loop, round, clients)
    what = f"{name_of(algorithm)}.pieces must give numbers of at least 0 by name"
    if not isinstance(pieces, Mapping):
        raise UserError(f"{what}, got {quote(pieces)}.")
    for name, n in pieces.items():
        if not isinstance(name, str) or not isinstance(n, Real) or not 0 <= float(n) < inf:
            raise UserError(f"{what}, got {quote(n)} of {quote(name)}.")
    return pieces


def smaller_of(algorithm: TellsWork, times: int) -> Sequence[tuple[Algorithm, int]]:
    """Return the pairs (variant of the algorithm, number of examples) to time; see ``TellsWork.smaller``.

    Raises:
        UserError: ``smaller`` returns anything other than pairs of a variant and a number of at least 1.
    """
    with user_code_context(algorithm, "smaller"):
        variants: Any = algorithm.smaller(times)
    kind = type(algorithm)
    for pair in variants if isinstance(variants, Sequence) and variants else [variants]:
        match pair:
            case (Hashable() as variant, int(n)) if type(variant) is kind and n >= 1:
                continue
        raise UserError(
            f"{name_of(kind)}.smaller must give pairs of a variant, which is a frozen {kind.__name__}, and the "
            f"number of a client's examples, at least 1, got {quote(pair)}."
        )
    return variants


@dataclass(frozen=True)
class Timed:
    """A timed round. alike: group of rounds that differ only in ``pieces``, the numbers of pieces of work by kind."""

    alike: int
    pieces: Mapping[str, float]
    seconds: float


def prices(algorithm: str, rounds: Sequence[Timed]) -> dict[str, float]:
    """Return the estimated seconds per piece s_k >= 0 of each kind k, by least squares of relative errors.

    Raises:
        UserError: the rounds do not differ enough to estimate all s_k; the message names the ``algorithm``.
    """
    from scipy.optimize import nnls  # imported here, because scipy takes a second to import

    names, groups = sorted({name for r in rounds for name in r.pieces}), sorted({r.alike for r in rounds})
    rows = [[*(r.alike == g for g in groups), *(r.pieces.get(name, 0) for name in names)] for r in rounds]
    counts, seconds = np.array(rows, float), np.array([max(r.seconds, 1e-9) for r in rounds])
    largest = counts.max(0)
    if np.linalg.matrix_rank(counts / np.where(largest, largest, 1)) < counts.shape[1]:
        raise UserError(
            f"{algorithm}.smaller does not tell the prices of {', '.join(names)} apart: it must return at least one "
            "variant more than there are kinds of pieces, and for each kind two variants that differ in it."
        )
    scale = 1 / seconds
    scaled_prices, _ = nnls(counts * scale[:, None] / largest, np.ones(len(rounds)))
    return dict(zip(names, (scaled_prices / largest)[len(groups) :].tolist(), strict=True))


def in_seconds(pieces: Mapping[str, float], prices: Mapping[str, float]) -> float:
    """Return the seconds sum_k n_k s_k for n_k (``pieces``) pieces of kind k at s_k (``prices``) seconds per piece.

    Raises:
        UserError: the seconds per piece of a kind are not known.
    """
    if missing := sorted(name for name, n in pieces.items() if n and name not in prices):
        raise UserError(f"--dry-run has no price of {', '.join(missing)}: no variant of smaller has such a piece.")
    return sum(n * prices[name] for name, n in pieces.items() if n)
