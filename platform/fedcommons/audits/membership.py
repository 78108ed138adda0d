"""A membership inference attack on a generator: was an image in the generator's training data?

Carlini et al., "Membership inference attacks from first principles" (LiRA), S&P 2022, arXiv:2112.03570: the online
attack with one variance.   K: number of generators, each trained on a random half of the same images;  n: images.

A score is a number per image that should be high for training images. Every generator is the target once, and the K - 1
other generators are its shadow models. The attack compares an image's score under the target with the scores under
shadow models that were trained on the image and under shadow models that were not.

Departs from the paper: the attacker knows all n images, but not which were used for training. Images are not augmented.
If all shadow models or no shadow models were trained on an image, one of the image's two means is missing. The mean
over all images replaces it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedcommons.audits.copies import clopper_pearson
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Weights, for_client
from fedcommons.seeding import numpy_generator, seed_for

Score = Callable[[Generator, Weights, Examples, int, int], np.ndarray]
"""Function (generator, weights, n images, number of classes, seed) -> n scores, high for training images."""


@runtime_checkable
class Losing(Protocol):
    """A generator that can return its loss on single images, for an attacker that has the generator's weights."""

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return (n,): the loss on each image, with equal diffusion times and noise for all images and weights."""
        ...


def by_pool(generator: Generator, weights: Weights, images: Examples, n_classes: int, seed: int) -> np.ndarray:
    """Score n images for an attacker that has only a pool of synthetic images.

    The score is minus the distance to the closest of n synthetic images with the labels of ``images``.
    """
    samples = generator.sample(weights, tuple(images.x.shape[1:]), n_classes, images.y, seed)
    points, records = (x.flatten(1).double() for x in (images.x, samples))
    distances = (torch.cdist(part, records, compute_mode="use_mm_for_euclid_dist") for part in points.split(512))
    return -torch.cat([part.min(1).values for part in distances]).numpy()


def by_loss(generator: Generator, weights: Weights, images: Examples, n_classes: int, seed: int) -> np.ndarray:
    """Score n images by minus the generator's loss, for an attacker that has the generator's weights."""
    assert isinstance(generator, Losing)
    return -generator.losses(weights, images, n_classes, seed).double().numpy()


def halves(labels: np.ndarray, generators: int, seed: int) -> np.ndarray:
    """Draw (K, n) bool: the training images of K generators, for each generator a random half of every class.

    If a class has an odd number of images, generators 0, 2, ... get the smaller half and 1, 3, ... the larger half.
    """
    inside = np.zeros((generators, len(labels)), bool)
    for k in range(generators):
        draws = numpy_generator(seed, "shadow", k)
        for label in np.unique(labels):
            rows = draws.permutation(np.flatnonzero(labels == label))
            inside[k, rows[: (len(rows) + k % 2) // 2]] = True
    return inside


def scores(
    generator: Generator, images: Examples, inside: np.ndarray, n_classes: int, seed: int, by: Sequence[Score],
    flip: bool = False, say: Callable[[str], None] = lambda _: None,
) -> list[np.ndarray]:  # fmt: skip
    """Train K generators and score all n images under each: return (K, n) scores for each score function in ``by``.

    inside: (K, n) bool, the training images of each generator.
    flip: whether training mirrors images at random. say: called with a progress message for each generator.
    """
    generator = for_client(generator, int(inside[0].sum()))
    by_kind: list[list[np.ndarray]] = [[] for _ in by]
    for k, mask in enumerate(inside):
        say(f"shadow generator {k + 1}/{len(inside)}")
        fit_seed, epochs = seed_for(seed, "shadow generator", k), generator.epochs
        weights = generator.fit(images[mask], n_classes, fit_seed, {epochs}, flip=flip)[epochs].weights
        for kind, score in zip(by_kind, by, strict=True):
            kind.append(score(generator, weights, images, n_classes, seed_for(seed, "score")))
    return [np.stack(kind) for kind in by_kind]


def likelihood_ratios(scores: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Return (K, n): log p(score | image was trained on) - log p(score | image was not trained on), per generator.

    The densities are normal and fitted to the scores of the K - 1 other generators. Each image has two means, one for
    generators trained on the image and one for the other generators. All images have one variance.
    """
    means = []
    for side in (inside, ~inside):
        counts, sums = side.sum(0) - side, np.where(side, scores, 0).sum(0) - np.where(side, scores, 0)
        of_all = np.sum(np.where(side, scores, 0)) / side.sum()
        means.append(np.where(counts > 0, sums / np.maximum(counts, 1), of_all))
    residuals = scores - np.where(inside, *means)
    variance = residuals.var() or 1.0
    return ((scores - means[1]) ** 2 - (scores - means[0]) ** 2) / (2 * variance)


@dataclass(frozen=True, eq=False, kw_only=True)
class Attack:
    """The success of the attack, over all thresholds on the likelihood ratio; intervals have a confidence of 95 %.

    fpr, tpr: false and true positive rates of the ROC curve, both from 0 to 1. auc: area under the curve.
    """

    fpr: np.ndarray
    tpr: np.ndarray
    auc: float
    auc_interval: tuple[float, float]
    tpr_at: float  # true positive rate at a false positive rate of 1 %
    tpr_interval: tuple[float, float]

    def record(self) -> dict[str, Any]:
        """Return the results as numbers and lists, without the ROC curve."""
        return {
            "auc": self.auc,
            "auc_interval": list(self.auc_interval),
            "tpr_at_1_percent_fpr": self.tpr_at,
            "tpr_interval": list(self.tpr_interval),
        }


def attack(ratios: np.ndarray, inside: np.ndarray, seed: int, draws: int = 400) -> Attack:
    """Compute the ROC curve over all pairs of K generators and n images, with 95 % confidence intervals.

    The interval of the AUC is from ``draws`` bootstrap samples of images, not of pairs, because an image's K ratios
    depend on each other. The interval of the true positive rate is Clopper and Pearson's for n/2 trials: each
    generator has about n/2 training images.
    """
    fpr, tpr = roc(ratios.ravel(), inside.ravel())
    n, again = ratios.shape[1], numpy_generator(seed, "bootstrap")
    some = (again.integers(n, size=n) for _ in range(draws))
    aucs = [auc(*roc(ratios[:, rows].ravel(), inside[:, rows].ravel())) for rows in some]
    low, high = (float(q) for q in np.quantile(aucs, [0.025, 0.975]))
    at = float(tpr[fpr <= 0.01].max())
    return Attack(
        fpr=fpr,
        tpr=tpr,
        auc=auc(fpr, tpr),
        auc_interval=(low, high),
        tpr_at=at,
        tpr_interval=clopper_pearson(at, n / 2),
    )


def roc(values: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false and true positive rates at all thresholds of ``values``; ``positive``: bool, the training images."""
    order = np.argsort(-values, kind="stable")
    last = np.append(np.flatnonzero(np.diff(values[order])), len(values) - 1)
    true = np.cumsum(positive[order])[last]
    false = last + 1 - true
    return np.append(0, false / max(false[-1], 1)), np.append(0, true / max(true[-1], 1))


def auc(fpr: np.ndarray, tpr: np.ndarray) -> float:
    """Return the area under the ROC curve, in [0, 1], by the trapezoidal rule; 0.5: no better than chance."""
    return float(np.trapezoid(tpr, fpr))
