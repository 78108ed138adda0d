"""A lower bound on a generator's epsilon from one training, with canaries among its images (``lower_bound``).

A coin decides whether a canary is trained on. Without it there is one image less, n - 1. The bound takes n as public,
as the ledger does; so it is off by as much as one image changes q = B/n.

Canaries are images that the generator did not see, as they are. On generators of digits they told more than images with
a wrong label or inverted ones: a network that removes noise hardly looks at the label, and it does not learn inverted
images better for having seen them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedcommons.audits.lower_bound import LowerBound, by_scores, coins
from fedcommons.audits.membership import Score
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt, Weights, of_client
from fedcommons.generators.requests import takes_noise
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.noise import Noise, of_audit
from fedcommons.seeding import numpy_generator, seed_for

FEWEST = 4
"""Canaries of a bound, at least: of so many one is guessed."""

LOOKS = 4
"""A canary's score is a mean over so many draws: of times and noise, or of the pool, whichever the score uses."""


@dataclass(frozen=True)
class Bounded:
    """The bound, and the epsilon that the receipt stands for; None: the receipt covers nothing."""

    audited: LowerBound
    reported: float | None

    @property
    def verdict(self) -> str:
        """See ``LowerBound.verdict``."""
        return self.audited.verdict(self.reported)


def bound(
    generator: Generator, examples: Examples, canaries: Examples, n_classes: int, seed: int, by: Score, *,
    delta: float = 1e-5, reference: bool = True,
) -> Bounded:  # fmt: skip
    """Train on the examples and half of the m canaries, and guess which ones: the m/4 with the highest scores.

    Scores are compared within classes. ``reference``: a second generator is trained without canaries, and its scores
    are subtracted, as some images are easier than others.

    Raises:
        ValueError: there are fewer than four canaries, so that none would be guessed.
    """
    if (m := len(canaries)) < FEWEST:
        raise ValueError(f"at least {FEWEST} canaries are needed, of which one is guessed, got {m}")
    generator = of_client(generator, len(examples))
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
    """Scores minus the mean of their class: canaries make all of a class easier that the examples have little of."""
    means = np.bincount(labels, scores) / np.maximum(np.bincount(labels), 1)
    return scores - means[labels]
