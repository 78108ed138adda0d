"""The server's pool: every client contributes synthetic images, which the server stores and does not send on.

The images are those of ``shuffled_synthetic`` (Li et al., arXiv:2306.13263); each is sent once, to the server. Clients
train on their real data. The servers of ``one_shot`` and ``fedddpm`` train on the pool.
n~: images that a client contributes;  p = n~/(n_i + n~), as if the client received n~ images.

Departs from the paper: in the paper the pool is sent to the clients.
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
    requests_of_clients,
)
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ServerSynthetic:
    """A strategy in which client i trains on D_i and the server on the pool of synthetic images."""

    serves_pool = True

    p: Annotated[float | None, "(0, 1)"] = None
    """n~/(n_i + n~) for n~ images of a client; default: the paper's, n_total/N images per client"""

    def check_data(self, client_data: ClientDatasets) -> None:
        """See ``Stage``."""
        check_contributions(self.p, client_data)

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        """See ``Generating``."""
        return requests_of_clients(self.p, client_data, recipe)

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """See ``Stage``."""
        return Contributions.from_generated(client_data, generated)

    def release(
        self, client_data: ClientDatasets, contributed: Contributions
    ) -> tuple[Contributions, Sequence[Release]]:
        """Release all images to the server; an image is as well protected as the generator that drew it."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign clients their own data and the server the pool, with one part for each client's contribution."""
        return Assigned(client_data.clients.rows, pool=released.rows_by_client(len(client_data.clients)))
