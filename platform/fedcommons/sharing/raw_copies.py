"""Privacy-flexible learning: a share c of each client's images is not private and is copied to other clients.

Makkonen, Niemelä, Hollanti and Kas Hanna, "Approximate gradient coding for privacy-flexible federated learning with
non-IID data", arXiv:2404.03524.   d: number of other clients that get a copy of an image that is not private;
d_j: number of clients that hold image j, including its owner (the client whose image it is).

In the loss of each client that holds image j, the image has the weight 1/d_j. So each image counts once over all
clients. A copied image is sent to the server once, and from the server to d_j - 1 clients.

Departs from the paper: c times the number of a client's images of a class is rounded if it is not an integer. The
numbers are rounded so that their sum over all clients and classes is c times the number of all images, rounded. So the
clients must agree on the rounded numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedcommons.data.federated import ClientDatasets
from fedcommons.errors import UserError
from fedcommons.generators.requests import Contribution
from fedcommons.runtime import memory_limit
from fedcommons.seeding import numpy_generator
from fedcommons.sharing.placement import holdings, n_open, plans, sample_shareable
from fedcommons.sharing.stage import Assigned, Contributions, WithReleases


@dataclass(frozen=True)
class RawCopies:
    """A strategy in which clients also train on raw copies of other clients' images; weight: 1 / number of holders."""

    c: Annotated[float | None, "[0, 1]"] = None
    """share of every client's images of a class that is not private; must be set"""
    d: Annotated[int, "[1, 1e9]"] = 2
    """number of other clients that get a copy of each image that is not private"""
    placement: Annotated[str, "exact | binomial | optimal"] = "exact"
    """which other clients get a copy of an image: exact (d random clients), binomial (each with equal probability, d on
    average) or optimal (d clients, so that the images of each class are spread most evenly)"""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that c, the share of images that are not private, is set (see ``Stage``)."""
        if self.c is None:
            raise UserError("sharing.c, the share of images that is not private, must be set for raw_copies.")

    def check_data(self, client_data: ClientDatasets) -> None:
        """Check that the constants c, d and ``placement`` fit the clients' data, and that the copies fit into memory.

        c: share of images that are not private. d: number of other clients that get a copy of such an image.
        """
        c, n, n_clients = self.c or 0.0, sum(client_data.clients.sizes), len(client_data.clients)
        if n_clients < 2:
            raise UserError("sharing.setting raw_copies needs at least 2 clients, got 1: no other can get a copy.")
        if self.d > n_clients - 1:
            raise UserError(f"sharing.d must be at most N - 1 = {n_clients - 1}, the other clients, got {self.d}.")
        if c and n_open(c, n) < 1:
            least = 0.5 / n
            raise UserError(f"sharing.c = {c:g} of {n} images is not one image: it must be 0 or at least {least:.2g}.")
        if self.placement == "optimal" and client_data.n_classes is None:
            raise UserError("sharing.placement optimal evens out classes, but the labels are not classes.")
        counts = np.bincount(self._labels(client_data), minlength=client_data.n_classes or 0)
        if self.placement == "optimal" and not counts.all():
            raise UserError(f"sharing.placement optimal needs every class, got no image of class {counts.argmin()}.")
        memory_limit.require(f"copies at {n_clients:,} clients", n_clients * (n + 16 * n_open(c, n)), "sharing.c")

    def holdings(self, client_data: ClientDatasets) -> np.ndarray:
        """Return whether each client holds each image: (images, N) bool; the images of client 0 come first."""
        labels, owners, n_clients = self._labels(client_data), _owners(client_data), len(client_data.clients)
        return holdings(labels, owners, n_clients, self.c or 0.0, self.d, self.placement, _draws(client_data))

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        """Return the contributions: each client's real images of which at least one other client gets a copy."""
        copied, ends = self.holdings(client_data).sum(1) > 1, np.cumsum(client_data.clients.sizes)[:-1]
        parts = zip(client_data.clients.rows, np.split(copied, ends), strict=True)
        return Contributions.from_real_rows(client_data, [rows[some] for rows, some in parts])

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> WithReleases:
        """Return the contributions and one unprotected privacy ledger entry per client for its raw images."""
        return contributed, contributed.releases("raw examples")

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        """Assign each client its images and its copies. An image that d_j clients hold has the weight 1/d_j."""
        if not len(released.rows):
            return Assigned(client_data.clients.rows)
        is_held, owners = self.holdings(client_data), _owners(client_data)
        rows, weight = np.concatenate(list(client_data.clients.rows)), 1 / is_held.sum(1)
        copies = [np.flatnonzero(mask & (owners != client)) for client, mask in enumerate(is_held.T)]
        weights = [np.concatenate([weight[owners == client], weight[new]]) for client, new in enumerate(copies)]
        received = [rows[new] for new in copies]
        return Assigned(client_data.clients.rows, received, weights, notes=self._notes(client_data))

    def _notes(self, client_data: ClientDatasets) -> list[str]:
        """Return a message on how evenly the optimal placement spreads the classes; empty for other placements."""
        if self.placement != "optimal":
            return []
        labels, owners = self._labels(client_data), _owners(client_data)
        chosen = sample_shareable(labels, owners, self.c or 0.0, _draws(client_data))
        by_class = plans(labels, owners, len(client_data.clients), chosen, self.d).values()
        reached, bound = sum(plan.distance for plan in by_class), sum(plan.bound for plan in by_class)
        return [
            f"optimal placement of copies: sum over classes of ||Y - 1/N||^2 = {reached:.6g}; lower bound for any "
            f"placement {bound:.6g}; gap {max(0.0, reached - bound):.2g}"
        ]

    @staticmethod
    def _labels(client_data: ClientDatasets) -> np.ndarray:
        """Return the labels of all images, those of client 0 first; zeros if the labels are not classes."""
        if client_data.n_classes is None:
            return np.zeros(sum(client_data.clients.sizes), np.int64)
        return client_data.clients.store.y.numpy()[np.concatenate(list(client_data.clients.rows))]


def _owners(client_data: ClientDatasets) -> np.ndarray:
    return np.repeat(np.arange(len(client_data.clients)), client_data.clients.sizes)


def _draws(client_data: ClientDatasets) -> np.random.Generator:
    return numpy_generator(client_data.seed, "copies")
