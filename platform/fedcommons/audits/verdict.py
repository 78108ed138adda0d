"""The verdict of the memorisation audit: do synthetic images depend too much on training images? Three tests decide.

For each client, m training images of the generator (seen images) are matched by class with m held-out images; the 2m
real images are called records. If nothing was memorised, seen and held-out images are exchangeable, as if a fair coin
had decided which record is a seen image. The three tests share the error probability ``ALARM``:

1. Is the closest record of a synthetic image a seen image more often than fair coins explain?
2. Are there more seen images than held-out images within the near-copy limit of a synthetic image?
3. The same question for half of the limit. By chance few images are so near, so this test detects a dozen exact copies.

The tests use seven counts, which are added over clients.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedcommons.audits.nearest_neighbours import Compared

ALARM = 0.001
"""Largest probability of a false alarm: memorisation is reported, but the generator memorised nothing."""
PARTS = np.array([0.25, 0.25, 0.5])
"""Share of the error probability ``ALARM`` for each of the three tests."""


@dataclass(frozen=True, eq=False)
class Planted:
    """A replacement of a client's synthetic images by copies of training images.

    rows: indices of the replaced synthetic images. copies: indices of the copies in ``Compared.copies``.
    """

    rows: np.ndarray
    copies: np.ndarray


NOTHING = Planted(np.zeros(0, np.int64), np.zeros(0, np.int64))


def counts(comparison: Compared, label: int | None = None, planted: Planted = NOTHING) -> np.ndarray:
    """Return seven counts (7,) for a client's synthetic images, of all classes or of class ``label``.

    0     k, the number of synthetic images
    1     the number of synthetic images that are closer to a matched seen image than to any held-out image
    2     the sum over records r of k_r^2, where k_r synthetic images have the closest record r
    3, 4  the numbers of matched seen and of held-out images within the near-copy limit of a synthetic image
    5, 6  the same two numbers for half of the near-copy limit

    planted: copies that replace synthetic images. The replaced images must be of class ``label``.
    """
    subject, unchanged = comparison.subject, np.full(len(comparison.near), True)
    unchanged[planted.rows] = False
    inside = unchanged if label is None else unchanged & (subject.synthetic.y.numpy() == label)
    closer = comparison.nearest.closer[inside].sum() + comparison.copies.closer[planted.copies].sum()
    records = np.concatenate([comparison.nearest.record[inside], comparison.copies.record[planted.copies]])
    near = unchanged & comparison.nearest.below.any((1, 2))
    bits = np.concatenate([comparison.nearest.below[near], comparison.copies.below[planted.copies]])
    m = len(subject.held_out)
    hit = np.unpackbits(np.bitwise_or.reduce(bits, axis=0), axis=1, count=2 * m)
    if label is not None:
        labels = torch.cat([subject.training.y[subject.matched], subject.held_out.y])
        hit &= labels.numpy() == label
    hits = hit.reshape(4, m).sum(1)  # counts 3 to 6: seen and held-out images, for the limit and for half of it
    return np.array([len(records), closer, np.square(np.bincount(records)).sum(), *hits], float)


def independent(total: np.ndarray) -> float:
    """Return k^2 / sum_r k_r^2 (see ``counts``): the k synthetic images vary like this number of independent images."""
    return float(total[0] ** 2 / total[2])


def chance(heads: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Return the probability of at least ``heads`` heads among ``coins`` fair coins; both numbers may be fractional."""
    from scipy.special import betainc

    return np.where(heads > 0, betainc(np.maximum(heads, 1e-9), coins - heads + 1, 0.5), 1.0)


def chances(total: np.ndarray) -> np.ndarray:
    """Return (3,): the p-value of each of the three tests under the hypothesis that nothing was memorised.

    total: (7,) sum of ``counts`` over clients.
    """
    k, closer, _, near, control, half, half_control = total
    n = independent(total)
    return chance(np.array([closer / k * n, near, half]), np.array([n, near + control, half + half_control]))


def memorised(total: np.ndarray) -> bool:
    """Return whether at least one of three tests reports memorised images. total: (7,) ``counts`` of all clients."""
    return bool(np.any(chances(total) < PARTS * ALARM))
