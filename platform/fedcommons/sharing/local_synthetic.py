"""Training on a client's real data and its own synthetic images: Fedssyn without the exchange of images.

Li et al., TMLR 2024, arXiv:2306.13263, figure 3.   p: share of synthetic images in a client's training set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
class LocalSynthetic:
    """A strategy in which each client trains on its real data and on synthetic images from its generator."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of synthetic images in a client's training set; default: add the clients' mean number of images (paper)"""

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the share p of synthetic images is 0 or yields at least one image, and that memory suffices."""
        check_contributions(self.p, client_data)

    def sizes(self, client_data: ClientDatasets) -> list[int]:
        """Return the number of synthetic images that each client adds to its training set."""
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
        """Return privacy ledger entries as if the synthetic images left the clients, although no image leaves a client.

        A real image influences many synthetic images, and DP-SGD counts each synthetic image as a separate example. So
        without the entries, the model updates would reveal more of a real image than the ledger states. No example is
        disclosed (``n_disclosed`` is 0).
        """
        return contributed, [replace(event, n_disclosed=0) for event in contributed.releases("synthetic images")]

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its real data and the synthetic images from its generator."""
        return Assigned(
            client_data.clients.rows, released.rows_by_client(len(client_data.clients)), n_own=client_data.clients.sizes
        )
