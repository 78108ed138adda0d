"""Quality of synthetic images, measured on the features of a classifier that is trained on real training images.

Kynkaanniemi et al., NeurIPS 2019, arXiv:1904.06991 (precision, recall); Naeem et al., ICML 2020, arXiv:2002.09797
(density, coverage); Binkowski et al., ICLR 2018, arXiv:1801.01401 (kernel distance, KID).

x_1..x_n: features of real images (real points);  y_1..y_m: features of synthetic images, all in R^d;  B(x): the closed
ball around x that reaches to the k-th nearest neighbour of x among the points of the same kind (real or synthetic).

    precision = (1/m) #{j: y_j in some B(x_i)}       density  = 1/(k m) sum_j #{i: y_j in B(x_i)}
    recall    = (1/n) #{i: x_i in some B(y_j)}       coverage = (1/n) #{i: some y_j in B(x_i)}
    kernel distance = mean k(x_i, x_j) over i != j + mean k(y_i, y_j) over i != j - 2 mean k(x_i, y_j),
                      k(a, b) = (a.b/d + 1)^3, an unbiased estimate of the squared maximum mean discrepancy (MMD)

Departs from the papers: features are inputs of the last layer (head) of a small classifier for the same data, not of a
network trained on ImageNet. So results can be compared between pools for one data set and one classifier, but not
between papers. The kernel distance uses all points at once; KID is a mean over subsets of 1,000 points.
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
"""Tolerance for rounding of a squared distance |x - y|^2, as a share of |x|^2 + |y|^2 for centred points x and y."""


def compared(real: Tensor, synthetic: Tensor, k: int = 5) -> dict[str, float]:
    """Return the five measures of synthetic points (m, d) against real points (n, d); see the head of this module.

    k: number of nearest neighbours. If both kinds of points have one distribution, density is 1 on average, and
    coverage is about 1 - 2^-k for n = m. All measures depend on n and m, so compare only pools with equal n and m.

    Raises:
        ValueError: there are k or fewer points of a kind.
    """
    if min(len(real), len(synthetic)) <= k:
        sizes = f"{len(real)} real and {len(synthetic)} synthetic"
        raise ValueError(f"{k} nearest neighbours need more than {k} points, got {sizes}")
    a, b = (x.double() - real.double().mean(0) for x in (real, synthetic))
    of_real, of_made = _radii(a, k).square(), _radii(b, k).square()
    inside_all = precise = 0.0
    covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    recalled, distances = torch.zeros_like(covered), pixel_space(a)  # for points, pixel_space is the Euclidean distance
    for rows, radii in zip(b.split(CHUNK), of_made.split(CHUNK), strict=True):
        far = distances(rows).square()  # squared distances (chunk, n)
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
    """Return (n,): the distance of each of n points to its k-th nearest neighbour among the other points."""
    distances, radii = pixel_space(points), []
    for first in range(0, len(points), CHUNK):
        far = distances(points[first : first + CHUNK])
        far[torch.arange(len(far)), first + torch.arange(len(far))] = 0.0
        radii.append(far.kthvalue(k + 1, 1).values)
    return torch.cat(radii)


def kernel_distance(real: Tensor, synthetic: Tensor) -> float:
    """Return the unbiased estimate of the squared MMD between synthetic points (m, d) and real points (n, d)."""

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

    pool: the measures of ``compared`` for the pool, and the fidelity: the share of images whose label is predicted by
    the classifier that was trained on real images. unseen: the same measures for test images, as a reference for the
    pool. accuracy: test accuracy of the classifier trained on the pool. points: number of real images and of pool
    images that were compared. trained: number of training images of each classifier.
    """

    pool: Mapping[str, float]
    unseen: Mapping[str, float]
    accuracy: float
    points: int
    trained: int


def pool_quality(
    work: Work, real: Examples, pool: Examples, test: Examples, seed: int, *, k: int = 5, most: int = 5000
) -> Quality:
    """Measure the quality of a pool of labelled synthetic images by comparison with real training images.

    ``work.local`` trains two classifiers from ``work.initial``: one on real images, one on pool images. Each gets the
    same number of images, at most ``most``. The classifier trained on real images computes the features. k: number of
    nearest neighbours.

    Raises:
        UserError: there are k or fewer images of a kind.
        ValueError: the module has no head; see ``core.features.Head``.
    """
    if min(map(len, (real, pool, test))) <= k:
        sizes = f"{len(real):,} real, {len(pool):,} synthetic, {len(test):,} test"
        raise UserError(
            f"the quality of a pool by {k} neighbours needs more than {k} images of each kind, got {sizes}."
        )
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
    """Return n random examples in a random order, so that the first examples are a random sample too.

    which: name of the random stream, so that samples with different names are independent.
    """
    return examples[numpy_generator(seed, "quality", which).permutation(len(examples))[:n]]


def _train(work: Work, data: Examples, seed: int) -> None:
    examples = data.to(work.device)
    work.load_buffers(work.initial_buffers)
    work.local(work.initial, ClientData(examples.x, examples.y), seed_for(seed, "classifier of quality"))


def _right(work: Work, examples: Examples) -> float:
    """Return the accuracy of ``work.module`` on the examples, in [0, 1]."""
    work.module.eval()
    right = 0
    with torch.no_grad():
        for x, y in zip(examples.x.split(CHUNK), examples.y.split(CHUNK), strict=True):
            right += int((work.module(x.to(work.device)).argmax(1).cpu() == y).sum())
    return right / len(examples)
