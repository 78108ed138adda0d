"""Strategies with real images only: no sharing, and a swap of images through a pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.generators.requests import Contribution
from fedcommons.seeding import numpy_generator
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases
from fedcommons.sharing.swapped import n_swapped


@dataclass(frozen=True)
class Real:
    """A strategy without sharing: no client contributes, and no data leave a client."""

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Return empty contributions."""
        return Contributions.none(client_data)

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return the empty contributions without privacy ledger entries, as no data leave a client."""
        return contributed, ()

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its own real data."""
        return Assigned(client_data.clients.rows)


@dataclass(frozen=True)
class ShuffledReal:
    """The upper bound of Fedssyn: each client gives a share p of its images to a pool and gets the same number back.

    This is an ideal generator: Li et al., TMLR 2024, arXiv:2306.13263, figure 1(c). The number of images n_i of client
    i does not change.
    """

    p: Annotated[float | None, "[0, 1)"] = None
    """share of a client's real images that is swapped; must be set"""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that p, the share of real images to swap, is set (see ``Stage``)."""
        if self.p is None:
            raise UserError("sharing.p, the share of real data that is swapped, must be set for shuffled_real.")

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the share p is 0, or that the client with most images swaps at least one image (see ``Stage``)."""
        n = max(client_data.clients.sizes)
        if self.p and n_swapped(self.p, n) < 1:
            least = 1 / n
            raise UserError(f"sharing.p = {self.p:g} of {n} images is not one image: set 0 or more than {least:.2g}.")

    def sizes(self, client_data: ClientDatasets) -> list[int]:
        """Return the number of images that each client gives to the pool and gets from the pool."""
        return [n_swapped(self.p or 0, n) for n in client_data.clients.sizes]

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Return the real images that each client gives to the pool."""
        all_rows, sizes = client_data.clients.rows, self.sizes(client_data)
        swapped = [rows[_order(client_data, i)[: sizes[i]]] for i, rows in enumerate(all_rows)]
        return Contributions.from_real_rows(client_data, swapped)

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return the contributions and one unprotected privacy ledger entry per client for its real images."""
        return contributed, contributed.releases("real images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its remaining images, and a slice of the shuffled pool as long as its contribution."""
        all_rows, sizes = client_data.clients.rows, self.sizes(client_data)
        parts = released.shuffled(len(all_rows), client_data.seed)
        rest = [rows[np.sort(_order(client_data, i)[sizes[i] :])] for i, rows in enumerate(all_rows)]
        return Assigned(rest, parts, pool=parts)


def _order(client_data: ClientDatasets, client: int) -> np.ndarray:
    """Return a random order of a client's images; the first ``n_swapped`` images are swapped.

    The order does not depend on p. So a larger share p also swaps all images that a smaller p swaps.
    """
    return numpy_generator(client_data.seed, "swapped", client).permutation(len(client_data.clients.rows[client]))
