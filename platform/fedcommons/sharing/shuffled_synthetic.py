"""Fedssyn: clients contribute synthetic images to a pool, which is shuffled once and divided among the clients.

Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, algorithm I.   n_i: real images of client i;  n~: number of synthetic images that client i
contributes, and also receives;  p = n~/(n_i + n~).

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
    """Fedssyn: each client trains on its real data and on a slice of the shuffled pool of synthetic images."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of received images in a client's training set; default: get the clients' mean number of images (paper)"""

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the share p of synthetic images is 0 or yields at least one image, and that memory suffices."""
        check_contributions(self.p, client_data)

    def sizes(self, client_data: ClientDatasets) -> list[int]:
        """Return the number of synthetic images that each client contributes, which is also the number it receives."""
        return contributions(self.p, client_data)

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        """Return one request for synthetic images per client (see ``requests_of_clients``)."""
        return requests_of_clients(self.p, client_data, recipe)

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Return each client's synthetic images as its contribution."""
        return Contributions.from_generated(client_data, generated)

    def release(
        self, client_data: ClientDatasets, contributed: Contributions
    ) -> tuple[Contributions, Sequence[Release]]:
        """Return all images and their ledger entries; an image has the privacy protection of its generator."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Permute the pool; assign each client its real data and a slice of the pool, as long as its contribution."""
        parts = released.shuffled(len(client_data.clients), client_data.seed)
        return Assigned(client_data.clients.rows, parts, n_own=client_data.clients.sizes, pool=parts)
