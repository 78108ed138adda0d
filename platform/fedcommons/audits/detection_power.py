"""How few copies an audit finds: copies of seen images take the place of made ones, and the verdict is drawn up again.

Nothing is measured again for that. What a copy is closest to stands beside what a made image is closest to
(``Compared.copies``), and the limit does not depend on what was made. So the verdict is that of an audit of the changed
pool.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import numpy as np

from fedcommons.audits.nearest_neighbours import Compared
from fedcommons.audits.verdict import Planted, counts, memorised
from fedcommons.seeding import numpy_generator

SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of a pool that are copies."""
DRAWS, ENOUGH = 100, 96
"""Pools that are drawn for each share, and how many of them must be found.

At a probability of 0.9 as many are with probability 0.024, so 0.9 is the lower end of the 95 % interval, or below it.
"""


def fewest_copies(compared: Sequence[Compared], seed: int, label: int | None = None) -> int | None:
    """The number of copies in the smallest of ``SHARES`` that is found with probability 0.9; None: none of them is.

    compared: clients of which there is one verdict, on the made images of all classes or of one.
    """
    k = len(_places(compared, label))
    for n in sorted({ceil(share * k) for share in SHARES}):
        missed = 0
        for found in verdicts(compared, n, seed, label):
            missed += not found
            if missed > DRAWS - ENOUGH:
                break
        else:
            return n
    return None


def verdicts(compared: Sequence[Compared], n: int, seed: int, label: int | None = None) -> Iterator[bool]:
    """Whether a pool with n copies is said to be memorised, for ``DRAWS`` pools one after the other."""
    plain = np.array([counts(c, label) for c in compared])
    for planted in plantings(compared, n, seed, label):
        changed = [counts(compared[i], label, copies) - plain[i] for i, copies in planted.items()]
        yield memorised(np.sum([plain.sum(0), *changed], 0))


def plantings(
    compared: Sequence[Compared], n: int, seed: int, label: int | None = None
) -> Iterator[dict[int, Planted]]:
    """``DRAWS`` times, by number in ``compared``: n made images give way to copies of what the same client has seen.

    All made images are equally likely, or those of the class. No image is copied twice before all are once.
    """
    places = _places(compared, label)
    for draw in range(DRAWS):
        draws = numpy_generator(seed, "planted", "all" if label is None else label, n, draw)
        chosen = places[draws.permutation(len(places))[:n]]
        planted = {}
        for i in np.unique(chosen[:, 0]).tolist():
            rows = chosen[chosen[:, 0] == i, 1]
            planted[i] = Planted(rows, np.resize(draws.permutation(_of(compared[i].copied, label)), len(rows)))
        yield planted


def _places(compared: Sequence[Compared], label: int | None) -> np.ndarray:
    """(k, 2): client and row of the made images that may give way, as their client has seen images of the class."""
    places = [np.zeros((0, 2), np.int64)]
    for i, c in enumerate(compared):
        rows = _of(c.of.made.y.numpy(), label)
        if len(_of(c.copied, label)):
            places.append(np.stack([np.full(len(rows), i), rows], 1))
    return np.concatenate(places)


def _of(labels: np.ndarray, label: int | None) -> np.ndarray:
    return np.arange(len(labels)) if label is None else np.flatnonzero(labels == label)
