"""Distances from synthetic images to their generator's training images and to held-out images of the same distribution.

For one client: m: number of held-out images;  n: number of training images of its generator (seen images);  k: number
of synthetic images;  b: number of copies of seen images, which measure the power of the audit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from fedcommons.audits.distances import Look, Space, chunks, looks
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator

NEAR = 0.01
"""Share of held-out images that are allowed to be near-copies; the near-copy limit is computed from this share."""

COPIES = 1000
"""Largest number of copies of a client's training images that ``detection_power`` can mix into synthetic images."""
ROUNDING = 1e-6
"""Distance up to which two examples count as equal, as a share of the near-copy limit; above 0 because of rounding."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The images of one client that the audit compares.

    synthetic: k synthetic images. training: the n training images of the client's generator (seen images). held_out: m
    images that were not used for training. matched: (m,) indices in ``training``; entry j has the class of held-out
    image j.
    """

    client: int
    synthetic: Examples
    training: Examples
    held_out: Examples
    matched: Tensor


def subject(client: int, synthetic: Examples, training: Examples, unseen: Examples, seed: int) -> Subject:
    """Draw held-out images from ``unseen``: of each class as many as in ``training``, or all if there are fewer.

    The random numbers depend on ``seed`` and ``client`` only.

    Raises:
        UserError: no class of ``training`` is in ``unseen``.
    """
    draws, matched, held_out = numpy_generator(seed, "held out", client), [], []
    for label in np.unique(training.y.numpy()):
        seen_rows, unseen_rows = (draws.permutation(np.flatnonzero(e.y.numpy() == label)) for e in (training, unseen))
        n = min(len(seen_rows), len(unseen_rows))
        matched.append(seen_rows[:n])
        held_out.append(unseen_rows[:n])
    rows = np.concatenate([*matched, np.zeros(0, np.int64)])
    if not len(rows):
        raise UserError(
            f"sharing.audit needs held-out images of client {client}'s classes, but there are none: "
            "set data.validation above 0, or generator.rho below 1."
        )
    return Subject(client, synthetic, training, unseen[np.concatenate(held_out)], torch.from_numpy(rows))


@dataclass(frozen=True, eq=False, kw_only=True)
class Nearest:
    """The nearest neighbours of each of k images among the real images of a client.

    to_seen: (k,) distance to the closest of all n training images (seen); closest_seen: (k,) index of that image.
    to_matched, to_held_out: (k,) distance to the closest of the m training images that match the held-out images by
    class, and of the m held-out images. record: (k,) index of the closest of these 2m real images (records); 0 to m - 1
    are training images, m to 2m - 1 are held-out images. below: (k, 2, ceil(2m/8)), packed bits: whether each record is
    nearer than the near-copy limit, and whether it is nearer than half of the limit.
    """

    to_seen: np.ndarray
    closest_seen: np.ndarray
    to_matched: np.ndarray
    to_held_out: np.ndarray
    record: np.ndarray
    below: np.ndarray

    @property
    def closer(self) -> np.ndarray:
        """Return (k,): 1 for images closer to a matched training image than to any held-out image; tie: 1/2; else 0."""
        return (self.to_matched < self.to_held_out) + (self.to_matched == self.to_held_out) / 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Compared:
    """The comparison of one client's images in one space of distances.

    subject: the client's images. nearest: nearest neighbours of the k synthetic images. copies: nearest neighbours of b
    copies of training images, with which ``detection_power`` tests the audit. copied: (b,) labels of the b copies.
    limit: a synthetic image is a near-copy if its distance to a training image is below this number. expected: upper
    bound on the probability that a new image of the true distribution is below the limit.
    """

    subject: Subject
    nearest: Nearest
    copies: Nearest
    copied: np.ndarray
    limit: float
    expected: float

    @property
    def near(self) -> np.ndarray:
        """Return (k,) bool: whether a synthetic image is a near-copy (distance to a seen image below ``limit``)."""
        return self.nearest.to_seen < self.limit

    @property
    def identical(self) -> np.ndarray:
        """Return (k,) bool: whether a synthetic image equals a training image, up to shift, mirroring and rounding."""
        return self.nearest.to_seen <= ROUNDING * self.limit


def compare(subject: Subject, space: Space, seed: int) -> Compared:
    """Compare one client's synthetic images with its training images and held-out images, in a space of distances.

    Nearest neighbours of exact, moved or mirrored copies of training images, drawn with ``seed``, are also listed.
    With these copies, ``detection_power`` tests how many copies the audit detects.

    The near-copy limit is the j-th smallest of the m distances of held-out images to their closest training image, with
    j = max(1, floor(0.01 (m + 1))). If a new image has the distribution of the held-out images, its distance to the
    training images is below the limit with probability at most j/(m + 1).

    For m held-out, n training and k synthetic images and b <= ``COPIES`` copies, this computes (m + k + b) (n + m)
    distances, of which ``CHUNK`` (n + m) are in memory at the same time.
    """
    n, m = len(subject.training), len(subject.held_out)
    distances = space(torch.cat([subject.training.x, subject.held_out.x]))
    j = max(1, int(NEAR * (m + 1)))
    to_held_out = torch.cat([rows[:, :n].min(1).values for rows in chunks(subject.held_out.x, distances)])
    limit = float(to_held_out.sort().values[j - 1])
    records = torch.cat([subject.matched, n + torch.arange(m)])
    copies = copies_of(subject.training, numpy_generator(seed, "copies", subject.client))
    synthetic, planted = (_nearest(chunks(x, distances), n, records, limit) for x in (subject.synthetic.x, copies.x))
    return Compared(
        subject=subject, nearest=synthetic, copies=planted, copied=copies.y.numpy(), limit=limit, expected=j / (m + 1)
    )


def _nearest(rows: Iterable[Tensor], n: int, records: Tensor, limit: float) -> Nearest:
    """Return the nearest neighbours of images, from the images' distances to n seen and m held-out images.

    rows: the distances in blocks, with n + m columns. records: (2m,) column numbers of the m matched seen images and of
    the m held-out images. limit: the near-copy limit.
    """
    parts, m = [], len(records) // 2
    for chunk in rows:
        to_seen, seen = chunk[:, :n].min(1)
        pairs = chunk[:, records]
        (to_matched, first), (to_held_out, second) = pairs[:, :m].min(1), pairs[:, m:].min(1)
        record = torch.where(to_matched <= to_held_out, first, m + second)
        below = np.packbits(torch.stack([pairs < limit, pairs < limit / 2], 1).numpy(), axis=2)
        parts.append((*(t.numpy() for t in (to_seen, seen, to_matched, to_held_out, record)), below))
    whole = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Nearest(**{f.name: values for f, values in zip(fields(Nearest), whole, strict=True)})


def copies_of(seen: Examples, draws: np.random.Generator) -> Examples:
    """Return copies of at most ``COPIES`` training images ``seen``, in random order.

    A copy of an image is exact, moved by a pixel or mirrored, with equal probability. Copies of examples that are not
    images are exact.
    """
    chosen, ways = seen[draws.permutation(len(seen))[:COPIES]], looks(seen.x)
    kinds = [[Look()], [w for w in ways if (w.down or w.right) and not w.mirrored], [w for w in ways if w.mirrored][:1]]
    kinds = [kind for kind in kinds if kind]
    x = chosen.x.clone()
    for row in range(len(chosen)):
        kind = kinds[draws.integers(len(kinds))]
        x[row] = kind[draws.integers(len(kind))].apply(x[row : row + 1])[0]
    return Examples(x, chosen.y)
