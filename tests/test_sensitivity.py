"""The sensitivity test of methods: each false claim is told in a sentence, and no method of the package is blamed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Algorithm, Facts, Message, Reply, State
from fedcommons.core.release import Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, copy, data, flat, scale
from fedcommons.testing import check_algorithm
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared

ONE = ["all_that_is_sent_is_named_by_a_release"]
"""A check of the contract that all methods here pass."""


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
    RateOfTheData: "the noisy sum of local training, call 1, noise [1-3] moves by",
    LossOfAllData: "the noisy sum of local training, call 1, noise 0 moves by .*, and declared is 1",
    GradientOfTheData: "delta moves by|the noisy sum of local training, call 1, noise 1",
    CarriesItInMemory: "round 3, .*: delta moves by",
    CarriesItInTheModule: "seen moves by",
    CarriesItInTheClass: "seen moves by",
    ShapeOfTheData: "zeros is torch.float32",
    TrainsByTheData: "draw .* is .*, and .* with an example blanked out",
    DividesByTheData: "delta moves by",
    RaisesByTheData: "it raises ValueError",
    ReleaseOfTheData: "it declares delta with .* 0.9, .* instead of delta with .* 1, ",
    TrainsTwice: "what left moves by 2.45 standard deviations .* lets it move by 2 ",
    DeclaresOneStep: "what left moves by 1.73 standard deviations .* lets it move by 1 ",
    DeclaresMoreNoise: "what left moves by 1.41 standard deviations .* lets it move by 1.29",
    DeclaresARareSample: "an example of client 0 is in 9 noisy sums of 12 steps, and the rate declared is 0.05",
    StartsWithTheCounts: "the server's counts before round 1 follows",
}  # fmt: skip
"""What is told of each false claim."""


@pytest.mark.parametrize("plant", TOLD)
def test_a_false_claim_is_told(plant: type[Algorithm]) -> None:
    with pytest.raises(AssertionError, match=TOLD[plant]):
        what_leaves_a_client_moves_as_declared(plant(), LOCAL)


def test_the_contract_has_it_where_asked_for() -> None:
    check_algorithm(SendsTheMean(), only=ONE)
    with pytest.raises(AssertionError, match=r"fails 1 of 2 checks\n- what_leaves_a_client_moves_as_declared: round 1"):
        check_algorithm(SendsTheMean(), only=ONE, private=True)


def test_what_is_true_is_not_blamed() -> None:
    what_leaves_a_client_moves_as_declared(Honest(), LOCAL)
