"""Distances between images that ignore a shift by one pixel, mirroring, or both.

The distance between two images is the smallest over 18 variants (looks) of the second image: unchanged or mirrored, and
moved by -1, 0 or 1 pixels down and right. In pixel space the images are compared where they overlap, and the squared
distance is scaled up to a whole image. So a moved copy is at distance 0. In feature space the second image is changed
(new pixels repeat the edge) and then embedded.

Images are (n, C, H, W) with H and W of at least ``LEAST``. For all other examples there is only the unchanged variant.
The second images are called records. For n images and r records of d pixels, the 18 variants take 18 matrix products of
(n, d) and (d, r). In feature space they also take 18 r embeddings.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcommons.core.features import Head

LEAST = 4
"""Smallest height and width of an image, in pixels, for which shifts are tried; smaller images would lose too much."""
CHUNK = 512
"""Number of images (rows) per matrix product; the other factor has at most ``4 * CHUNK`` images."""
EXACT = 1024
"""Number of products of integers from -128 to 127 whose sum is at most 2^24, so that float32 represents it exactly."""

Distances = Callable[[Tensor], Tensor]
"""Function from n examples to their distances (n, r), float64, to r fixed examples, the records of a ``Space``."""
Space = Callable[[Tensor], Distances]
"""Function from r examples (records) to the function that returns the distances of other examples to the records."""


@dataclass(frozen=True)
class Look:
    """A variant of images (n, C, H, W): mirrored or not, then moved by ``down`` and ``right`` pixels."""

    down: int = 0
    right: int = 0
    mirrored: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Return the changed images, with unchanged shape. Pixels that enter at an edge repeat the edge."""
        rows = (torch.arange(x.shape[-2]) - self.down).clamp(0, x.shape[-2] - 1)
        columns = (torch.arange(x.shape[-1]) - self.right).clamp(0, x.shape[-1] - 1)
        return self._mirrored(x)[..., rows, :][..., columns] if self.down or self.right else self._mirrored(x)

    def overlap(self, x: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels of images x and of the mirrored and moved ``records``, where x and records overlap."""
        return _window(x, self.down, self.right), _window(self._mirrored(records), -self.down, -self.right)

    def _mirrored(self, x: Tensor) -> Tensor:
        return x.flip(-1) if self.mirrored else x


def _window(x: Tensor, down: int, right: int) -> Tensor:
    """Remove the top ``down`` rows and left ``right`` columns; negative: the bottom rows or right columns."""
    if not (down or right):
        return x
    height, width = x.shape[-2:]
    return x[..., max(down, 0) : height + min(down, 0), max(right, 0) : width + min(right, 0)]


def looks(x: Tensor) -> list[Look]:
    """Return the 18 variants of images x, the unchanged one first; only the unchanged one if x are no images."""
    if x.dim() != 4 or min(x.shape[-2:]) < LEAST:
        return [Look()]
    steps = (0, -1, 1)
    return [Look(down, right, mirrored) for mirrored in (False, True) for down in steps for right in steps]


def pixel_space(records: Tensor) -> Distances:
    """Return the function that computes Euclidean distances in pixels to the images ``records``.

    The distance between an image and its exact copy is exactly 0 if pixels are uint8.
    """

    def distances(x: Tensor) -> Tensor:
        parts, whole = records.split(4 * CHUNK), records[0].numel()
        return torch.cat([_smallest((*look.overlap(x, r), whole) for look in looks(r)) for r in parts], 1)

    return distances


def feature_space(module: nn.Module) -> Space:
    """Return the space of distances between features: inputs of the module's head (last layer), in evaluation mode.

    The module must not be trained on the compared images. Embeddings of 18 variants of each record stay in memory.

    Raises:
        ValueError: the module has no head; see ``Head``.
    """
    embed = embedding(module)

    def space(records: Tensor) -> Distances:
        changed = [embed(look.apply(records)) for look in looks(records)]

        def distances(x: Tensor) -> Tensor:
            points = embed(x)
            return _smallest((points, each, each.shape[1]) for each in changed)

        return distances

    return space


def embedding(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from examples (n, ...) to features (n, d), the inputs of the module's head (last layer).

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
                parts.append(head.inputs.flatten(1))
        return torch.cat(parts)

    return points


def _smallest(sides: Iterator[tuple[Tensor, Tensor, int]]) -> Tensor:
    """Return (n, r): the Euclidean distance of each of n points to each of r points, the smallest over all variants.

    sides: for each variant, the n points, the r points, and the number of coordinates of a whole image. If points have
    fewer coordinates than a whole image, their squared distance is scaled up.
    """
    best = None
    for left, right, whole in sides:
        a, b = left.flatten(1), right.flatten(1)
        square = _squares(a, b).mul_(whole / a.shape[1])
        best = square if best is None else torch.minimum(best, square, out=best)
    assert best is not None
    return best.sqrt_()


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Return (n, r) float64: squared Euclidean distances between the rows of a and of b.

    Distances of uint8 points are exact and take half the time of float64 points: after subtraction of 128, sums of
    ``EXACT`` products are whole numbers that float32 represents exactly.
    """
    whole = a.dtype == torch.uint8 and b.dtype == torch.uint8
    a, b = (x.float() - 128 if whole else x.double() for x in (a, b))
    norms = (x.square().sum(1, dtype=torch.float64) for x in (a, b))
    square = next(norms)[:, None] + next(norms)
    for left, right in zip(a.split(EXACT, 1), b.split(EXACT, 1), strict=True):
        square.sub_(left @ right.T, alpha=2)
    return square.clamp_(min=0)


def chunks(x: Tensor, distances: Distances) -> Iterator[Tensor]:
    """Return an iterator over blocks of ``CHUNK`` rows of ``distances(x)``."""
    return (distances(part) for part in x.split(CHUNK))
