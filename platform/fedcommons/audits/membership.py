"""A membership inference attack on a generator: was an image in the generator's training data?

Carlini et al., "Membership inference attacks from first principles", S&P 2022, arXiv:2112.03570: the online attack with
Gaussian fits of one variance.   K: generators, trained on random halves of the same images;  n: images.

A score is high for an image that looks trained on. Every generator is the target once, and the K - 1 other generators
are its shadows. The attack compares an image's score under the target with its scores under shadows that saw the image
and under shadows that did not.

Departs from the paper: the attacker knows the target's images except for their membership, and nothing is augmented. An
image that all shadows saw, or no shadow saw, takes the missing mean from all images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from fedcommons.audits.copies import clopper_pearson
from fedcommons.audits.nearest_neighbours import closest, pixels
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Weights, for_client
from fedcommons.seeding import numpy_generator, seed_for

Score = Callable[[Generator, Weights, Examples, int, int], np.ndarray]
"""Map (generator, weights, n images, number of classes, seed) to n numbers, high for training images."""


@runtime_checkable
class Losing(Protocol):
    """A generator that returns its loss on single images, for an attacker that has its weights."""

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return (n,) losses, with the same draws (of times and noise) for every image and for all weights."""
        ...


def by_pool(generator: Generator, weights: Weights, images: Examples, n_classes: int, seed: int) -> np.ndarray:
    """Score by minus the distance to the closest of n sampled images of the same labels: the attacker has the pool."""
    samples = generator.sample(weights, tuple(images.x.shape[1:]), n_classes, images.y, seed)
    return -closest(pixels(images.x), pixels(samples))[0].numpy()


def by_loss(generator: Generator, weights: Weights, images: Examples, n_classes: int, seed: int) -> np.ndarray:
    """Score by minus the generator's loss: the attacker has the generator's weights."""
    assert isinstance(generator, Losing)
    return -generator.losses(weights, images, n_classes, seed).double().numpy()


def halves(labels: np.ndarray, generators: int, seed: int) -> np.ndarray:
    """Draw (K, n) bool, which generator is trained on which image: a random half of each class, for each generator.

    In a class with an odd number of images, generators take the smaller and the larger half in turn.
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
    """Train a generator on each half and score all images: (K, n) for each kind of score. ``seed``: for all draws."""
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
    """Return (K, n): log p(score | trained on) - log p(score | not) per generator, fitted to the K - 1 others.

    The densities are normal: one mean per image and side, one variance for all images and both sides.
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
    """How well the likelihood ratios separate members from non-members. fpr, tpr: the ROC curve, both from 0 to 1."""

    fpr: np.ndarray
    tpr: np.ndarray
    auc: float
    auc_interval: tuple[float, float]
    tpr_at: float  # at 1 % false positives
    tpr_interval: tuple[float, float]

    def record(self) -> dict[str, Any]:
        """Return the results as plain values, without the curve."""
        return {
            "auc": self.auc,
            "auc_interval": list(self.auc_interval),
            "tpr_at_1_percent_fpr": self.tpr_at,
            "tpr_interval": list(self.tpr_interval),
        }


def attack(ratios: np.ndarray, inside: np.ndarray, seed: int, draws: int = 400) -> Attack:
    """Compute the ROC over all K n pairs, with 95 % intervals.

    The AUC's interval is a bootstrap over images, not pairs, as an image's K ratios depend on each other. The TPR's
    interval is that of Clopper and Pearson with n/2 members.
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
    """Return false and true positive rates at all thresholds, from (0, 0) to (1, 1); equal values share a threshold."""
    order = np.argsort(-values, kind="stable")
    last = np.append(np.flatnonzero(np.diff(values[order])), len(values) - 1)
    true = np.cumsum(positive[order])[last]
    false = last + 1 - true
    return np.append(0, false / max(false[-1], 1)), np.append(0, true / max(true[-1], 1))


def auc(fpr: np.ndarray, tpr: np.ndarray) -> float:
    """Return the area under the curve: the probability that a member has the larger value, ties counted half."""
    return float(np.trapezoid(tpr, fpr))
