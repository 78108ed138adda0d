"""Functions of the sharing strategies in which each client contributes images of its own generator."""

from collections.abc import Sequence
from typing import Protocol

from fedcommons.data.federated import ClientDatasets
from fedcommons.generators import requests as generation
from fedcommons.generators.requests import Contribution, GenerationRequest, GeneratorRecipe
from fedcommons.sharing.stage import Contributions, WithReleases


class Synthetic(Protocol):
    """A strategy with a constant p: the share of synthetic images in a client's training set."""

    @property
    def p(self) -> float | None: ...


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
