"""Quality of synthetic images by the features of a classifier trained on the real training images (no download).

Kynkaanniemi et al., NeurIPS 2019, arXiv:1904.06991 (precision, recall); Naeem et al., ICML 2020, arXiv:2002.09797
(density, coverage); Binkowski et al., ICLR 2018, arXiv:1801.01401 (kernel distance, KID).

x_1..x_n: real points;  y_1..y_m: synthetic points, all in R^d;  B(x): the closed ball around x that reaches to its k-th
nearest neighbour among the points of the same kind.

    precision = (1/m) #{j: y_j in some B(x_i)}       density  = 1/(k m) sum_j #{i: y_j in B(x_i)}
    recall    = (1/n) #{i: x_i in some B(y_j)}       coverage = (1/n) #{i: some y_j in B(x_i)}
    kernel distance = mean k(x_i, x_j) over i != j + mean k(y_i, y_j) over i != j - 2 mean k(x_i, y_j),
                      k(a, b) = (a.b/d + 1)^3, an unbiased estimate of the squared MMD; it may be below 0

Departs from the papers: points are inputs of the head of a small classifier of the same data, not of a network trained
on ImageNet. So numbers are comparable between pools for one data set and one classifier, not between papers. The kernel
distance takes all points at once, where KID is a mean over subsets of 1,000.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcommons.audits.distances import CHUNK, embedding, pixel_space
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator, seed_for

ROUNDING = 1e-13
"""Tolerance of a squared distance at a ball's edge, as a share of |x|^2 + |y|^2 for centred points: floats round."""


def compared(real: Tensor, synthetic: Tensor, k: int = 5) -> dict[str, float]:
    """Return precision, recall, density, coverage and kernel_distance of made points (m, d) against real points (n, d).

    made: synthetic points. Two draws from one distribution have density 1 on average, and a coverage of about 1 - 2^-k
    where n = m. The numbers depend on n and m: compare only pools of equal size.

    Raises:
        ValueError: there are not more than k points of either kind.
    """
    if min(len(real), len(synthetic)) <= k:
        raise ValueError(
            f"{k} nearest neighbours need more than {k} points, got {len(real)} real and {len(synthetic)} made ones"
        )
    a, b = (x.double() - real.double().mean(0) for x in (real, synthetic))
    of_real, of_made = _radii(a, k).square(), _radii(b, k).square()
    inside_all = precise = 0.0
    covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    recalled, distances = torch.zeros_like(covered), pixel_space(a)  # for points, pixel_space is the Euclidean distance
    for rows, radii in zip(b.split(CHUNK), of_made.split(CHUNK), strict=True):
        far = distances(rows).square()  # (chunk, n)
        far -= ROUNDING * (rows.square().sum(1)[:, None] + a.square().sum(1))
        inside = far <= of_real
        inside_all += float(inside.sum())
        precise += float(inside.any(1).sum())
        covered |= inside.any(0)
        recalled |= (far <= radii[:, None]).any(0)
    return {
        "precision": precise / len(synthetic),
        "recall": float(recalled.sum()) / len(real),
        "density": inside_all / (k * len(synthetic)),
        "coverage": float(covered.sum()) / len(real),
        "kernel_distance": kernel_distance(real, synthetic),
    }


def _radii(points: Tensor, k: int) -> Tensor:
    """Return (n,): the distance of each point to its k-th nearest neighbour; a point is no neighbour of itself."""
    distances, radii = pixel_space(points), []
    for first in range(0, len(points), CHUNK):
        far = distances(points[first : first + CHUNK])
        far[torch.arange(len(far)), first + torch.arange(len(far))] = 0.0
        radii.append(far.kthvalue(k + 1, 1).values)
    return torch.cat(radii)


def kernel_distance(real: Tensor, synthetic: Tensor) -> float:
    """Return the unbiased squared MMD of synthetic points (m, d) and real points (n, d); n and m are at least 2."""

    def total(a: Tensor, b: Tensor) -> float:
        return sum(float(_kernel(part, b).sum()) for part in a.split(CHUNK))

    def others(a: Tensor) -> float:
        itself = float((a.square().sum(1) / a.shape[1] + 1).pow(3).sum())
        return (total(a, a) - itself) / (len(a) * (len(a) - 1))

    x, y = real.double(), synthetic.double()
    return others(x) + others(y) - 2 * total(x, y) / (len(x) * len(y))


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T / a.shape[1] + 1).pow(3)


@dataclass(frozen=True)
class Quality:
    """The result of ``pool_quality``.

    pool: the measures of ``compared``, and fidelity: the share of images for which the classifier of real images
    predicts their label. unseen: the same measures of test images in the pool's place, so of fresh real images; their
    fidelity is the accuracy of this classifier. accuracy: on test images, of a classifier trained on the pool. points:
    number of points of each kind that are compared. trained: number of training images of each of the two classifiers.
    """

    pool: Mapping[str, float]
    unseen: Mapping[str, float]
    accuracy: float
    points: int
    trained: int


def pool_quality(
    work: Work, real: Examples, pool: Examples, test: Examples, seed: int, *, k: int = 5, most: int = 5000
) -> Quality:
    """Measure the quality of a pool of labelled images against real training images.

    Two classifiers start from ``work.initial`` and are trained by ``work``'s local loop: the first on real images, the
    second on the same number of pool images. This number is at most ``most``. The first classifier gives the features.

    Raises:
        UserError: there are k or fewer images of a kind.
        ValueError: the module has no head; see ``core.features.Head``.
    """
    if min(map(len, (real, pool, test))) <= k:
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in (("real", real), ("made", pool), ("test", test)))
        raise UserError(f"the quality of a pool by {k} neighbours takes more than {k} images of each kind: {sizes}.")
    n = min(len(real), len(pool), most)
    real, pool = _some(real, n, seed, "real"), _some(pool, n, seed, "pool")
    points = min(n, len(test))
    unseen = _some(test, points, seed, "test")
    _train(work, pool, seed)
    accuracy = _right(work, test)
    _train(work, real, seed)
    embed = embedding(work.module)
    real_points = embed(real.x[:points].to(work.device))

    def measure(images: Examples) -> dict[str, float]:
        measures = compared(real_points, embed(images.x[:points].to(work.device)), k)
        return {**measures, "fidelity": _right(work, images)}

    return Quality(measure(pool), measure(unseen), accuracy, points, n)


def _some(examples: Examples, n: int, seed: int, which: str) -> Examples:
    """Return n random examples in a random order, so that a prefix is random too."""
    return examples[numpy_generator(seed, "quality", which).permutation(len(examples))[:n]]


def _train(work: Work, data: Examples, seed: int) -> None:
    """Train on the examples from ``work.initial`` and leave the trained weights in ``work.module``."""
    examples = data.to(work.device)
    work.load_buffers(work.initial_buffers)
    work.local(work.initial, ClientData(examples.x, examples.y), seed_for(seed, "classifier of quality"))


def _right(work: Work, examples: Examples) -> float:
    """Return the share of examples for which the module predicts the label."""
    work.module.eval()
    right = 0
    with torch.no_grad():
        for x, y in zip(examples.x.split(CHUNK), examples.y.split(CHUNK), strict=True):
            right += int((work.module(x.to(work.device)).argmax(1).cpu() == y).sum())
    return right / len(examples)
