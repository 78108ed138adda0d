"""Training on a client's real data and its own synthetic images: Fedssyn without the exchange of images.

Li et al., TMLR 2024, arXiv:2306.13263, figure 3.   p: share of synthetic images in a client's training set.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from fedcommons.data.federated import ClientDatasets
from fedcommons.sharing import synthetic
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases


@dataclass(frozen=True)
class LocalSynthetic:
    """A strategy in which each client trains on its real data and on synthetic images from its generator."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of synthetic images in a client's training set; default: add the clients' mean number of images (paper)"""

    check_data, sizes, requests, make = synthetic.check_data, synthetic.sizes, synthetic.requests, synthetic.make

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
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
