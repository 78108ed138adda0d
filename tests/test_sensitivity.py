"""The sensitivity test of methods: each false claim is told in a sentence, and no method of the package is blamed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Algorithm, Common, Facts, Message, Reply, State
from fedcommons.core.dp_sgd import NoisySum, clipped
from fedcommons.core.local import Work
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.tensors import Flat, Payload, copy, data, flat, scale
from fedcommons.testing import check_algorithm
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared

CHECK = "what_leaves_a_client_moves_as_declared"


def mean_of(rows: ClientData) -> Tensor:
    return rows.x.flatten(1).float().nan_to_num().mean(0)


class Honest(FedAvg):
    """FedAvg, and a part that a plant is put into."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return self.reply(work, flat(message.common, "model"), memory, data, round, seed)

    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **how: Any) -> Reply:
        y, metrics, spent = work.local(x, rows, seed, **how)
        delta = Flat(y.layout, y.buffer - x.buffer)
        return Reply({"delta": delta}, metrics=metrics, releases=[spent.of("delta")])


def also(reply: Reply, name: str, value: Tensor, *releases: Release) -> Reply:
    """The reply with one more tensor, under these releases or, without any, under that of the training."""
    more = releases or [reply.releases[0].of("delta", name)]
    return replace(reply, each={**reply.each, name: value}, releases=[*(reply.releases if releases else []), *more])


class SendsTheMean(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        return also(super().reply(work, x, memory, rows, *rest), "mean", mean_of(rows))


class SendsTheSigns(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        return also(super().reply(work, x, memory, rows, *rest), "signs", (rows.x > 1.0).flatten(1).any(0))


class SendsTheLabels(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        return also(super().reply(work, x, memory, rows, *rest), "counts", torch.bincount(rows.y, minlength=10))


class SendsWithoutARelease(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        return replace(super().reply(work, x, memory, rows, *rest), each={"mean": mean_of(rows)})


class WeighsByTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        return replace(super().reply(work, x, memory, rows, *rest), weight=1.0 + float(mean_of(rows).sum().abs()))


class StartsAtTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        return super().reply(work, Flat(x.layout, x.buffer + mean_of(rows).sum()), memory, rows, *rest)


class RateOfTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        lr = 0.1 / (1 + float(mean_of(rows).norm()))
        return super().reply(work, x, memory, rows, round, seed, lr=lr)


class LossOfAllData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        middle = mean_of(rows).view(1, 1, 8, 8)

        def loss(batch: tuple[Tensor, ...], step: int) -> Tensor:
            return work.module.training_step((batch[0] - middle, *batch[1:]), step)  # pyright: ignore

        return super().reply(work, x, memory, rows, round, seed, loss=loss)


class GradientOfTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        def add_to_grad(params: Mapping[str, nn.Parameter]) -> None:
            for p in params.values():
                assert p.grad is not None
                p.grad.add_(1e-3 * mean_of(rows).sum())

        return super().reply(work, x, memory, rows, round, seed, add_to_grad=add_to_grad)


class CarriesItInMemory(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, *rest: Any) -> Reply:
        reply = super().reply(work, x, memory, rows, round, *rest)
        delta = flat(reply.sums, "delta")
        shift = data(memory["mean"]).sum() if round == 3 else torch.zeros(())
        sums = {"delta": Flat(delta.layout, delta.buffer + shift)}
        return replace(reply, sums=sums, memory={"mean": mean_of(rows)})


class CarriesItInTheModule(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        before = getattr(work.module, "seen", torch.zeros(64))
        work.module.seen = mean_of(rows)
        return also(super().reply(work, x, memory, rows, *rest), "seen", before)


class CarriesItInTheClass(Honest):
    seen: ClassVar[list[Tensor]] = [torch.zeros(64)]

    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        self.seen.append(mean_of(rows))
        return also(super().reply(work, x, memory, rows, *rest), "seen", self.seen[-2])


class ShapeOfTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        n = int((rows.x > 1.0).sum())
        return also(super().reply(work, x, memory, rows, *rest), "zeros", torch.zeros(n))


class TrainsByTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        if rows.x.nan_to_num().max() > 1.0:
            x = copy(work.local(x, rows, seed).model)
        return super().reply(work, x, memory, rows, round, seed)


class DividesByTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        reply = super().reply(work, x, memory, rows, *rest)
        n = int((rows.x.flatten(1).nan_to_num().norm(dim=1) > 10).sum()) + 1
        return replace(reply, sums={"delta": scale(flat(reply.sums, "delta"), 1 / n)})


class RaisesByTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        if rows.x.isnan().any() or rows.x.min() < -1:
            raise ValueError(f"an example is {rows.x.min()}")
        return super().reply(work, x, memory, rows, *rest)


class ReleaseOfTheData(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        reply = super().reply(work, x, memory, rows, *rest)
        sigma = 1.0 if rows.x.nan_to_num().max() > 1.0 else 0.9
        return replace(reply, releases=[replace(reply.releases[0], sigma=sigma)])


class TrainsTwice(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        x = copy(work.local(x, rows, 1).model)
        return super().reply(work, x, memory, rows, *rest)


class DeclaresOneStep(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        reply = super().reply(work, x, memory, rows, *rest)
        return replace(reply, releases=[replace(reply.releases[0], steps=1)])


class DeclaresMoreNoise(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        reply = super().reply(work, x, memory, rows, *rest)
        return replace(reply, releases=[replace(reply.releases[0], sigma=1.1)])


class DeclaresARareSample(Honest):
    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, *rest: Any) -> Reply:
        reply = super().reply(work, x, memory, rows, *rest)
        return replace(reply, releases=[replace(reply.releases[0], q=0.05)])


class NoisyMean(Honest):
    """Sends the mean of its examples too, clipped to norm 1 and with noise of its own. What follows is false of it."""

    clip, noise, numbers = 1.0, 2.0, 64

    def part(self, example: Tensor) -> Tensor:
        return clipped(example.clone(), self.clip)[0]

    def normal(self, work: Work, rows: ClientData, seed: int) -> np.ndarray:
        return work.noise.call("mean", *rows.columns).stream().standard_normal(self.numbers)

    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        total = torch.stack([self.part(example) for example in rows.x.flatten(1)]).sum(0)
        noisy = total + self.noise * torch.from_numpy(self.normal(work, rows, seed)).float()
        event = Release(what=("mean",), mechanism=SAMPLED_GAUSSIAN, sigma=2.0, sensitivity=1.0, steps=1)
        return also(super().reply(work, x, memory, rows, round, seed), "mean", noisy / len(rows), event)


class NoisySumOfItsOwn(NoisyMean):
    """The same by a ``NoisySum``."""

    times = 1

    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        total = NoisySum(torch.zeros(64), 1.0)
        for example in [*rows.x.flatten(1)] * self.times:
            total.add(self.part(example), 1.0)
        total.blur(self.noise, work.noise.call("mean", *rows.columns).stream())
        event = replace(total.release, what=("mean",), sigma=2.0)
        return also(Honest.reply(self, work, x, memory, rows, round, seed), "mean", total.values / len(rows), event)


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


class DrawsItsNoiseAgain(NoisySumOfItsOwn):
    """And subtracts it."""

    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        draws = work.noise.call("mean", *rows.columns)
        total = NoisySum(torch.zeros(64), 1.0)
        for example in rows.x.flatten(1):
            total.add(self.part(example), 1.0)
        total.blur(2.0, draws.stream())
        bare = total.values - 2.0 * torch.from_numpy(draws.stream().standard_normal(64)).float()
        event = replace(total.release, what=("mean",))
        return also(Honest.reply(self, work, x, memory, rows, round, seed), "mean", bare, event)


class ClipsByTheData(NoisySumOfItsOwn):
    """At the largest norm that there is."""

    def reply(self, work: Work, x: Flat, memory: Payload, rows: ClientData, round: int, seed: int, **_: Any) -> Reply:
        largest = float(rows.x.flatten(1).nan_to_num().norm(dim=1).max())
        total = NoisySum(torch.zeros(64), largest)
        for example in rows.x.flatten(1):
            total.add(*clipped(example.clone(), largest))
        total.blur(2.0, work.noise.call("mean", *rows.columns).stream())
        event = replace(total.release, what=("mean",))
        return also(Honest.reply(self, work, x, memory, rows, round, seed), "mean", total.values / len(rows), event)


class SumWithLessNoise(NoisySumOfItsOwn):
    noise = 1.9


class SumThatIsNotClipped(NoisySumOfItsOwn, DoesNotClip):
    pass


class SumsEachTwice(NoisySumOfItsOwn):
    times = 2


class SharesMeans(Honest):
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


class StartsWithTheCounts(Honest):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        assert facts.counts is not None
        return {"model": model, "counts": facts.counts()}


TOLD = {
    SendsTheMean: "mean moves by .* noise multiplier 1 with sensitivity 1, and no noise of its own hides it",
    SendsTheSigns: "signs moves by",
    SendsTheLabels: "counts moves by .* label replaced",
    SendsWithoutARelease: "mean moves by .*: no release names it",
    WeighsByTheData: "its weight is",
    StartsAtTheData: "the noisy sum of local training .* moves by|delta moves by",
    RateOfTheData: "the noisy sum of local training, call 1, noise 1 moves by",
    LossOfAllData: "the noisy sum of local training, call 1, noise 0 moves by .*, and declared is 1",
    GradientOfTheData: "delta moves by|the noisy sum of local training, call 1, noise 1",
    CarriesItInMemory: "round 3, .*: delta moves by",
    CarriesItInTheModule: "seen moves by",
    CarriesItInTheClass: "seen moves by",
    ShapeOfTheData: "zeros is torch.float32",
    TrainsByTheData: "draw .* is .*, and .* with an example blanked out",
    DividesByTheData: "delta moves by",
    RaisesByTheData: "it raises ValueError",
    ReleaseOfTheData: "it declares other releases",
    TrainsTwice: "what left moves by 2 standard deviations .* lets it move by 1.41",
    DeclaresOneStep: "what left moves by 1.41 standard deviations .* lets it move by 1",
    DeclaresMoreNoise: "what left moves by 1.41 standard deviations .* lets it move by 1.29",
    DeclaresARareSample: "an example of client 2 is in 6 noisy sums of 6 steps, and the rate declared is 0.05",
    LessNoise: "what left moves by",
    DoesNotClip: "what left moves by",
    ClipsHalves: "what left moves by",
    OneNumberOfNoise: "mean: 64 numbers move .* only 1 of noise were drawn",
    NoiseOfItsOwn: "mean moves by .* no noise of its own hides it",
    DrawsItsNoiseAgain: "the stream of mean, call 1 is opened twice",
    ClipsByTheData: "the noisy sum of mean, call 1 has other clipping or noise",
    SumWithLessNoise: "what left moves by",
    SumThatIsNotClipped: "the noisy sum of mean, call 1 moves by .*, and declared is 1",
    SumsEachTwice: "the noisy sum of mean, call 1 moves by 2 .*, and declared is 1",
    SharesLongMeans: "before round 1: what left moves by",
    StartsWithTheCounts: "the server's counts before round 1 follows",
}  # fmt: skip
"""What is told of each false claim."""


@pytest.mark.parametrize("plant", TOLD)
def test_a_false_claim_is_told(plant: type[Algorithm]) -> None:
    with pytest.raises(AssertionError, match=TOLD[plant]):
        what_leaves_a_client_moves_as_declared(plant(), LOCAL)


def test_the_contract_has_it_where_asked_for() -> None:
    only = ["all_that_is_sent_is_named_by_a_release"]
    check_algorithm(SendsTheMean(), only=only)
    with pytest.raises(AssertionError, match=r"fails 1 of 2 checks\n- what_leaves_a_client_moves_as_declared: round 1"):
        check_algorithm(SendsTheMean(), only=only, private=True)


@pytest.mark.parametrize("honest", [Honest, NoisyMean, NoisySumOfItsOwn, SharesMeans])
def test_what_is_true_is_not_blamed(honest: Callable[[], Algorithm]) -> None:
    what_leaves_a_client_moves_as_declared(honest(), LOCAL)


def test_the_documented_method_keeps_its_promises_and_with_less_noise_does_not() -> None:
    page = (Path(__file__).parent.parent / "docs" / "own_parts.md").read_text()
    (text,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if block.startswith("# my_private.py")]
    exec(text, {"__name__": "__main__"})
    with pytest.raises(AssertionError, match="what left moves by .* and what is declared of delta, mean lets it move"):
        exec(text.replace("2.0 * torch", "1.9 * torch"), {"__name__": "__main__"})
