"""No sharing: every client trains on its real data only."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedcommons.data.federated import ClientDatasets
from fedcommons.generators.requests import Contribution
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases


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
