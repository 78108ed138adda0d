"""Planted faults in private training, generators and messages: the audit finds each kind, and accuses nothing sound."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from broken_noise import break_noise
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fednova import FedNova
from fedcommons.audits.canaries import Canaries, audit, audit_method
from fedcommons.audits.lower_bound import LowerBound, by_scores, coins
from fedcommons.audits.membership import by_loss
from fedcommons.audits.one_run import Bounded, bound
from fedcommons.config.sections import Data
from fedcommons.core import dp_vectorised
from fedcommons.core.accountants import composed
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.core.dp_sgd import DPSGD, NoisySum, clipped
from fedcommons.core.local import LocalResult, LocalSGD
from fedcommons.core.noise import SEED_ALONE, Draws, Stream
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Receipt, TrainedGenerator, Weights
from fedcommons.generators.private import PrivateDDPM
from fedcommons.runs import inputs
from fedcommons.seeds import numpy_generator, wide_generator
from fedcommons.tensors import Payload, flat, sub

DP = DPSGD(noise_multiplier=2.0, clip=1.5)
LOOP = LocalSGD(1, 100, dp=DP)  # ten steps, q = 1/10: epsilon 0.94
ALL = LocalSGD(1, 1000, dp=DP)  # one step of all: epsilon 2.17


class ClippedPerBatch(DPSGD):
    """One gradient, of the batch's sum, is clipped in the place of its examples' gradients."""

    def gradients(
        self, params: Sequence[nn.Parameter], loss: Callable[[tuple[Tensor, ...], int], Tensor],
        batch: tuple[Tensor, ...], step: int, expected: int, noise: Stream, seeds: Sequence[int] = (),
    ) -> tuple[Tensor, Release]:  # fmt: skip
        value, n = loss(batch, step), len(batch[1])
        g = torch.cat([part.reshape(-1) for part in torch.autograd.grad(value, list(params))])
        total = NoisySum(torch.zeros_like(g), self.clip)
        total.add(*clipped(g * n, self.clip))
        return value.detach(), self.put(total, params, expected, noise)


@dataclass(frozen=True)
class Unclipped(DPSGD):
    """It clips at ``times`` C, and has the noise of C and the statement of C."""

    times: float = 1e6

    def gradients(self, *args: Any, **more: Any) -> tuple[Tensor, Release]:
        value, release = DPSGD(self.noise_multiplier / self.times, self.clip * self.times).gradients(*args, **more)
        return value, replace(release, sensitivity=self.clip, sigma=self.noise_multiplier)


@dataclass(frozen=True)
class OtherBatches(DPSGD):
    rows: Callable[[int, int, Stream], np.ndarray] = lambda n, b, draws: np.arange(n)

    def sample(self, n: int, batch_size: int, draws: Stream) -> Tensor:
        return torch.from_numpy(self.rows(n, batch_size, draws))


@dataclass(frozen=True)
class Restated(LocalSGD):
    """Its trainings state something else."""

    change: Callable[[Release], Release] = lambda release: release

    def run(self, *args: Any, **more: Any) -> LocalResult:
        found = super().run(*args, **more)
        return found._replace(spent=self.change(found.spent))


def batches(rows: Callable[[int, int, Stream], np.ndarray]) -> LocalSGD:
    return replace(LOOP, dp=OtherBatches(2.0, 1.5, rows=rows))


FAULTS: dict[str, tuple[LocalSGD, str]] = {
    "no clipping": (replace(LOOP, dp=Unclipped(2.0, 1.5)), "epsilon is above"),
    "clipping at 4 C": (replace(LOOP, dp=Unclipped(2.0, 1.5, times=4.0)), "one example changes a sum by 4 C"),
    "clipping per batch": (replace(LOOP, dp=ClippedPerBatch(2.0, 1.5)), "one example changes a sum by"),
    "half of q": (Restated(1, 100, dp=DP, change=lambda r: replace(r, q=r.q / 2)), "no independent draws"),
    "one step": (Restated(1, 100, dp=DP, change=lambda r: replace(r, steps=1)), "there are 10 steps, not 1"),
    "batches of fixed size": (batches(lambda n, b, draws: np.argsort(draws.random(n))[:b]), "no independent draws"),
    "all in each batch": (batches(lambda n, b, draws: np.arange(n)), "epsilon is above"),
    "each example twice": (
        batches(lambda n, b, draws: np.repeat(np.flatnonzero(draws.random(n) < b / n / 2), 2)),
        "one example changes a sum by 2 C",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.long
def test_the_audit_finds_faults_of_training(name: str) -> None:
    loop, words = FAULTS[name]
    found = audit(loop, seed=1)
    assert found.reported is not None  # the ledger takes it for private
    assert any(words in fault for fault in found.faults), (found.faults, found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "epsilon is above"),
        ("half", "the noise multiplier is about"),
        ("the same in each step", "epsilon is above"),
        ("the same for each client", "epsilon is above"),
        ("taken back", "the noise multiplier is about"),
    ],
)
@pytest.mark.long
def test_the_audit_finds_faults_of_noise(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_noise(monkeypatch, name)
    found = audit(LOOP, seed=1)
    assert found.reported is not None
    assert any(words in fault for fault in found.faults), (found.faults, found)


@pytest.mark.parametrize("loop", [LOOP, ALL], ids=["q 0.1", "q 1"])
@pytest.mark.long
def test_honest_training_has_no_fault(loop: LocalSGD) -> None:
    for seed in (1, 2) if loop is LOOP else (1,):
        found = audit(loop, seed)
        assert found.faults == []
        assert found.verdict == "not above the reported one"
        assert found.estimate is not None
        assert found.estimate.epsilon < found.estimate.ceiling
        assert found.sensitivity == pytest.approx(1, abs=1e-4)


@pytest.mark.long
def test_a_verdict_goes_by_the_loosest_ceiling_and_the_largest_change_of_a_sum() -> None:
    found = audit(replace(LOOP, batch_size=10), 1, m=40)
    assert found.sensitivity == pytest.approx(1, abs=1e-4)  # an example is in half of the batches
    bounds = {"low": LowerBound(0.0, 3.0, 359, 89, 40), "high": LowerBound(0.0, 12.0, 359, 89, 40)}
    assert replace(found, reported=9.99, bounds=bounds).verdict == "not above the reported one"


# Messages of a method of one's own


@dataclass(frozen=True)
class Histogram(FedAvg):
    """It sends how often each input was there; ``is_named``: as if this were made from the noisy model."""

    is_named: bool = True

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, _, spent = work.local(x, data, seed)
        names = ("delta", "counts") if self.is_named else ("delta",)
        return Reply({"delta": sub(y, x)}, {"counts": data.y.double()}, releases=[spent.of(*names)])


@pytest.mark.long
def test_the_audit_finds_messages_that_are_called_covered() -> None:
    reported, bounds = audit_method(Histogram(), LOOP, seed=1)
    assert reported is not None
    assert max(b.bound for b in bounds.values()) > reported
    assert "above the reported one" in {b.verdict(reported) for b in bounds.values()}


@pytest.mark.long
@pytest.mark.parametrize("method", [FedAvg(), FedNova(), Histogram(is_named=False)], ids=type)
def test_the_messages_of_honest_methods_stay_below_the_reported_epsilon(method: Algorithm) -> None:
    reported, bounds = audit_method(method, LOOP, 1)
    assert reported is not None
    assert {b.verdict(reported) for b in bounds.values()} == {"not above the reported one"}


# One run of what trains generators


def vectorised(dp: DPSGD, seed: int, batch_size: int = 100) -> tuple[float, float]:
    """Return the bound by the weights after an epoch of the steps that train generators, and the reported epsilon."""
    module, inside = Canaries(1000, 10.0), coins(1000, numpy_generator(seed, "coins"))
    columns = [torch.arange(1000).view(-1, 1), torch.from_numpy(inside).float().view(-1, 1)]

    def loss(named: dict[str, Tensor], j: Tensor, there: Tensor) -> Tensor:
        return (10.0 * there * named["w"].gather(0, j)).sum()

    steps = dp_vectorised.steps(
        module, torch.optim.SGD(module.parameters(), 1.0), loss, columns, lambda *_: [], dp, batch_size=batch_size,
        epochs=1, physical_batch=250, noise=Draws(SEED_ALONE, (seed,)),
    )  # fmt: skip
    spent = tuple((r.q, r.sigma, r.steps) for r in steps if r.covered)
    found = by_scores(-module.w.detach().double().numpy(), inside, 250, 1e-5)
    return found.bound, composed(spent, 1e-5)


def test_the_bound_finds_a_fault_of_vectorised_steps_and_accuses_no_honest_ones() -> None:
    found, reported = vectorised(OtherBatches(2.0, 1.5), seed=1)
    assert found > reported > 0
    for seed, batch_size in ((1, 100), (2, 100), (1, 1000)):
        found, reported = vectorised(DP, seed, batch_size)
        assert found < reported


@dataclass(frozen=True)
class Sums:
    """The sum of its images, each of norm C at most, under noise in every epoch: the Gaussian mechanism on all.

    stated: sigma in the receipt. early: the receipt is that of the first epoch.
    """

    sigma: float = 4.0
    epochs: int = 1
    stated: float | None = None
    early: bool = False
    sampling: ClassVar[tuple[str, ...]] = ()

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> dict[int, TrainedGenerator]:
        x = examples.x.flatten(1).double()
        total = (x / x.norm(dim=1, keepdim=True).clamp(min=1)).sum(0)
        noise = torch.stack([
            self.sigma * torch.from_numpy(wide_generator(seed, e).standard_normal(len(total)))
            for e in range(max(epochs))
        ])  # fmt: skip
        return {
            e: TrainedGenerator({"sum": total + noise[:e].mean(0)}, Receipt(
                SAMPLED_GAUSSIAN, 1.0, self.stated or self.sigma, 1.0, 1 if self.early else e))
            for e in epochs
        }  # fmt: skip

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        raise NotImplementedError


def bounded(part: Sums) -> Bounded:
    """Canary j is white in pixel j only; its score is what the trained sum has there."""
    x = 255 * torch.eye(1024, dtype=torch.uint8).view(1024, 1, 32, 32)
    none = Examples(x[:0], torch.zeros(0, dtype=torch.int64))

    def at_its_pixel(generator: object, weights: Weights, images: Examples, n_classes: int, seed: int) -> np.ndarray:
        return (images.x.flatten(1).double() / 255 @ weights["sum"]).numpy()

    return bound(part, none, Examples(x, torch.zeros(1024, dtype=torch.int64)), 1, 0, at_its_pixel, reference=False)


@pytest.mark.parametrize("part", [Sums(sigma=1.0, stated=8.0), Sums(epochs=50, early=True)], ids=["sigma", "steps"])
def test_the_bound_finds_false_receipts(part: Sums) -> None:
    found = bounded(part)
    assert found.reported is not None
    assert found.audited.bound > found.reported
    honest = bounded(replace(part, stated=None, early=False))
    assert honest.reported is not None
    assert 0 < honest.audited.bound < honest.reported


def test_canaries_of_which_none_would_be_guessed_are_refused() -> None:
    digits = inputs.load(Data()).train
    with pytest.raises(ValueError, match=r"at least 4 canaries .* got 3"):
        bound(PrivateDDPM(noise_multiplier=1.0), digits[:9], digits[9:12], 10, 0, by_loss)
