"""A lower bound on a generator's epsilon from one training, with canaries among its images (``lower_bound``).

A coin decides whether a canary is trained on. Without the canary there is one image less, n - 1. The bound takes n as
public, as the ledger does, so its error is the change of q = B/n by one image.

Canaries are unchanged images that the generator did not see. On generators of digits they were more informative
than images with a wrong label or inverted images: a denoising network hardly uses the label, and training on inverted
images does not make it learn them better.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedcommons.audits.lower_bound import LowerBound, by_scores, coins
from fedcommons.audits.membership import Score
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt, Weights, for_client
from fedcommons.generators.requests import takes_noise
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.noise import Noise, of_audit
from fedcommons.seeding import numpy_generator, seed_for

FEWEST = 4
"""Smallest number of canaries of a bound: with four canaries one is guessed."""

LOOKS = 4
"""Number of draws that a canary's score is averaged over: draws of times and noise, or of the pool."""


@dataclass(frozen=True)
class Bounded:
    """The lower bound and the reported epsilon of the receipt; None: the receipt covers nothing."""

    audited: LowerBound
    reported: float | None

    @property
    def verdict(self) -> str:
        """Compare the bound with the reported epsilon in words; see ``LowerBound.verdict``."""
        return self.audited.verdict(self.reported)


def bound(
    generator: Generator, examples: Examples, canaries: Examples, n_classes: int, seed: int, by: Score, *,
    delta: float = 1e-5, reference: bool = True,
) -> Bounded:  # fmt: skip
    """Train on the examples and half of the m canaries; guess that the m/4 canaries with the highest scores are in.

    Scores are compared within classes. ``reference``: train a second generator without canaries and subtract its
    scores, as some images are easier than others.

    Raises:
        ValueError: there are fewer than four canaries, so no canary would be guessed.
    """
    if (m := len(canaries)) < FEWEST:
        raise ValueError(f"at least {FEWEST} canaries are needed, of which one is guessed, got {m}")
    generator = for_client(generator, len(examples))
    inside, epochs = coins(m, numpy_generator(seed, "coins")), generator.epochs

    def seen(weights: Weights) -> np.ndarray:
        looks = (by(generator, weights, canaries, n_classes, seed_for(seed, "score", i)) for i in range(LOOKS))
        return np.mean([*looks], axis=0)

    some = canaries[inside]
    both = Examples(torch.cat([examples.x, some.x]), torch.cat([examples.y, some.y]))
    salted: dict[str, Any] = {"noise": Noise(of_audit(seed))} if takes_noise(generator) else {}
    trained = generator.fit(both, n_classes, seed_for(seed, "audited"), {epochs}, **salted)[epochs]
    scores = seen(trained.weights)
    if reference:
        salted = {"noise": Noise(of_audit(seed_for(seed, "reference")))} if salted else {}
        other = generator.fit(examples, n_classes, seed_for(seed, "reference"), {epochs}, **salted)[epochs]
        scores = scores - seen(other.weights)
    release = (trained.receipt or Receipt()).release(0)
    reported = composed(((release.q, release.sigma, release.steps),), delta) if release.covered else None
    return Bounded(by_scores(_centred(scores, canaries.y.numpy()), inside, m // 4, delta), reported)


def _centred(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Subtract the mean score of each class: canaries make every image of a rare class easier."""
    means = np.bincount(labels, scores) / np.maximum(np.bincount(labels), 1)
    return scores - means[labels]
