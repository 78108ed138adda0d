"""Planted faults in private training and messages: the audit finds each kind, and accuses nothing sound."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from broken_noise import break_noise
from torch import Tensor

from fedcommons import Algorithm, ClientData, Message, Payload, Release, Reply, Work, flat, sub
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.audits.canaries import audit, audit_method
from fedcommons.core.local_training import LocalResult, LocalSGD
from fedcommons.privacy.dp_sgd import DPSGD

DP = DPSGD(noise_multiplier=2.0, clip=1.5)
LOOP = LocalSGD(1, 100, dp=DP)  # ten steps, q = 1/10: epsilon 0.94
ALL = LocalSGD(1, 1000, dp=DP)  # one step of all: epsilon 2.17


@dataclass(frozen=True)
class Unclipped(DPSGD):
    """It clips at ``times`` C, and has the noise of C and the statement of C."""

    times: float = 1e6

    def gradients(self, *args: Any, **more: Any) -> tuple[Tensor, Release]:
        value, release = DPSGD(self.noise_multiplier / self.times, self.clip * self.times).gradients(*args, **more)
        return value, replace(release, sensitivity=self.clip, sigma=self.noise_multiplier)


@dataclass(frozen=True)
class Restated(LocalSGD):
    """Its trainings state something else."""

    change: Callable[[Release], Release] = lambda release: release

    def run(self, *args: Any, **more: Any) -> LocalResult:
        result = super().run(*args, **more)
        return result._replace(spent=self.change(result.spent))


FAULTS: dict[str, tuple[LocalSGD, str]] = {
    "no clipping": (replace(LOOP, dp=Unclipped(2.0, 1.5)), "epsilon is above"),
    "clipping at 4 C": (replace(LOOP, dp=Unclipped(2.0, 1.5, times=4.0)), "one example changes a sum by 4 C"),
    "half of q": (Restated(1, 100, dp=DP, change=lambda r: replace(r, q=r.q / 2)), "not independent draws"),
    "one step": (Restated(1, 100, dp=DP, change=lambda r: replace(r, steps=1)), "there are 10 steps, not 1"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.long
def test_the_audit_finds_faults_of_training(name: str) -> None:
    loop, words = FAULTS[name]
    result = audit(loop, seed=1)
    assert result.reported is not None  # the ledger takes it for private
    assert any(words in fault for fault in result.faults), (result.faults, result)


@pytest.mark.parametrize(
    ("name", "words"),
    [("none", "epsilon is above"), ("half", "the noise multiplier is about"),
     ("the same in each step", "the noise multiplier is about"), ("the same for each client", "epsilon is above")],
)  # fmt: skip
@pytest.mark.long
def test_the_audit_finds_faults_of_noise(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_noise(monkeypatch, name)
    result = audit(LOOP, seed=1)
    assert result.reported is not None
    assert any(words in fault for fault in result.faults), (result.faults, result)


@pytest.mark.parametrize("loop", [LOOP, ALL], ids=["q 0.1", "q 1"])
@pytest.mark.long
def test_honest_training_has_no_fault(loop: LocalSGD) -> None:
    result = audit(loop, 1)
    assert result.faults == []
    assert result.verdict == "not above the reported one"
    assert result.estimate is not None
    assert result.estimate.epsilon < result.estimate.ceiling
    assert result.sensitivity == pytest.approx(1, abs=1e-4)


# Messages of a method of one's own


@dataclass(frozen=True)
class Histogram(FedAvg):
    """It sends how often each input was there, as if this were made from the noisy model."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        y, _, spent = work.local(x, data, seed)
        return Reply({"delta": sub(y, x)}, {"counts": data.y.double()}, releases=[spent.with_names("delta", "counts")])


@pytest.mark.long
@pytest.mark.parametrize("method", [FedAvg(), Histogram()], ids=type)
def test_the_audit_finds_only_messages_that_are_falsely_called_covered(method: Algorithm) -> None:
    reported, bounds = audit_method(method, LOOP, seed=1)
    assert reported is not None
    verdicts = {bound.verdict(reported) for bound in bounds.values()}
    assert ("above the reported one" in verdicts) == isinstance(method, Histogram)
    assert "cannot tell" not in verdicts
