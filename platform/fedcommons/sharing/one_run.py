"""A lower bound on a generator's epsilon from one training, with canaries among its images (``accounting.audited``).

A coin decides whether a canary is trained on. Where it is not, n is one smaller; the bound takes n as public, as the
ledger does, so it is off by what q = B/n changes from one image.
"""

from dataclasses import dataclass

import torch

from fedcommons.accounting.audited import Audited, by_scores, coins
from fedcommons.core.accountants import composed
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Generator, Receipt
from fedcommons.seeds import numpy_generator, seed_for
from fedcommons.sharing.membership import Score


@dataclass(frozen=True)
class Bounded:
    """The bound, and the epsilon that the receipt stands for; None: the receipt covers nothing."""

    audited: Audited
    reported: float | None


def mislabelled(held_out: Examples, m: int, n_classes: int, seed: int) -> Examples:
    """m canaries: held-out images, as many as there are, each with the label of another class."""
    draws = numpy_generator(seed, "canaries")
    some = held_out[draws.permutation(len(held_out))[:m]]
    others = torch.from_numpy(draws.integers(1, max(2, n_classes), size=len(some)))
    return Examples(some.x, (some.y + others) % n_classes)


def bound(
    generator: Generator, examples: Examples, canaries: Examples, n_classes: int, seed: int, by: Score, *,
    delta: float = 1e-5, reference: bool = True,
) -> Bounded:  # fmt: skip
    """Train on the examples and half of the canaries; guess of the m/4 with the highest scores that they were in.

    ``reference``: from each score that under a generator is subtracted that has seen no canary, as some images are
    easier than others.
    """
    m = len(canaries)
    inside, epochs, draws = coins(m, numpy_generator(seed, "coins")), generator.epochs, seed_for(seed, "score")
    some = canaries[inside]
    both = Examples(torch.cat([examples.x, some.x]), torch.cat([examples.y, some.y]))
    trained = generator.fit(both, n_classes, seed_for(seed, "audited"), {epochs})[epochs]
    scores = by(generator, trained.weights, canaries, n_classes, draws)
    if reference:
        other = generator.fit(examples, n_classes, seed_for(seed, "reference"), {epochs})[epochs]
        scores = scores - by(generator, other.weights, canaries, n_classes, draws)
    release = (trained.receipt or Receipt()).release(0)
    reported = composed(((release.q, release.sigma, release.steps),), delta) if release.covered else None
    return Bounded(by_scores(scores, inside, m // 4, delta), reported)
