"""Fedssyn: every client contributes synthetic images to a pool, which is shuffled once and dealt to the clients.

Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, algorithm I.   n~: images a client contributes and receives;  p = n~/(n_i + n~).

Departs from the paper: nothing known.
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
    """Fedssyn: D_i and the client's part of the shuffled pool."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of shared data in a client's training set; default: the paper's, n_total/N images a client"""

    def check_dealt(self, dealt: Dealt) -> None:
        """See ``Stage``."""
        check_contributions(self.p, dealt)

    def sizes(self, dealt: Dealt) -> list[int]:
        """Images that each client contributes and receives."""
        return contributions(self.p, dealt)

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        """See ``Generating``."""
        return needs(self.p, dealt, recipe)

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        """See ``Stage``."""
        return Contributions.of_made(dealt, drawn)

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        """All images go to the pool; each is as well protected as the generator that drew it."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        """The pool is permuted once and cut into parts as large as the contributions; all images travel up and down."""
        parts = released.shuffled(len(dealt.own), dealt.seed)
        return Assigned(dealt.own.rows, parts, n_own=dealt.own.sizes, pool=parts)
