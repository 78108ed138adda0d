"""A lower bound on a generator's epsilon from one training, with canaries among the training images (``lower_bound``).

A fair coin decides whether a canary is used for training. Without the canary there are n - 1 training images. The bound
treats n as public, as the privacy ledger does. So the bound neglects that the sampling rate q = B/n (B: batch size)
is a bit larger without the canary.

Canaries are unchanged images that are not in the generator's training data. With generators of digits, unchanged images
were more informative than images with a wrong label or inverted images. A denoising network hardly uses the label, and
training on inverted images does not make the network learn them better.
"""

from typing import Any

import numpy as np
import torch

from fedcommons.audits.lower_bound import LowerBound, by_scores, coins
from fedcommons.audits.membership import Score
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt, Weights, for_client
from fedcommons.generators.requests import takes_noise
from fedcommons.privacy import accountants
from fedcommons.privacy.noise import Noise, of_audit
from fedcommons.seeding import numpy_generator, seed_for

FEWEST = 4
"""Smallest number of canaries for a bound: with four canaries there is one guess."""

LOOKS = 4
"""Number of scores per canary that are averaged. Each score uses new diffusion times and noise, or a new pool."""


def bound(
    generator: Generator, examples: Examples, canaries: Examples, n_classes: int, seed: int, by: Score, *,
    delta: float = 1e-5,
) -> tuple[float | None, LowerBound]:  # fmt: skip
    """Return the epsilon that one training states (None: no guarantee), and a lower bound on it from m canaries.

    The generator is trained on the examples and about half of the canaries. The guess is that the m/4 canaries with
    the highest scores (function ``by``) are included. The mean score of each class is subtracted, and so are the
    scores of a second generator without canaries, because some images are easier than others.

    Raises:
        ValueError: there are fewer than four canaries, so there would be no guess.
    """
    if (m := len(canaries)) < FEWEST:
        raise ValueError(f"at least {FEWEST} canaries are needed for one guess, got {m}")
    generator = for_client(generator, len(examples))
    inside, epochs = coins(m, numpy_generator(seed, "coins")), generator.epochs

    def seen(weights: Weights) -> np.ndarray:
        looks = (by(generator, weights, canaries, n_classes, seed_for(seed, "score", i)) for i in range(LOOKS))
        return np.mean([*looks], axis=0)

    some = canaries[inside]
    both = Examples(torch.cat([examples.x, some.x]), torch.cat([examples.y, some.y]))
    salted: dict[str, Any] = {"noise": Noise(of_audit(seed))} if takes_noise(generator) else {}
    trained = generator.fit(both, n_classes, seed_for(seed, "audited"), {epochs}, **salted)[epochs]
    salted = {"noise": Noise(of_audit(seed_for(seed, "reference")))} if salted else {}
    other = generator.fit(examples, n_classes, seed_for(seed, "reference"), {epochs}, **salted)[epochs]
    scores = seen(trained.weights) - seen(other.weights)
    release = (trained.receipt or Receipt()).release(0)
    reported = accountants.epsilon(release.q, release.sigma, release.steps, delta) if release.covered else None
    return reported, by_scores(_centred(scores, canaries.y.numpy()), inside, m // 4, delta)


def _centred(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Subtract the class's mean score from each score, as canaries in the training raise all scores of a rare class."""
    means = np.bincount(labels, scores) / np.maximum(np.bincount(labels), 1)
    return scores - means[labels]
