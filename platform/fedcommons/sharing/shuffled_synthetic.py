"""Fedssyn: clients contribute synthetic images to a pool, which is shuffled once and divided among the clients.

Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, algorithm I.   n~: images that a client contributes and receives;  p = n~/(n_i + n~).

Departs from the paper: no known departure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fedcommons.data.federated import Dealt
from fedcommons.generators.requests import (
    Contribution,
    GeneratorRecipe,
    Need,
    check_contributions,
    contributions,
    needs,
)
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ShuffledSynthetic:
    """Fedssyn: client i trains on D_i and on its part of the shuffled pool of synthetic images."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of shared data in a client's training set; default: the paper's, n_total/N images per client"""

    def check_dealt(self, dealt: Dealt) -> None:
        """See ``Stage``."""
        check_contributions(self.p, dealt)

    def sizes(self, dealt: Dealt) -> list[int]:
        """Return the number of images that each client contributes and receives."""
        return contributions(self.p, dealt)

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        """See ``Generating``."""
        return needs(self.p, dealt, recipe)

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        """See ``Stage``."""
        return Contributions.of_made(dealt, drawn)

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        """Release all images to the pool; an image is as well protected as the generator that drew it."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        """Permute the pool once and assign each client a part as large as its contribution; all images are sent."""
        parts = released.shuffled(len(dealt.own), dealt.seed)
        return Assigned(dealt.own.rows, parts, n_own=dealt.own.sizes, pool=parts)
