"""The sensitivity test of sharing stages: each false release is told in a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.data.examples import Examples
from fedcommons.seeds import numpy_generator
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.needs import GeneratorRecipe, Need, needs
from fedcommons.sharing.stage import Assigned, Contribution, Contributions, Stage
from fedcommons.testing import check_stage


@dataclass(frozen=True)
class Means:
    """Every client gives its mean image, with noise by the run's seed: black blanks it out, so it moves by 8/n."""

    sigma: float = 0.2
    noise: float = 0.2

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        return Contributions.of_made(dealt, [Contribution(self.mean(dealt, i)) for i in range(len(dealt.own))])

    def mean(self, dealt: Dealt, client: int) -> Examples:
        x = dealt.own[client].x
        return Examples(x.float().mean(0, keepdim=True).to(x.dtype), torch.tensor([client]))

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        releases, x = [], contributed.store.x.clone()
        for row, client in zip(contributed.rows.tolist(), contributed.owners.tolist(), strict=True):
            moves = 8 / dealt.own.sizes[client]
            releases.append(
                Release(client, ("mean",), mechanism=SAMPLED_GAUSSIAN, sigma=self.sigma, sensitivity=moves, steps=1)
            )
            normal = numpy_generator(dealt.seed, "noise", client).standard_normal((1, 8, 8))
            x[row] = (x[row] + 255 * self.noise * moves * torch.from_numpy(normal)).clamp(0, 255).to(x.dtype)
        return replace(contributed, store=Examples(x, contributed.store.y)), releases

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        return Assigned(dealt.own.rows, [released.rows] * len(dealt.own), n_own=dealt.own.sizes)


class MeansWithLessNoise(Means):
    """Half of what is declared."""

    def __init__(self) -> None:
        super().__init__(noise=0.1)


class LargestPixels(Means):
    """Not the mean, but what an example alone decides."""

    def mean(self, dealt: Dealt, client: int) -> Examples:
        return replace(super().mean(dealt, client), x=dealt.own[client].x.amax(0, keepdim=True))


class MeansOfTheLabels(Means):
    """The label that the mean gets is the sum of all labels, modulo ten."""

    def mean(self, dealt: Dealt, client: int) -> Examples:
        return replace(super().mean(dealt, client), y=dealt.own[client].y.sum().view(1) % 10)


class AlsoRealOnes(Means):
    """Beside its mean every client gives one of its examples to the next one."""

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        whole, rows = super().assign(dealt, released), dealt.own.rows
        given = [rows[i - 1][:1] for i in range(len(rows))]
        return replace(whole, received=[np.concatenate(both) for both in zip(whole.received, given, strict=True)])


class DarkestFirst(Means):
    """Who gets which mean first follows from the first client's pixels."""

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        dark = np.roll(released.rows, int(dealt.own[0].x.float().nan_to_num().sum() / 255) % 5)
        return replace(super().assign(dealt, released), received=[dark] * len(dealt.own))


class WeighsByTheData(Means):
    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        sums = [1.0 + float(client.x.float().nan_to_num().mean()) for client in dealt.own]
        weights = [np.full(n + len(released.rows), s) for n, s in zip(dealt.own.sizes, sums, strict=True)]
        return replace(super().assign(dealt, released), weights=weights)


class NoisyLabels(Means):
    """The synthetic images that it asks for have labels as the recipe makes them."""

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        return needs(0.8, dealt, recipe)


class LabelsWithoutNoise(NoisyLabels):
    """It leaves the noise out that the recipe asks for."""

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        bare = needs(0.8, dealt, replace(recipe, label_noise=0.0))
        return [replace(need, recipe=recipe) for need in bare]


class ImagesByTheLabels(NoisyLabels):
    """It asks for as many images as an example's label says."""

    def needs(self, dealt: Dealt, recipe: GeneratorRecipe) -> Sequence[Need]:
        wanted = [4 + int(client.y.sum()) for client in dealt.own]
        return [replace(need, n=n) for need, n in zip(super().needs(dealt, recipe), wanted, strict=True)]


STAGES = {
    MeansWithLessNoise: "what left moves by .* standard deviations .* lets it move by 5",
    LargestPixels: "what left moves by .* standard deviations .* lets it move by 5",
    MeansOfTheLabels: "labels moves by .* label replaced",
    AlsoRealOnes: "1 real examples of client 0 leave it",
    DarkestFirst: "who gets what moves by",
    WeighsByTheData: "weights moves by",
    LabelsWithoutNoise: "labels moves by .* declared is noise multiplier 2",
    ImagesByTheLabels: "numbers of images moves by",
}


@pytest.mark.parametrize("plant", STAGES)
def test_a_stages_false_release_is_told(plant: type[Stage]) -> None:
    with pytest.raises(AssertionError, match=STAGES[plant]):
        check_stage(plant())


def test_a_stages_true_release_is_not_blamed() -> None:
    for seed in range(3):
        check_stage(Means(), seed=seed)
        check_stage(NoisyLabels(), seed=seed)
