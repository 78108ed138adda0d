"""A pool at the server: every client contributes synthetic images, which the server stores and does not send on.

The images are those of ``shuffled_synthetic`` (Li et al., arXiv:2306.13263). Each image is sent once, to the server.
Clients train on their real data only. In the methods ``one_shot`` and ``fedddpm`` the server trains on the pool.
n_i: client i's real images;  n~: synthetic images that client i contributes;  p = n~/(n_i + n~).

Departs from the paper: the pool stays at the server. In the paper the pool is sent to the clients.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcommons.core.capabilities import Capabilities
from fedcommons.data.federated import ClientDatasets
from fedcommons.sharing import synthetic
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ServerSynthetic:
    """A strategy in which clients train on their real data, and the server trains on the pool of synthetic images."""

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    p: Annotated[float | None, "(0, 1)"] = None
    """synthetic/(real + synthetic) images of each client; default: add the clients' mean number of images (paper)"""

    check_data, requests = synthetic.check_data, synthetic.requests
    make, release = synthetic.make, synthetic.release

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its own data, and the server the pool, with one part for each client's contribution."""
        return Assigned(client_data.clients.rows, pool=released.rows_by_client(len(client_data.clients)))
