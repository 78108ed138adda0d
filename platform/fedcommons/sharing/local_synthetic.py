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
    """A strategy in which client i trains on its real data D_i and on its own synthetic images."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of shared data in a client's training set; default: the paper's, n_total/N images per client"""

    def check_data(self, client_data: ClientDatasets) -> None:
        """See ``Stage``."""
        check_contributions(self.p, client_data)

    def sizes(self, client_data: ClientDatasets) -> list[int]:
        """Return the number of images that each client contributes."""
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
        """Record releases as if the synthetic images left the clients, although no image does.

        A real image influences many synthetic images, and private training counts these as separate examples. So the
        updates reveal more of the real image than the accounting states. No example is disclosed (``Release.seen``: 0).
        """
        return contributed, [replace(event, n_disclosed=0) for event in contributed.releases("synthetic images")]

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its own synthetic images."""
        return Assigned(
            client_data.clients.rows, released.rows_by_client(len(client_data.clients)), n_own=client_data.clients.sizes
        )
