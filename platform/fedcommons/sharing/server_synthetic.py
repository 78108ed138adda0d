"""The server's pool: every client contributes synthetic images, which the server keeps and gives to nobody.

The images are those of ``shuffled_synthetic`` (Li et al., arXiv:2306.13263); they travel once, up only. Clients go on
with their real data. The servers of ``one_shot`` and ``fedddpm`` train on the pool.
n~: images a client contributes;  p = n~/(n_i + n~), as if it received as many.

Departs from the paper: there the pool is dealt to the clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fedcommons.data.federated import Dealt
from fedcommons.generators.requests import Contribution, GeneratorRecipe, Need, check_contributions, needs
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ServerSynthetic:
    """D_i for client i; the pool for the server."""

    serves_pool = True

    p: Annotated[float | None, "(0, 1)"] = None
    """n~/(n_i + n~) for n~ images of a client; default: the paper's, n_total/N images a client"""

    def check_dealt(self, dealt: Dealt) -> None:
        """See ``Stage``."""
        check_contributions(self.p, dealt)

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        """See ``Generating``."""
        return needs(self.p, dealt, recipe)

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        """See ``Stage``."""
        return Contributions.of_made(dealt, drawn)

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        """All images go to the server; each is as well protected as the generator that drew it."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        """Clients keep what they have; the images travel up, and stay in the parts that the clients contributed."""
        return Assigned(dealt.own.rows, pool=released.of_each(len(dealt.own)))
