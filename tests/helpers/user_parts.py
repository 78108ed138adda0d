"""User-defined components, for experiments that name them as ``user_parts:NAME``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from five_clients import RECEIPT
from torch import Tensor

from fedcommons import ClientData, ClientDatasets, Examples, Payload, TrainedGenerator, Work, seed_for
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Merged, Message, Reply
from fedcommons.generators.requests import GenerationRequest, GeneratorRecipe
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import Assigned, Contributions
from fedcommons.sharing.synthetic import ShuffledSynthetic


@dataclass(frozen=True)
class Parrot:
    """A generator that returns the first training images of each class as samples."""

    epochs: int = 1
    sampling: ClassVar[tuple[str, ...]] = ()

    def fit(self, examples: Examples, n_classes: int, seed: int, epochs: Any, *, flip: bool = False) -> Any:
        return {e: TrainedGenerator({"x": examples.x, "y": examples.y}) for e in epochs}

    def sample(self, weights: Any, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        per_label = [weights["x"][weights["y"] == label] for label in labels]
        black = torch.zeros(shape, dtype=torch.uint8)
        return torch.stack([x[i % len(x)] if len(x) else black for i, x in enumerate(per_label)])


@dataclass(frozen=True)
class WithReceipt(Parrot):
    """A generator of random images with a receipt that states a privacy guarantee."""

    sigma: float = 1.5
    steps: int = 20

    def fit(self, examples: Any, n_classes: int, seed: int, epochs: Any, *, flip: bool = False) -> Any:
        receipt = replace(RECEIPT, sigma=np.float32(self.sigma), steps=np.int64(self.steps))
        return {e: TrainedGenerator({"w": torch.zeros(1)}, receipt) for e in epochs}

    def sample(self, weights: Any, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        return torch.randint(0, 256, (len(labels), *shape), dtype=torch.uint8)


@dataclass(frozen=True)
class Peeks(ShuffledSynthetic):
    """Trains client 0's generator on another client's examples, or on one example repeated eight times, or twice."""

    sees: str = "its own"

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        first, *rest = super().requests(client_data, recipe)
        if self.sees == "another's":
            first = replace(first, examples=rest[0].examples)
        if self.sees == "one eight times":
            first = replace(first, examples=first.examples[np.arange(len(first.examples)).clip(7) - 7])
        return [first, *rest, *[first] * (self.sees == "two generators")]


@dataclass(frozen=True)
class ManyTimes(Real):
    """Every client trains twice on its first image."""

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        return Assigned(client_data.clients.rows, [rows[:1] for rows in client_data.clients.rows])


@dataclass(frozen=True)
class Hints(FedAvg):
    """Sends a number in every round, with a release that states a privacy guarantee, without DP-SGD."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        work.noise.call("hint", *data.columns)
        hint = replace(RECEIPT.release(-1, "hint"), commons=True)
        return replace(reply, each={"hint": torch.zeros(1)}, releases=[*reply.releases, hint])


@dataclass(frozen=True)
class Broken(FedAvg):
    """In round 2 of a run with seed 0, client 1 sends a weight that is not finite."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        return reply if seed != seed_for(0, "client", 2, 1) else replace(reply, weight=float("nan"))


@dataclass(frozen=True)
class Reports(FedAvg):
    """Its server reports a number in every round with a merge."""

    def merge(self, *arguments: Any, **named: Any) -> Merged:
        return super().merge(*arguments, **named), {"share/weighted": torch.tensor(0.25)}
