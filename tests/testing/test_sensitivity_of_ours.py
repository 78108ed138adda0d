"""The sensitivity test of generators and stages finds each kind of false claim, and accuses no part of the package."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.config.registry import KINDS, constants, make
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local_training import LocalSGD
from fedcommons.data.examples import Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.generators.generator import Receipt, TrainedGenerator
from fedcommons.generators.requests import Contribution, GenerationRequest, GeneratorRecipe, requests_of_clients
from fedcommons.privacy.dp_sgd import DPSGD, NoisySum, clipped
from fedcommons.privacy.noise import Noise
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.seeding import numpy_generator
from fedcommons.sharing.stage import Assigned, Contributions
from fedcommons.testing import check_generator, check_stage, digits
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared


def clipped_halves(image: Tensor) -> Tensor:
    return torch.cat([clipped(half.clone(), 1.0)[0] for half in image.flatten().float().chunk(2)])


@dataclass(frozen=True)
class MeanImage:
    """Its weights are noisy means of clipped images, one a step; its receipt states 3 steps and sigma 2."""

    sampling: ClassVar[tuple[str, ...]] = ()
    epochs: int = 3
    part: Callable[[Tensor], Tensor] = lambda image: clipped(image.flatten().float(), 1.0)[0]
    more: Callable[[Examples], dict[str, Tensor]] = lambda examples: {}

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        noise: Noise | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        assert noise is not None
        draws, mean = noise.call("means", examples.x, examples.y), torch.zeros(64)
        for step in range(3):
            total = NoisySum(torch.zeros(64), 1.0)
            for image in examples.x:
                total.add(self.part(image / 255 - mean.view(1, 8, 8)), 1.0)
            total.blur(2.0, draws.stream("noise", step))
            mean = mean + total.values / len(examples)
        receipt = Receipt(SAMPLED_GAUSSIAN, q=1.0, sigma=2.0, sensitivity=1.0, steps=3)
        weights = {"mean": mean, **self.more(examples)}
        return {epoch: TrainedGenerator(weights, receipt) for epoch in epochs}

    def sample(self, weights: Any, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        return (255 * weights["mean"]).clamp(0, 255).to(torch.uint8).view(shape).expand(len(labels), *shape)


GENERATORS: dict[str, tuple[MeanImage, str]] = {
    "halves clipped": (MeanImage(part=clipped_halves), "sum of means, call 1, noise 0 moves by 1.41"),
    "labels": (MeanImage(more=lambda examples: {"labels": torch.bincount(examples.y, minlength=10)}),
               "labels moves by .* label replaced"),
}  # fmt: skip


@pytest.mark.parametrize("plant", GENERATORS)
def test_a_generators_false_receipt_is_found(plant: str) -> None:
    generator, words = GENERATORS[plant]
    with pytest.raises(AssertionError, match=words):
        check_generator(generator)


@dataclass(frozen=True)
class Means:
    """Every client gives its mean image, with noise by the run's seed: black blanks it out, so it moves by 8/n."""

    sigma: float = 0.2
    noise: float = 0.2

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        means = [client.x.float().mean(0, keepdim=True).to(client.x.dtype) for client in client_data.clients]
        each = [Contribution(Examples(x, torch.tensor([i]))) for i, x in enumerate(means)]
        return Contributions.from_generated(client_data, each)

    def release(
        self, client_data: ClientDatasets, contributed: Contributions
    ) -> tuple[Contributions, Sequence[Release]]:
        releases, x = [], contributed.store.x.clone()
        for row, client in zip(contributed.rows.tolist(), contributed.owners.tolist(), strict=True):
            moves = 8 / client_data.clients.sizes[client]
            event = Release(mechanism=SAMPLED_GAUSSIAN, sigma=self.sigma, sensitivity=moves, steps=1)
            releases.append(replace(event, client=client, what=("mean",)))
            normal = numpy_generator(client_data.seed, "noise", client).standard_normal((1, 8, 8))
            x[row] = (x[row] + 255 * self.noise * moves * torch.from_numpy(normal)).clamp(0, 255).to(x.dtype)
        return replace(contributed, store=Examples(x, contributed.store.y)), releases

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        return Assigned(
            client_data.clients.rows, [released.rows] * len(client_data.clients), n_own=client_data.clients.sizes
        )


class AlsoRealOnes(Means):
    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        whole, rows = super().assign(client_data, released), client_data.clients.rows
        extra = [rows[i - 1][:1] for i in range(len(rows))]
        return replace(whole, received=[np.concatenate(both) for both in zip(whole.received, extra, strict=True)])


class NoisyLabels(Means):
    """It asks for synthetic images, whose labels are those of the recipe."""

    def requests(self, client_data: ClientDatasets, recipe: GeneratorRecipe) -> Sequence[GenerationRequest]:
        return requests_of_clients(0.8, client_data, recipe)


@pytest.mark.long
def test_true_receipts_and_releases_are_not_accused() -> None:
    for seed in range(3):
        check_generator(MeanImage(), seed=seed)
        check_stage(Means(), seed=seed)
        check_stage(NoisyLabels(), seed=seed)


STAGES: dict[str, tuple[Means, str]] = {
    "less noise": (Means(noise=0.1), "all that was sent moves by .* standard deviations .* lets it move by 5"),
    "real examples": (AlsoRealOnes(), "1 real examples of client 0 leave it"),
}


@pytest.mark.parametrize("plant", STAGES)
def test_a_stages_false_release_is_found(plant: str) -> None:
    stage, words = STAGES[plant]
    with pytest.raises(AssertionError, match=words):
        check_stage(stage)


# Methods, generators and stages of the package, whatever the seed


OTHERWISE: dict[str, dict[str, Any]] = {
    "feddm": {"init": "noise"}, "fedlap": {"classes": "all"}, "feddpms": {"privacy": "sound"},
    "shuffled_real": {"p": 0.3}, "raw_copies": {"c": 0.3},
    "merf": {"noise_multiplier": 3.0, "features": 40, "per_class": 2, "steps": 3},
    "ndpdc": {"noise_multiplier": 3.0, "iterations": 3, "per_class": 2, "width": 8, "batch": 2},
}  # fmt: skip
"""Constants that make a part private, or that it must be given."""

BY_DP_SGD = [name for name in KINDS["generator"].components if "noise_multiplier" in constants("generator", name)]
SMALL = {"epochs": 1, "batch_size": 8, "lr": 1e-3, "channels": (8, 16), "noise_multiplier": 1.5, "draws": 2}

SMALL_CLIP = LocalSGD(epochs=1, batch_size=3, dp=DPSGD(noise_multiplier=0.5, clip=0.1))

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]


UNPROTECTED: list[tuple[str, dict[str, Any]]] = [
    ("feddm", {}), ("fedlap", {}), ("feddpms", {}), ("scaffold", {"option": 1}),
]  # fmt: skip
"""Nothing protects images that start from real ones, a client's classes, codes as printed, a plain gradient."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "values"), [*((name, OTHERWISE.get(name, {})) for name in KINDS["algorithm"].components), *UNPROTECTED]
)
@pytest.mark.long
def test_no_method_is_accused(name: str, values: dict[str, Any], seed: int, quick: Callable[[str], Algorithm]) -> None:
    method: Any = quick(name)
    for local in (LOCAL, SMALL_CLIP)[: 1 + seed % 2]:
        what_leaves_a_client_moves_as_declared(replace(method, **values), local, seed)


@pytest.mark.parametrize("name", BY_DP_SGD)
def test_no_private_generator_is_accused(name: str) -> None:
    check_generator(make("generator", name, SMALL), digits((12,)).data.clients.store)


@pytest.mark.parametrize("name", KINDS["sharing"].components)
def test_no_stage_is_accused(name: str) -> None:
    for seed in (0, 1):
        check_stage(make("sharing", name, OTHERWISE.get(name, {})), seed=seed)
