"""The power of the memorisation audit: copies of training images replace synthetic images, and the test is repeated.

No distances are computed again. ``Compared.copies`` stores the nearest neighbours of each copy, as ``Compared.nearest``
does for synthetic images, and the near-copy limit does not depend on the synthetic images. So the verdict equals that
of an audit of the changed pool.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np

from fedcommons.audits.nearest_neighbours import Compared
from fedcommons.audits.verdict import Planted, counts, memorised
from fedcommons.seeding import numpy_generator

SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of a pool of synthetic images that copies replace; the audit is repeated for each share."""
DRAWS, ENOUGH = 100, 96
"""Number of random pools for each share, and the number of these pools that the audit must detect.

An audit that detects a pool with probability 0.9 detects 96 or more of 100 pools with probability 0.024 only. So 96
detections show, with a one-sided confidence of 97.5 %, that the probability is at least 0.9.
"""


def fewest_copies(compared: Sequence[Compared], seed: int, label: int | None = None) -> int | None:
    """Return the smallest number of copies that the audit detects with probability 0.9, among the shares ``SHARES``.

    None: the audit detects none of the shares. compared: comparisons of the clients that get one joint verdict. label:
    class of the images (None: all classes).
    """
    k = len(_places(compared, label))
    for n in sorted({ceil(share * k) for share in SHARES}):
        missed = 0
        for is_detected in verdicts(compared, n, seed, label):
            missed += not is_detected
            if missed > DRAWS - ENOUGH:
                break
        else:
            return n
    return None


def verdicts(compared: Sequence[Compared], n: int, seed: int, label: int | None = None) -> Iterator[bool]:
    """Yield for each of ``DRAWS`` random pools with n copies whether the audit reports that images are memorised."""
    plain = np.array([counts(c, label) for c in compared])
    for planted in plantings(compared, n, seed, label):
        changed = [counts(compared[i], label, copies) - plain[i] for i, copies in planted.items()]
        yield memorised(np.sum([plain.sum(0), *changed], 0))


def plantings(
    compared: Sequence[Compared], n: int, seed: int, label: int | None = None
) -> Iterator[dict[int, Planted]]:
    """Yield ``DRAWS`` random replacements of n synthetic images by copies: index in ``compared`` -> ``Planted``.

    The copies are of training images of the same client's generator. All synthetic images (of class ``label``) are
    equally likely to be replaced. No image is copied twice before all images are copied once.
    """
    places = _places(compared, label)
    for draw in range(DRAWS):
        draws = numpy_generator(seed, "planted", "all" if label is None else label, n, draw)
        chosen = places[draws.permutation(len(places))[:n]]
        planted = {}
        for i in np.unique(chosen[:, 0]).tolist():
            rows = chosen[chosen[:, 0] == i, 1]
            planted[i] = Planted(rows, np.resize(draws.permutation(_rows(compared[i].copied, label)), len(rows)))
        yield planted


def _places(compared: Sequence[Compared], label: int | None) -> np.ndarray:
    """Return (k, 2): client and row of the k images of class ``label`` (None: any) that copies can replace."""
    places = [np.zeros((0, 2), np.int64)]
    for i, c in enumerate(compared):
        rows = _rows(c.subject.synthetic.y.numpy(), label)
        if len(_rows(c.copied, label)):
            places.append(np.stack([np.full(len(rows), i), rows], 1))
    return np.concatenate(places)


def _rows(labels: np.ndarray, label: int | None) -> np.ndarray:
    return np.arange(len(labels)) if label is None else np.flatnonzero(labels == label)
