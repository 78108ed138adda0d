"""Fedssyn: clients contribute synthetic images to a pool, which is shuffled once and divided among the clients.

Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, algorithm I.   n~: images that a client contributes and receives;  p = n~/(n_i + n~).

Departs from the paper: no known departure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fedcommons.data.federated import ClientDatasets
from fedcommons.generators.requests import (
    Contribution,
    GenerationRequest,
    GeneratorRecipe,
    check_contributions,
    contributions,
    requests_of_clients,
)
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ShuffledSynthetic:
    """Fedssyn: client i trains on D_i and on its part of the shuffled pool of synthetic images."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of shared data in a client's training set; default: the paper's, n_total/N images per client"""

    def check_data(self, client_data: ClientDatasets) -> None:
        """See ``Stage``."""
        check_contributions(self.p, client_data)

    def sizes(self, client_data: ClientDatasets) -> list[int]:
        """Return the number of images that each client contributes and receives."""
        return contributions(self.p, client_data)

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        """See ``Generating``."""
        return requests_of_clients(self.p, client_data, recipe)

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """See ``Stage``."""
        return Contributions.from_generated(client_data, generated)

    def release(
        self, client_data: ClientDatasets, contributed: Contributions
    ) -> tuple[Contributions, Sequence[Release]]:
        """Release all images to the pool; an image is as well protected as the generator that drew it."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Permute the pool once and assign each client a part as large as its contribution; all images are sent."""
        parts = released.shuffled(len(client_data.clients), client_data.seed)
        return Assigned(client_data.clients.rows, parts, n_own=client_data.clients.sizes, pool=parts)
