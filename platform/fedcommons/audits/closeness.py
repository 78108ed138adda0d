"""How close made images are to the images they were made from, and to held-out ones of the same distribution.

m: held-out images of a client;  n: images that its generator saw;  k: images that were made.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedcommons.core.features import Head
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.seeds import numpy_generator

NEAR = 0.01
"""Share of held-out images that are closer to a seen one than a near-copy is."""

Embedding = Callable[[Tensor], Tensor]
"""Examples (n, ...) to points (n, d), float64."""


def pixels(x: Tensor) -> Tensor:
    """Examples as they are, as rows. Of uint8 images all distances are exact: sums of whole numbers below 2^53."""
    return x.flatten(1).double()


def embedding(module: nn.Module) -> Embedding:
    """The input of the module's head, in evaluation mode. The module must know neither seen nor held-out images.

    Raises:
        ValueError: the module has no head; see ``Head``.
    """
    head = Head(module)

    def points(x: Tensor) -> Tensor:
        module.eval()
        found = []
        with torch.no_grad(), head.watched():
            for part in x.split(256):
                module(part)
                found.append(head.inputs.flatten(1).double())
        return torch.cat(found)

    return points


@dataclass(frozen=True, eq=False)
class Subject:
    """What a client contributes (``made``), what that was made from (``seen``), and images of neither kind.

    held_out: (m,) drawn of those that were not seen. matched: (m,) rows of ``seen``, as many of each class.
    """

    client: int
    made: Examples
    seen: Examples
    held_out: Examples
    matched: Tensor


def subject(client: int, made: Examples, seen: Examples, unseen: Examples, seed: int) -> Subject:
    """Draw held-out images of ``unseen``: in each class as many as were seen, or as there are; keyed by the client.

    Raises:
        UserError: of the classes that were seen none is among ``unseen``.
    """
    draws, matched, held_out = numpy_generator(seed, "held out", client), [], []
    for label in np.unique(seen.y.numpy()):
        mine, others = (draws.permutation(np.flatnonzero(e.y.numpy() == label)) for e in (seen, unseen))
        n = min(len(mine), len(others))
        matched.append(mine[:n])
        held_out.append(others[:n])
    rows = np.concatenate([*matched, np.zeros(0, np.int64)])
    if not len(rows):
        raise UserError(
            f"sharing.audit needs held-out images of client {client}'s classes, and there are none: "
            "set data.validation above 0, or generator.rho below 1."
        )
    return Subject(client, made, seen, unseen[np.concatenate(held_out)], torch.from_numpy(rows))


def closest(points: Tensor, records: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """Euclidean distance (n,) to the closest record, and its row, by matrix products of ``chunk`` points."""
    found = [torch.cdist(p, records, compute_mode="use_mm_for_euclid_dist").min(1) for p in points.split(chunk)]
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


@dataclass(frozen=True, eq=False)
class Compared:
    """The distances of one client's k made images in one space.

    to_seen, closest_seen: (k,) to the closest of all seen images, and which that is; to_matched, to_held_out: (k,) to
    the closest of both sets of m; record: (k,) number of the closest of both together; limit: below it an image is a
    near-copy, as a fresh one of the true distribution is with probability ``expected`` at most; hit: (2m,) whether a
    made image is that near to a matched or, from m on, to a held-out image.
    """

    of: Subject
    to_seen: np.ndarray
    closest_seen: np.ndarray
    to_matched: np.ndarray
    to_held_out: np.ndarray
    record: np.ndarray
    limit: float
    expected: float
    hit: np.ndarray

    @property
    def near(self) -> np.ndarray:
        """(k,) whether an image is a near-copy."""
        return self.to_seen < self.limit

    @property
    def closer(self) -> np.ndarray:
        """(k,) 1 where a matched seen image is closer than every held-out one, 1/2 where both are as close."""
        return (self.to_matched < self.to_held_out) + (self.to_matched == self.to_held_out) / 2


def compare(one: Subject, space: Embedding, flip: bool = False) -> Compared:
    """Measure one client's images in a space; ``flip``: a mirrored image is as near as the image.

    The limit is the j-th smallest of the m distances from held-out to seen images, j = max(1, floor(0.01 (m + 1))).
    A fresh image of their distribution is below it with probability j/(m + 1) at most, whatever the distribution is.
    """

    def records(x: Tensor) -> Tensor:
        return space(torch.cat([x, x.flip(-1)]) if flip else x)

    made, held = space(one.made.x), space(one.held_out.x)
    seen, fresh = records(one.seen.x), records(one.held_out.x)
    near, m = records(one.seen.x[one.matched]), len(one.held_out)
    j = max(1, int(NEAR * (m + 1)))
    limit = float(closest(held, seen)[0].sort().values[j - 1])
    to_seen, of_seen = closest(made, seen)
    (to_matched, first), (to_held_out, second) = closest(made, near), closest(made, fresh)
    record = torch.where(to_matched <= to_held_out, first % m, m + second % m)
    hit = [closest(r, made)[0].view(-1, m).min(0).values < limit for r in (near, fresh)]
    of_seen = of_seen % len(one.seen)
    to_seen, of_seen, to_matched, to_held_out, record = (
        t.numpy() for t in (to_seen, of_seen, to_matched, to_held_out, record)
    )
    return Compared(one, to_seen, of_seen, to_matched, to_held_out, record, limit, j / (m + 1), torch.cat(hit).numpy())
