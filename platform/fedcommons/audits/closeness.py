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
        parts = []
        with torch.no_grad(), head.watched():
            for part in x.split(256):
                module(part)
                parts.append(head.inputs.flatten(1).double())
        return torch.cat(parts)

    return points


@dataclass(frozen=True, eq=False)
class Subject:
    """What a client contributes (``made``), what that was made from (``seen``), and images that were not seen.

    held_out: m images drawn from those that were not seen. matched: (m,) rows of ``seen``, of each class as many as
    there are held-out images.
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
    nearest = [torch.cdist(p, records, compute_mode="use_mm_for_euclid_dist").min(1) for p in points.split(chunk)]
    return torch.cat([f.values for f in nearest]), torch.cat([f.indices for f in nearest])


@dataclass(frozen=True, eq=False, kw_only=True)
class Compared:
    """The distances of one client's k made images in one space.

    to_seen: (k,) distance to the closest of all n seen images; closest_seen: (k,) the number of that image.
    to_matched, to_held_out: (k,) distance to the closest of the m matched seen images, and of the m held-out ones.
    record: (k,) the number of the closest of these 2m: 0 to m - 1 are matched, m to 2m - 1 held out.
    limit: a made image is a near-copy if its distance to a seen one is below this.
    expected: largest probability that a fresh image of the true distribution is below the limit.
    hit: (2m,) whether some made image is nearer than the limit to this one of the 2m, numbered as in ``record``.
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


def compare(one: Subject, embed: Embedding, flip: bool = False) -> Compared:
    """Measure one client's images in a space; ``flip``: a mirrored image is as near as the image.

    The limit is the j-th smallest of the m distances from held-out to seen images, j = max(1, floor(0.01 (m + 1))).
    A fresh image of the same distribution is nearer with probability j/(m + 1) at most, whatever the distribution is.
    """

    def records(x: Tensor) -> Tensor:
        return embed(torch.cat([x, x.flip(-1)]) if flip else x)

    drawn, held = embed(one.made.x), embed(one.held_out.x)
    seen, fresh = records(one.seen.x), records(one.held_out.x)
    near, m = records(one.seen.x[one.matched]), len(one.held_out)
    j = max(1, int(NEAR * (m + 1)))
    limit = float(closest(held, seen)[0].sort().values[j - 1])
    to_seen, of_seen = closest(drawn, seen)
    (to_matched, first), (to_held_out, second) = closest(drawn, near), closest(drawn, fresh)
    record = torch.where(to_matched <= to_held_out, first % m, m + second % m)
    hit = [closest(r, drawn)[0].view(-1, m).min(0).values < limit for r in (near, fresh)]
    of_seen = of_seen % len(one.seen)
    to_seen, of_seen, to_matched, to_held_out, record = (
        t.numpy() for t in (to_seen, of_seen, to_matched, to_held_out, record)
    )
    return Compared(
        of=one,
        to_seen=to_seen,
        closest_seen=of_seen,
        to_matched=to_matched,
        to_held_out=to_held_out,
        record=record,
        limit=limit,
        expected=j / (m + 1),
        hit=torch.cat(hit).numpy(),
    )
