"""A lower bound on a generator's epsilon from one training, with canaries among its images (``lower_bound``).

A coin decides whether a canary is trained on. Where it is not, n is one smaller; the bound takes n as public, as the
ledger does, so it is off by what q = B/n changes from one image.

Canaries are unseen images as they are. On generators of digits they told more than mislabelled or inverted ones: a
network hardly looks at the label while it removes noise, and it learns inverted images alike, seen or not.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedcommons.audits.lower_bound import LowerBound, by_scores, coins
from fedcommons.audits.membership import Score
from fedcommons.core.accountants import composed
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt, Weights
from fedcommons.seeds import numpy_generator, seed_for

LOOKS = 4
"""Scores are means over so many draws of the times and noise, or of the pool, that they are measured with."""


@dataclass(frozen=True)
class Bounded:
    """The bound, and the epsilon that the receipt stands for; None: the receipt covers nothing."""

    audited: LowerBound
    reported: float | None


def bound(
    generator: Generator, examples: Examples, canaries: Examples, n_classes: int, seed: int, by: Score, *,
    delta: float = 1e-5, reference: bool = True,
) -> Bounded:  # fmt: skip
    """Train on the examples and half of the canaries; guess of the m/4 with the highest scores that they were in.

    ``reference``: from each score that under a generator is subtracted that has seen no canary, as some images are
    easier than others. Scores are compared within classes.
    """
    m = len(canaries)
    inside, epochs = coins(m, numpy_generator(seed, "coins")), generator.epochs

    def seen(weights: Weights) -> np.ndarray:
        looks = (by(generator, weights, canaries, n_classes, seed_for(seed, "score", i)) for i in range(LOOKS))
        return np.mean([*looks], axis=0)

    some = canaries[inside]
    both = Examples(torch.cat([examples.x, some.x]), torch.cat([examples.y, some.y]))
    trained = generator.fit(both, n_classes, seed_for(seed, "audited"), {epochs})[epochs]
    scores = seen(trained.weights)
    if reference:
        other = generator.fit(examples, n_classes, seed_for(seed, "reference"), {epochs})[epochs]
        scores = scores - seen(other.weights)
    release = (trained.receipt or Receipt()).release(0)
    reported = composed(((release.q, release.sigma, release.steps),), delta) if release.covered else None
    return Bounded(by_scores(_centred(scores, canaries.y.numpy()), inside, m // 4, delta), reported)


def _centred(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Scores minus the mean of their class: canaries make all of a class easier that the examples have little of."""
    means = np.bincount(labels, scores) / np.maximum(np.bincount(labels), 1)
    return scores - means[labels]
