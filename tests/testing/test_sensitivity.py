"""The sensitivity test of methods: it finds each kind of false claim, and accuses no true one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Common, Facts, Message, Reply, State
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.flat_tensors import Flat, Payload, copy, data, flat
from fedcommons.privacy.dp_sgd import NoisySum, clipped
from fedcommons.privacy.noise import Draws
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.testing import check_algorithm
from fedcommons.testing.contract import LOCAL
from fedcommons.testing.sensitivity import what_leaves_a_client_moves_as_declared


@dataclass
class Call:
    """A client's call in a round; ``train`` returns FedAvg's reply."""

    work: Work
    x: Flat
    memory: Payload
    rows: ClientData
    round: int
    seed: int

    def train(self, x: Flat | None = None, **how: Any) -> Reply:
        y, _, spent = self.work.local(x or self.x, self.rows, self.seed, **how)
        return Reply({"delta": Flat(y.layout, y.buffer - self.x.buffer)}, releases=[spent.with_names("delta")])

    @property
    def mean(self) -> Tensor:
        return self.rows.x.flatten(1).float().nan_to_num().mean(0)


Act = Callable[[Call], Reply]


@dataclass(frozen=True)
class Planted(FedAvg):
    act: Act = Call.train

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return self.act(Call(work, flat(message.common, "model"), memory, data, round, seed))


def also(call: Call, name: str, value: Tensor, *releases: Release) -> Reply:
    """Return the reply with one more tensor, under these releases or, without any, under that of the training."""
    reply = call.train()
    more = releases or [reply.releases[0].with_names("delta", name)]
    return replace(reply, each={name: value}, releases=[*(reply.releases if releases else []), *more])


def memory_of_the_data(call: Call) -> Reply:
    reply = call.train()
    delta = flat(reply.sums, "delta")
    shift = data(call.memory["mean"]).sum() if call.round == 3 else torch.zeros(())
    return replace(reply, sums={"delta": Flat(delta.layout, delta.buffer + shift)}, memory={"mean": call.mean})


def trains_by_the_data(call: Call) -> Reply:
    twice = bool(call.rows.x.nan_to_num().max() > 1.0)
    return call.train(copy(call.work.local(call.x, call.rows, call.seed).model) if twice else None)


def raises_by_the_data(call: Call) -> Reply:
    if call.rows.x.isnan().any() or call.rows.x.min() < -1:
        raise ValueError("an example is nan")
    return call.train()


def declares(**values: float) -> Act:
    def act(call: Call) -> Reply:
        reply = call.train()
        return replace(reply, releases=[replace(reply.releases[0], **values)])  # pyright: ignore[reportArgumentType]

    return act


# Noise that a method adds itself, to the sum of its clipped examples


def by_hand(level: float = 2.0, numbers: int = 64) -> Act:
    def act(call: Call) -> Reply:
        total = torch.stack([clipped(x.clone(), 1.0)[0] for x in call.rows.x.flatten(1)]).sum(0)
        stream = call.work.noise.call("mean", *call.rows.columns).stream()
        noisy = total + level * torch.from_numpy(stream.standard_normal(numbers)).float()
        event = Release(what=("mean",), mechanism=SAMPLED_GAUSSIAN, sigma=2.0, sensitivity=1.0, steps=1)
        return also(call, "mean", noisy / len(call.rows), event)

    return act


def by_sum(
    noise: Callable[[NoisySum, Draws], Any] = lambda total, draws: total.blur(2.0, draws.stream()),
    clip: Callable[[Tensor], float] = lambda x: 1.0,
) -> Act:
    """Return a method with a ``NoisySum``. noise: what blurs it, and if it is a tensor, what is sent."""

    def act(call: Call) -> Reply:
        x = call.rows.x.flatten(1).nan_to_num()
        total = NoisySum(torch.zeros(64), clip(x))
        for example in x:
            total.add(*clipped(example.clone(), total.clip))
        sent = noise(total, call.work.noise.call("mean", *call.rows.columns))
        event = replace(total.release, what=("mean",), sigma=2.0)
        return also(call, "mean", total.values if sent is None else sent, event)

    return act


def noise_taken_back(total: NoisySum, draws: Draws) -> Tensor:
    total.blur(2.0, draws.stream())
    return total.values - 2.0 * torch.from_numpy(draws.stream().standard_normal(64)).float()


FALSE: dict[str, tuple[Act, str]] = {
    "a mean": (lambda c: also(c, "mean", c.mean), "mean moves by .* multiplier 1 .* no separate noise"),
    "no release": (lambda c: replace(c.train(), each={"mean": c.mean}), "mean moves by .*: no release names it"),
    "weight": (lambda c: replace(c.train(), weight=1.0 + float(c.mean.sum().abs())), "its weight is"),
    "memory": (memory_of_the_data, "round 3, .*: delta moves by"),
    "shape": (lambda c: also(c, "zeros", torch.zeros(int((c.rows.x > 1.0).sum()))), "zeros is torch.float32"),
    "trainings": (trains_by_the_data, "draw .* is .*, and .* with an example blanked out"),
    "an error": (raises_by_the_data, "it raises ValueError"),
    "one step": (declares(steps=1), "moves by 1.73 standard .* move by 1 "),
    "a rare sample": (declares(q=0.05), "client 0 is in the noisy sums of 9 of 12 steps, .*rate 0.05"),
    "less noise of its own": (by_hand(1.9), "all that was sent moves by"),
    "one number of noise": (by_hand(numbers=1), "mean: 64 numbers move .* only 1 of noise"),
    "noise drawn again": (by_sum(noise_taken_back), "stream of mean, call 1 is opened twice"),
    "a sum with another stream": (by_sum(lambda total, draws: total.blur(2.0, np.random.default_rng(0))),
                                  "does not come from a stream"),
    "a sum clipped by the data": (by_sum(clip=lambda x: float(x.norm(dim=1).max())), "other clipping or noise"),
}  # fmt: skip
"""Of each kind of false claim: the client's act, and what the sentence says."""


class StartsWithTheCounts(FedAvg):
    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        assert facts.counts is not None
        return {"model": model, "counts": facts.counts()}


@dataclass(frozen=True)
class SharesMeans(FedAvg):
    """Shares the mean of its clipped examples before round 1 with noise, and calls its sensitivity 1/n."""

    clip: float = 1.0

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        means, events = [], []
        for client, rows in enumerate(clients):
            n = len(rows)
            total = torch.stack([clipped(x.float(), self.clip)[0] for x in rows.x]).sum(0)
            noise = torch.randn(total.shape, generator=torch.Generator().manual_seed(seed))
            means.append((total + 2 * noise) / n)
            event = Release(mechanism=SAMPLED_GAUSSIAN, sigma=2.0, sensitivity=1 / n, steps=1)
            events.append(replace(event, client=client, what=("means",)))
        return Common(Examples(torch.stack(means), torch.zeros(len(means))), 0, events)


PLANTS = {name: (Planted(act), words) for name, (act, words) in FALSE.items()} | {
    "start": (StartsWithTheCounts(), "the server's counts before round 1 depends"),
    "share": (SharesMeans(clip=3.0), "before round 1: all that was sent moves by"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_false_claim_is_found(name: str) -> None:
    method, words = PLANTS[name]
    with pytest.raises(AssertionError, match=words):
        what_leaves_a_client_moves_as_declared(method, LOCAL)


@pytest.mark.parametrize(
    "honest", [Planted(), Planted(by_hand()), Planted(by_sum()), SharesMeans()], ids=["none", "hand", "sum", "share"]
)
def test_a_true_claim_is_not_accused(honest: FedAvg) -> None:
    what_leaves_a_client_moves_as_declared(honest, LOCAL)


def test_the_contract_has_it_where_asked_for() -> None:
    names, plant = ["all_that_is_sent_is_named_by_a_release"], Planted(FALSE["a mean"][0])
    check_algorithm(plant, only=names)
    with pytest.raises(AssertionError, match="what_leaves_a_client_moves_as_declared: round 1"):
        check_algorithm(plant, only=names, private=True)
