"""A pool at the server: every client contributes synthetic images, which the server stores and does not send on.

The images are those of ``shuffled_synthetic`` (Li et al., arXiv:2306.13263). Each image is sent once, to the server.
Clients train on their real data only. In the methods ``one_shot`` and ``fedddpm`` the server trains on the pool.
n_i: client i's real images;  n~: synthetic images that it contributes;  p = n~/(n_i + n~), as if it received n~ images.

Departs from the paper: the pool stays at the server. In the paper the pool is sent to the clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcommons.core.capabilities import Capabilities
from fedcommons.data.federated import ClientDatasets
from fedcommons.generators.requests import (
    Contribution,
    GenerationRequest,
    GeneratorRecipe,
    check_contributions,
    requests_of_clients,
)
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ServerSynthetic:
    """A strategy in which clients train on their real data, and the server trains on the pool of synthetic images."""

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    p: Annotated[float | None, "(0, 1)"] = None
    """synthetic/(real + synthetic) images of each client; default: add the clients' mean number of images (paper)"""

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the share p of synthetic images is 0 or yields at least one image, and that memory suffices."""
        check_contributions(self.p, client_data)

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
        """Assign each client its own data, and the server the pool, with one part for each client's contribution."""
        return Assigned(client_data.clients.rows, pool=released.rows_by_client(len(client_data.clients)))
