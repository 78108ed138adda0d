"""Faults in private training, generators and messages (25), planted one at a time: ledger or audit finds each.

And what honest code does is never called a fault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.audits.canaries import audit, audit_method
from fedcommons.core import dp_sgd
from fedcommons.core.algorithm import Algorithm, Facts, Message, Replies, Reply, State
from fedcommons.core.dp_sgd import DPSGD, NoisySum
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD, constant
from fedcommons.core.noise import Draws, Stream
from fedcommons.core.release import Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, flat, scale, sub

if TYPE_CHECKING:
    from conftest import Federation

    Digits = Callable[..., Federation]

LOOP = LocalSGD(1, 100, dp=DPSGD(noise_multiplier=2.0, clip=1.5))  # ten steps, q = 1/10: epsilon 0.94
LONG = replace(LOOP, epochs=4)  # epsilon 1.9
EVERYBODY = LocalSGD(1, 1000, dp=DPSGD(noise_multiplier=2.0, clip=1.5))  # one step of all: epsilon 2.17


# --- in local training: the line that is wrong takes the place of the right one


def no_noise(patch: pytest.MonkeyPatch) -> None:
    def blur(self: NoisySum, sigma: float, noise: Stream) -> None:
        self.sigma = sigma

    patch.setattr(NoisySum, "blur", blur)


def a_tenth_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    right = NoisySum.blur

    def blur(self: NoisySum, sigma: float, noise: Stream) -> None:
        right(self, sigma / 10, noise)
        self.sigma = sigma

    patch.setattr(NoisySum, "blur", blur)


def half_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    right = NoisySum.blur

    def blur(self: NoisySum, sigma: float, noise: Stream) -> None:
        right(self, sigma / 2, noise)
        self.sigma = sigma

    patch.setattr(NoisySum, "blur", blur)


def the_same_noise_in_every_step(patch: pytest.MonkeyPatch) -> None:
    right = Draws.stream

    def stream(self: Draws, purpose: str, *key: int) -> Stream:
        if purpose != "noise":
            return right(self, purpose, *key)
        return right(replace(self, given=set()), purpose)  # else it is refused as a stream that has been drawn

    patch.setattr(Draws, "stream", stream)


def the_same_noise_for_every_client(patch: pytest.MonkeyPatch) -> None:
    right = Draws.stream

    def stream(self: Draws, purpose: str, *key: int) -> Stream:
        return right(Draws(self.source) if purpose == "noise" else self, purpose, *key)

    patch.setattr(Draws, "stream", stream)


def noise_that_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    last: list[Tensor] = []
    run = LocalSGD.run

    def anew(*args: Any, **more: Any) -> Any:
        last.clear()
        return run(*args, **more)

    def blur(self: NoisySum, sigma: float, noise: Stream) -> None:
        new = sigma * self.clip * torch.from_numpy(noise.standard_normal(self.values.shape)).to(self.values)
        self.values.add_(new - (last[-1] if last else 0))
        last.append(new)
        self.sigma = sigma

    patch.setattr(LocalSGD, "run", anew)
    patch.setattr(NoisySum, "blur", blur)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dp_sgd, "clipped", lambda g, clip: (g, clip))


def sensitivity_understated(patch: pytest.MonkeyPatch) -> None:
    right = dp_sgd.clipped
    patch.setattr(dp_sgd, "clipped", lambda g, clip: (right(g, 4 * clip)[0], clip))


def _of_the_batch(patch: pytest.MonkeyPatch, mean_first: bool) -> None:
    """One gradient, of the batch's sum or mean, clipped, in the place of its examples' gradients."""

    def gradients(
        self: DPSGD, params: Sequence[nn.Parameter], loss: Callable[[tuple[Tensor, ...], int], Tensor],
        batch: tuple[Tensor, ...], step: int, expected: int, noise: Stream, seeds: Sequence[int],
    ) -> tuple[Tensor, Release]:  # fmt: skip
        value, n = loss(batch, step), len(batch[1])
        g = torch.cat([part.reshape(-1) for part in torch.autograd.grad(value, params)])
        total = NoisySum(torch.zeros_like(g), self.clip)
        total.add(*dp_sgd.clipped(g if mean_first else g * n, self.clip))
        if mean_first:
            total.clip = self.clip / expected  # the noise of a mean
        total.blur(self.noise_multiplier, noise)
        params[0].grad = total.values.div_(1 if mean_first else expected).view_as(params[0])
        return value.detach(), replace(total.release, sensitivity=self.clip, sigma=self.noise_multiplier)

    patch.setattr(DPSGD, "gradients", gradients)


def clipping_per_batch(patch: pytest.MonkeyPatch) -> None:
    _of_the_batch(patch, mean_first=False)


def clipping_after_the_mean(patch: pytest.MonkeyPatch) -> None:
    _of_the_batch(patch, mean_first=True)


def _spent(patch: pytest.MonkeyPatch, change: Callable[[Release], Release]) -> None:
    right = LocalSGD._spent
    patch.setattr(LocalSGD, "_spent", lambda self, *spent: change(right(self, *spent)))


def q_understated(patch: pytest.MonkeyPatch) -> None:
    _spent(patch, lambda r: replace(r, q=r.q / 2))


def steps_undercounted(patch: pytest.MonkeyPatch) -> None:
    _spent(patch, lambda r: replace(r, steps=1))


def _batches(patch: pytest.MonkeyPatch, sample: Callable[[int, int, Stream], np.ndarray]) -> None:
    patch.setattr(DPSGD, "sample", lambda self, n, b, draws: torch.from_numpy(sample(n, min(b, n), draws)))


def batches_of_fixed_size(patch: pytest.MonkeyPatch) -> None:
    _batches(patch, lambda n, b, draws: np.argsort(draws.random(n))[:b])


def everybody_in_every_batch(patch: pytest.MonkeyPatch) -> None:
    _batches(patch, lambda n, b, draws: np.arange(n))


def every_example_twice_in_its_batch(patch: pytest.MonkeyPatch) -> None:
    _batches(patch, lambda n, b, draws: np.repeat(np.flatnonzero(draws.random(n) < b / n / 2), 2))


OF_TRAINING: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no noise": (no_noise, "epsilon is above"),
    "a tenth of the noise": (a_tenth_of_the_noise, "epsilon is above"),
    "half of the noise": (half_of_the_noise, "the noise multiplier is about"),
    "the same noise in every step": (the_same_noise_in_every_step, "epsilon is above"),
    "the same noise for every client": (the_same_noise_for_every_client, "epsilon is above"),
    "noise that is taken back": (noise_that_is_taken_back, "epsilon is above"),
    "no clipping": (no_clipping, "epsilon is above"),
    "clipping per batch": (clipping_per_batch, "one example changes a sum by"),
    "clipping after the mean": (clipping_after_the_mean, "one example changes a sum by"),
    "sensitivity understated": (sensitivity_understated, "one example changes a sum by 4 C"),
    "q understated": (q_understated, "no independent draws"),
    "steps undercounted": (steps_undercounted, "there are 10 steps, not 1"),
    "batches of fixed size": (batches_of_fixed_size, "no independent draws"),
    "everybody in every batch": (everybody_in_every_batch, "epsilon is above"),
    "every example twice": (every_example_twice_in_its_batch, "one example changes a sum by 2 C"),
}


@pytest.mark.parametrize("name", OF_TRAINING)
@pytest.mark.long
def test_the_audit_finds_faults_of_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, said = OF_TRAINING[name]
    plant(monkeypatch)
    found = audit(LONG if plant is noise_that_is_taken_back else LOOP, seed=1)
    assert found.reported is not None  # the ledger takes it for private
    assert any(said in fault for fault in found.faults), (found.faults, found)


# --- in messages: methods of one's own


@dataclass(frozen=True)
class _Sends:
    """FedAvg that sends something more, and may say of it what is not so."""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({"model": state["model"]})

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return {"model": add(flat(state, "model"), flat(total, "delta"), 1 / len(replies))}


@dataclass(frozen=True)
class Histogram(_Sends):
    """It sends how often each input was there; ``said``: as if this were made from the noisy model."""

    said: bool

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, _, spent = work.local(x, data, seed)
        counts = data.y.double()
        names = ("delta", "counts") if self.said else ("delta",)
        return Reply({"delta": sub(y, x)}, {"counts": counts}, releases=[spent.of(*names)])


@dataclass(frozen=True)
class Corrected(_Sends):
    """It adds the mean gradient of its data to those that DP-SGD has noised, and calls the result covered."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, _, spent = work.local(x, data, seed, add_to_grad=constant(work.gradient(x, data)))
        return Reply({"delta": sub(y, x)}, releases=[spent.of("delta")])


@dataclass(frozen=True)
class Weighing(_Sends):
    """Its weight is the share of examples that are there."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, _, spent = work.local(x, data, seed)
        w = 1 + float(data.y.double().mean())
        return Reply({"delta": scale(sub(y, x), w)}, weight=w, releases=[spent.of("delta")])


@pytest.mark.parametrize("method", [Histogram(said=True), Corrected()], ids=["named as covered", "added after noise"])
def test_the_audit_finds_messages_that_are_called_covered(method: Algorithm) -> None:
    reported, bounds = audit_method(method, LOOP, seed=1)
    assert reported is not None
    assert max(b.bound for b in bounds.values()) > reported
    assert "above the reported one" in {b.verdict(reported) for b in bounds.values()}


@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.1), FedNova(), Histogram(said=False)], ids=type)
def test_the_messages_of_honest_methods_stay_below_the_reported_epsilon(method: Algorithm) -> None:
    for seed in (1, 2):
        reported, bounds = audit_method(method, LOOP, seed)
        assert reported is not None
        assert {b.verdict(reported) for b in bounds.values()} == {"not above the reported one"}


@pytest.mark.parametrize("name", ["no statement", "a weight of the data", "BatchNorm", "no noise added", "not clipped"])
def test_the_ledger_finds_what_nobody_protects(name: str, digits: "Digits", monkeypatch: pytest.MonkeyPatch) -> None:
    method, expected = FedAvg(), "delta"
    if name == "no statement":
        method, expected = Histogram(said=False), "counts"
    elif name == "a weight of the data":
        method, expected = Weighing(), "weight"
    elif name == "BatchNorm":
        expected = "buffers"
    elif name == "no noise added":
        monkeypatch.setattr(NoisySum, "blur", lambda *_: None)
    else:
        monkeypatch.setattr(dp_sgd, "clipped", lambda g, clip: (g,))
    federation = digits(batch_norm=name == "BatchNorm").training(LocalSGD(1, 5, dp=DPSGD(1.0, 1.0)))
    plan = federation.plan(1)
    start = replace(federation.start(method, plan), buffers=federation.work().initial_buffers)
    ledger = federation.play(method, plan, start=start)[-1][0].ledger
    assert set(ledger.uncovered) == {expected}
    assert ledger.of_all(0, 1e-5) is None


@pytest.mark.slow
@pytest.mark.parametrize("loop", [LOOP, EVERYBODY], ids=["q 0.1", "q 1"])
def test_half_of_the_noise_is_found_in_20_of_20_seeds(loop: LocalSGD, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound misses it each time, though it could be above what is reported."""
    half_of_the_noise(monkeypatch)
    for seed in range(20):
        found = audit(loop, seed, m=500)
        assert found.verdict == "not above the reported one"
        assert any(fault.startswith("the noise multiplier is about") for fault in found.faults)


# --- and nothing else


@pytest.mark.parametrize("loop", [LOOP, EVERYBODY], ids=["q 0.1", "q 1"])
def test_honest_training_has_no_fault(loop: LocalSGD) -> None:
    for seed in (1, 2) if loop is LOOP else (1,):
        found = audit(loop, seed)
        assert found.faults == []
        assert found.verdict == "not above the reported one"
        assert found.estimate is not None
        assert found.estimate.epsilon < found.estimate.ceiling
        assert found.sensitivity == pytest.approx(1, abs=1e-4)
