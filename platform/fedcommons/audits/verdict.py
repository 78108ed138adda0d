"""The verdict of an audit whether generators have memorised, from seven counts that add up over clients.

If nothing was memorised, seen and held-out images are exchangeable, so a fair coin decides which of the 2m records are
seen images. Three tests share ``ALARM``. Are more synthetic images closer to seen images than coins explain? Are more
seen images than held-out images near to a synthetic image? Are more of them twice as near? The last test detects exact
copies: by chance few images are so near, so a dozen copies are enough.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedcommons.audits.nearest_neighbours import Compared

ALARM = 0.001
"""Largest probability of a false alarm: a generator that memorised nothing is reported to have memorised."""
PARTS = np.array([0.25, 0.25, 0.5])
"""Share of ``ALARM`` that each test gets."""


@dataclass(frozen=True, eq=False)
class Planted:
    """Rows of a client's synthetic images that are replaced by planted copies (indices ``copies``)."""

    rows: np.ndarray
    copies: np.ndarray


NOTHING = Planted(np.zeros(0, np.int64), np.zeros(0, np.int64))


def counts(comparison: Compared, label: int | None = None, planted: Planted = NOTHING) -> np.ndarray:
    """Count (7,) for a client's synthetic images, of all classes or of class ``label``.

    The counts are: k; the number of images closer to a matched seen image than to any held-out image; the sum over
    records r of k_r^2, for the k_r images whose closest record is r; the numbers of matched seen and of held-out images
    to which a synthetic image is nearer than the limit; the last two numbers for half of the limit.

    planted: copies that replace synthetic images. The replaced rows must be of the class.
    """
    unchanged = np.full(len(comparison.near), True)
    unchanged[planted.rows] = False
    inside = unchanged if label is None else unchanged & (comparison.subject.synthetic.y.numpy() == label)
    closer = comparison.nearest.closer[inside].sum() + comparison.copies.closer[planted.copies].sum()
    records = np.concatenate([comparison.nearest.record[inside], comparison.copies.record[planted.copies]])
    near = unchanged & comparison.nearest.below.any((1, 2))
    bits = np.concatenate([comparison.nearest.below[near], comparison.copies.below[planted.copies]])
    m = len(comparison.subject.held_out)
    hit = np.unpackbits(np.bitwise_or.reduce(bits, axis=0), axis=1, count=2 * m)
    if label is not None:
        hit &= (
            torch.cat(
                [comparison.subject.training.y[comparison.subject.matched], comparison.subject.held_out.y]
            ).numpy()
            == label
        )
    hits = hit.reshape(4, m).sum(1)  # near to seen, to held-out; twice as near to seen, to held-out
    return np.array([len(records), closer, np.square(np.bincount(records)).sum(), *hits], float)


def independent(total: np.ndarray) -> float:
    """Return the number of independent images: all images with the same closest record share one coin."""
    return float(total[0] ** 2 / total[2])


def chance(heads: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Return the probability of ``heads`` heads or more of ``coins`` fair coins; the numbers need not be whole."""
    from scipy.special import betainc

    return np.where(heads > 0, betainc(np.maximum(heads, 1e-9), coins - heads + 1, 0.5), 1.0)


def chances(total: np.ndarray) -> np.ndarray:
    """Return (3,), one for each test: the probability of equal or larger counts if nothing was memorised.

    total: (7,) sum of ``counts`` over clients.
    """
    k, closer, _, near, control, half, half_control = total
    n = independent(total)
    return chance(np.array([closer / k * n, near, half]), np.array([n, near + control, half + half_control]))


def memorised(total: np.ndarray) -> bool:
    """Return whether the sum of ``counts`` over clients is more than chance explains."""
    return bool(np.any(chances(total) < PARTS * ALARM))
