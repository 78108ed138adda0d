"""The sensitivity test of noise that a method adds itself: each false claim is told in a sentence."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Algorithm, Common, Message, Reply
from fedcommons.core.dp_sgd import NoisySum, clipped
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.tensors import Payload
from fedcommons.testing import check_algorithm
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared


class NoisyMean(FedAvg):
    """Sends the mean of its examples too, clipped to norm 1 and with noise of its own. What follows is false of it."""

    clip, noise, numbers = 1.0, 2.0, 64

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        mean, event = self.mean(work, data, seed)
        return replace(reply, each={"mean": mean}, releases=[*reply.releases, replace(event, what=("mean",))])

    def part(self, example: Tensor) -> Tensor:
        return clipped(example.clone(), self.clip)[0]

    def normal(self, work: Work, rows: ClientData, seed: int) -> np.ndarray:
        return work.noise.call("mean", *rows.columns).stream().standard_normal(self.numbers)

    def mean(self, work: Work, rows: ClientData, seed: int) -> tuple[Tensor, Release]:
        total = torch.stack([self.part(example) for example in rows.x.flatten(1)]).sum(0)
        noisy = total + self.noise * torch.from_numpy(self.normal(work, rows, seed)).float()
        return noisy / len(rows), Release(mechanism=SAMPLED_GAUSSIAN, sigma=2.0, sensitivity=1.0, steps=1)


class NoisySumOfItsOwn(NoisyMean):
    """The same by a ``NoisySum``."""

    times = 1

    def mean(self, work: Work, rows: ClientData, seed: int) -> tuple[Tensor, Release]:
        total = NoisySum(torch.zeros(64), 1.0)
        for example in [*rows.x.flatten(1)] * self.times:
            total.add(self.part(example), 1.0)
        total.blur(self.noise, work.noise.call("mean", *rows.columns).stream())
        return total.values / len(rows), replace(total.release, sigma=2.0)


class LessNoise(NoisyMean):
    noise = 1.9


class DoesNotClip(NoisyMean):
    def part(self, example: Tensor) -> Tensor:
        return example.nan_to_num()


class ClipsHalves(NoisyMean):
    def part(self, example: Tensor) -> Tensor:
        return torch.cat([clipped(half.clone(), 1.0)[0] for half in example.chunk(2)])


class OneNumberOfNoise(NoisyMean):
    numbers = 1


class NoiseOfItsOwn(NoisyMean):
    def normal(self, work: Work, rows: ClientData, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(64)


class DrawsItsNoiseAgain(NoisyMean):
    """And subtracts it."""

    def mean(self, work: Work, rows: ClientData, seed: int) -> tuple[Tensor, Release]:
        draws, total = work.noise.call("mean", *rows.columns), NoisySum(torch.zeros(64), 1.0)
        for example in rows.x.flatten(1):
            total.add(self.part(example), 1.0)
        total.blur(2.0, draws.stream())
        return total.values - 2.0 * torch.from_numpy(draws.stream().standard_normal(64)).float(), total.release


class SendsItBeforeTheNoise(NoisyMean):
    def mean(self, work: Work, rows: ClientData, seed: int) -> tuple[Tensor, Release]:
        total = NoisySum(torch.zeros(64), 1.0)
        for example in rows.x.flatten(1):
            total.add(self.part(example), 1.0)
        bare = total.values.clone()
        total.blur(2.0, work.noise.call("mean", *rows.columns).stream())
        return bare, total.release


class OneDrawForTwo(NoisyMean):
    """The same noise on the sum and on its half: together they tell the noise."""

    def mean(self, work: Work, rows: ClientData, seed: int) -> tuple[Tensor, Release]:
        total = torch.stack([self.part(example) for example in rows.x.flatten(1)]).sum(0)
        noise = torch.from_numpy(self.normal(work, rows, seed)).float()
        both = torch.stack([total + 2 * noise, total / 2 + 2 * noise])
        return both, Release(mechanism=SAMPLED_GAUSSIAN, sigma=1.5, sensitivity=1.0, steps=1)


class ClipsByTheData(NoisySumOfItsOwn):
    """At the largest norm that there is."""

    def mean(self, work: Work, rows: ClientData, seed: int) -> tuple[Tensor, Release]:
        largest = float(rows.x.flatten(1).nan_to_num().norm(dim=1).max())
        total = NoisySum(torch.zeros(64), largest)
        for example in rows.x.flatten(1):
            total.add(*clipped(example.clone(), largest))
        total.blur(2.0, work.noise.call("mean", *rows.columns).stream())
        return total.values / len(rows), total.release


class SumWithLessNoise(NoisySumOfItsOwn):
    noise = 1.9


class SumThatIsNotClipped(NoisySumOfItsOwn, DoesNotClip):
    pass


class SumsEachTwice(NoisySumOfItsOwn):
    times = 2


class SharesMeans(FedAvg):
    """Shares the mean of its examples before round 1, with noise by the seed, and calls its sensitivity 1/n."""

    clip = 1.0

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        means, events = [], []
        for client, rows in enumerate(clients):
            n = len(rows)
            total = torch.stack([clipped(x.clone(), self.clip)[0] for x in rows.x]).sum(0)
            noise = torch.randn(total.shape, generator=torch.Generator().manual_seed(seed))
            means.append((total + 2 * noise) / n)
            events.append(
                Release(client, ("means",), mechanism=SAMPLED_GAUSSIAN, sigma=2.0, sensitivity=1 / n, steps=1)
            )
        return Common(Examples(torch.stack(means), torch.zeros(len(means))), 0, events)


class SharesLongMeans(SharesMeans):
    clip = 3.0


TOLD = {
    LessNoise: "what left moves by",
    DoesNotClip: "what left moves by",
    ClipsHalves: "what left moves by",
    OneNumberOfNoise: "mean: 64 numbers move .* only 1 of noise were drawn",
    NoiseOfItsOwn: "mean moves by .* no noise of its own hides it",
    DrawsItsNoiseAgain: "the stream of mean, call 2 is opened twice",
    SendsItBeforeTheNoise: "mean moves by .* no noise of its own hides it",
    OneDrawForTwo: "mean: 128 numbers move .* only 64 of noise were drawn",
    ClipsByTheData: "the noisy sum of mean, call 2 has other clipping or noise",
    SumWithLessNoise: "what left moves by",
    SumThatIsNotClipped: "the noisy sum of mean, call 2 moves by .*, and declared is 1",
    SumsEachTwice: "the noisy sum of mean, call 2 moves by 2 .*, and declared is 1",
    SharesLongMeans: "before round 1: what left moves by",
}
"""What is told of each false claim."""


@pytest.mark.parametrize("plant", TOLD)
def test_a_false_claim_is_told(plant: type[Algorithm]) -> None:
    with pytest.raises(AssertionError, match=TOLD[plant]):
        what_leaves_a_client_moves_as_declared(plant(), LOCAL)


@pytest.mark.parametrize("honest", [NoisyMean, NoisySumOfItsOwn, SharesMeans])
def test_what_is_true_is_not_blamed(honest: type[Algorithm]) -> None:
    what_leaves_a_client_moves_as_declared(honest(), LOCAL)


def test_the_documented_method_keeps_its_promises_and_with_less_noise_does_not() -> None:
    page = (Path(__file__).parent.parent / "docs" / "own_parts.md").read_text()
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if block.startswith("# my_private.py")]
    true, false = {}, {}
    exec(text, true)
    exec(text.replace("2.0 * torch", "1.9 * torch"), false)
    check_algorithm(true["FedAvgAndMeans"](), private=True, only=["all_that_is_sent_is_named_by_a_release"])
    with pytest.raises(AssertionError, match=r"what left moves by .* and what is declared of delta, mean lets it move"):
        check_algorithm(false["FedAvgAndMeans"](), private=True, only=["all_that_is_sent_is_named_by_a_release"])
