"""Fedssyn: clients contribute synthetic images to a pool, which is shuffled once and divided among the clients.

Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
TMLR 2024, arXiv:2306.13263, algorithm I.   n_i: real images of client i;  n~: number of synthetic images that client i
contributes, and also receives;  p = n~/(n_i + n~).

Departs from the paper: no known departure.
"""

from dataclasses import dataclass
from typing import Annotated

from fedcommons.data.federated import ClientDatasets
from fedcommons.sharing import synthetic
from fedcommons.sharing.stage import Assigned, Contributions


@dataclass(frozen=True)
class ShuffledSynthetic:
    """Fedssyn: each client trains on its real data and on a slice of the shuffled pool of synthetic images."""

    p: Annotated[float | None, "[0, 1)"] = None
    """share of received images in a client's training set; default: get the clients' mean number of images (paper)"""

    check_data, sizes, requests = synthetic.check_data, synthetic.sizes, synthetic.requests
    make, release = synthetic.make, synthetic.release

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Permute the pool; assign each client its real data and a slice of the pool, as long as its contribution."""
        parts = released.shuffled(len(client_data.clients), client_data.seed)
        return Assigned(client_data.clients.rows, parts, n_own=client_data.clients.sizes, pool=parts)
