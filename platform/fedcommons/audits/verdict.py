"""When an audit says that generators have memorised, from five counts that add up over clients.

If nothing was memorised, seen and held-out images may be exchanged, so each record of the 2m is a seen one as by a
fair coin. Three tests share ``ALARM``: are more made images closer to seen ones than coins explain, are more seen
images than held-out ones near to a made one, and are more twice as near? Exact copies are found by the last one: chance
leaves few images so near, so a dozen of them are enough.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedcommons.audits.nearest_neighbours import Compared

ALARM = 0.001
"""Probability with which a generator that memorised nothing is said to have, at most."""
PARTS = np.array([0.25, 0.25, 0.5])
"""What each test has of it."""


@dataclass(frozen=True, eq=False)
class Planted:
    """Which of a client's made images (``rows``) give way to which of its planted ``copies``."""

    rows: np.ndarray
    copies: np.ndarray


NOTHING = Planted(np.zeros(0, np.int64), np.zeros(0, np.int64))


def counts(one: Compared, label: int | None = None, planted: Planted = NOTHING) -> np.ndarray:
    """(7,) of a client's made images, of all classes or of one: k; how many are closer to a matched seen image than to
    any held-out one; sum over records r of k_r^2, for the k_r images whose closest record is r; how many matched seen
    images, and how many held-out ones, some made image is nearer to than the limit; the same for half of the limit.

    planted: as if these copies were among them. Their rows must be of the class.
    """
    kept = np.full(len(one.near), True)
    kept[planted.rows] = False
    inside = kept if label is None else kept & (one.of.made.y.numpy() == label)
    closer = one.made.closer[inside].sum() + one.copies.closer[planted.copies].sum()
    records = np.concatenate([one.made.record[inside], one.copies.record[planted.copies]])
    near = kept & one.made.below.any((1, 2))
    bits = np.concatenate([one.made.below[near], one.copies.below[planted.copies]])
    m = len(one.of.held_out)
    hit = np.unpackbits(np.bitwise_or.reduce(bits, axis=0), axis=1, count=2 * m)
    if label is not None:
        hit &= torch.cat([one.of.seen.y[one.of.matched], one.of.held_out.y]).numpy() == label
    hits = hit.reshape(4, m).sum(1)  # near to seen, to held-out; twice as near to seen, to held-out
    return np.array([len(records), closer, np.square(np.bincount(records)).sum(), *hits], float)


def independent(total: np.ndarray) -> float:
    """The number of independent images: chance decides at once about those whose closest record is the same."""
    return float(total[0] ** 2 / total[2])


def chance(heads: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Probability of so many heads or more of fair coins; the numbers need not be whole."""
    from scipy.special import betainc

    return np.where(heads > 0, betainc(np.maximum(heads, 1e-9), coins - heads + 1, 0.5), 1.0)


def chances(total: np.ndarray) -> np.ndarray:
    """(3,), one for each test: the probability of counts like these, or larger ones, if nothing was memorised.

    total: (7,) ``counts``, added over clients.
    """
    k, closer, _, near, control, half, half_control = total
    n = independent(total)
    return chance(np.array([closer / k * n, near, half]), np.array([n, near + control, half + half_control]))


def memorised(total: np.ndarray) -> bool:
    """Whether these ``counts``, added over clients, are more than chance explains."""
    return bool(np.any(chances(total) < PARTS * ALARM))
