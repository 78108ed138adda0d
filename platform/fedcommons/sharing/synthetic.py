"""Strategies in which each client contributes images of its own generator: shuffled, kept, or stored at the server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Protocol

from fedcommons.core.capabilities import Capabilities
from fedcommons.data.federated import ClientDatasets
from fedcommons.generators import requests as generation
from fedcommons.generators.requests import Contribution, GenerationRequest, GeneratorRecipe
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases


class Synthetic(Protocol):
    """A strategy with a constant p: the share of synthetic images in a client's training set."""

    @property
    def p(self) -> float | None: ...


@dataclass(frozen=True)
class ShuffledSynthetic:
    """Fedssyn: each client trains on its real data and on a slice of the shuffled pool of synthetic images.

    Li et al., "Synthetic data shuffling accelerates the convergence of federated learning under data heterogeneity",
    TMLR 2024, arXiv:2306.13263, algorithm I.   n_i: real images of client i;  n~: number of synthetic images that
    client i contributes, and also receives;  p = n~/(n_i + n~).

    Departs from the paper: no known departure.
    """

    p: Annotated[float | None, "[0, 1)"] = None
    """share of received images in a client's training set; default: get the clients' mean number of images (paper)"""

    def check_data(self: Synthetic, client_data: ClientDatasets) -> None:
        generation.check_contributions(self.p, client_data)

    def sizes(self: Synthetic, client_data: ClientDatasets) -> list[int]:
        return generation.contributions(self.p, client_data)

    def requests(self: Synthetic, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        return generation.requests_of_clients(self.p, client_data, recipe)

    def make(self: object, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        return Contributions.from_generated(client_data, generated)

    def release(self: object, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return all images and their ledger entries; an image has the privacy protection of its generator."""
        return contributed, contributed.releases("synthetic images")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Permute the pool; assign each client its real data and a slice of the pool, as long as its contribution."""
        parts = released.shuffled(len(client_data.clients), client_data.seed)
        return Assigned(client_data.clients.rows, parts, n_own=client_data.clients.sizes, pool=parts)


@dataclass(frozen=True)
class LocalSynthetic:
    """A strategy in which each client trains on its real data and on synthetic images from its generator.

    This is Fedssyn without the exchange of images: Li et al., TMLR 2024, arXiv:2306.13263, figure 3.
    """

    p: Annotated[float | None, "[0, 1)"] = None
    """share of synthetic images in a client's training set; default: add the clients' mean number of images (paper)"""

    check_data, sizes = ShuffledSynthetic.check_data, ShuffledSynthetic.sizes
    requests, make = ShuffledSynthetic.requests, ShuffledSynthetic.make

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return privacy ledger entries as if the synthetic images left the clients, although no image leaves a client.

        A real image influences many synthetic images, and DP-SGD counts each synthetic image as a separate example. So
        without the entries, the model updates would reveal more of a real image than the ledger states. No example is
        disclosed (``n_disclosed`` is 0).
        """
        return contributed, [replace(event, n_disclosed=0) for event in contributed.releases("synthetic images")]

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its real data and the synthetic images from its generator."""
        rows, n_own = client_data.clients.rows, client_data.clients.sizes
        return Assigned(rows, released.rows_by_client(len(rows)), n_own=n_own)


@dataclass(frozen=True)
class ServerSynthetic:
    """A strategy in which clients train on their real data, and the server trains on the pool of synthetic images.

    The images are those of ``shuffled_synthetic`` (Li et al., arXiv:2306.13263). Each image is sent once, to the
    server. In the methods ``one_shot``, ``fedddpm`` and ``feddf`` the server trains on the pool.
    n_i: client i's real images;  n~: synthetic images that client i contributes;  p = n~/(n_i + n~).

    Departs from the paper: the pool stays at the server. In the paper the pool is sent to the clients.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    p: Annotated[float | None, "(0, 1)"] = None
    """synthetic/(real + synthetic) images of each client; default: add the clients' mean number of images (paper)"""

    check_data, requests = ShuffledSynthetic.check_data, ShuffledSynthetic.requests
    make, release = ShuffledSynthetic.make, ShuffledSynthetic.release

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its own data, and the server the pool, with one part for each client's contribution."""
        return Assigned(client_data.clients.rows, pool=released.rows_by_client(len(client_data.clients)))
