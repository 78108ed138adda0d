"""The referee: five faults of rivals' programs, written anew and planted one at a time, and our own methods' claims."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import parts
from fedcommons.core.algorithm import Algorithm, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.executor import Executor
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.tensors import Payload, copy, flat, scale
from fedcommons.testing import referee
from fedcommons.testing.referee import Claims


def failed(algorithm: Algorithm, claims: Claims = referee.NOTHING) -> dict[str, str]:
    """What the referee finds, by check."""
    return {one.check: one.said for one in referee.referee(algorithm, claims) if one.passed is False}


@pytest.fixture
def claims_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract is tested elsewhere, for every method."""
    monkeypatch.setattr(referee, "CHECKS", {})


# Faults that were seen in programs of others, each in a method that is otherwise right


@dataclass(frozen=True)
class Unweighted(FedAvg):
    """FedLab, issue 305: clients weigh alike, whatever they are to weigh by."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        return weighted_reply(x, work.local(x, data, seed), 1.0)


@dataclass(frozen=True)
class WithoutGradient(FedDyn):
    """FedLab's FedDyn: the regulariser is computed from ``param.data``, so it adds nothing to the gradient."""

    def regularise(self, params: Mapping[str, nn.Parameter], *tensors: Mapping[str, Tensor]) -> None:
        """Adds nothing."""


@dataclass(frozen=True)
class WeightsForVariates(SCAFFOLD):
    """Flower's baseline: in its first round a client's zero control variate is overwritten by the model's weights."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        return super().client(
            work, message, memory or {"control": copy(flat(message.common, "model"))}, data, round, seed
        )


@dataclass(frozen=True)
class Aliased(FedAvg):
    """The last local model is kept without a copy, so the next client's training overwrites it."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        trained = work.local(x, data, seed)
        return weighted_reply(x, trained, work.weight(data), {"previous": trained.model})


@dataclass(frozen=True)
class Boasting(FedAvg):
    """Twice the noise is declared that was drawn."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        return replace(reply, releases=[replace(event, sigma=2 * event.sigma) for event in reply.releases])


@pytest.mark.long
def test_clients_that_are_not_weighed_are_found_by_the_special_case(claims_only: None) -> None:
    found = failed(Unweighted(), Claims(special_case=(Unweighted(), FedAvg())))
    assert [*found] == ["special case"]
    assert "where clients weigh by their examples" in found["special case"]


@pytest.mark.long
@pytest.mark.parametrize(("right", "wrong"), [(FedDyn(1.0), WithoutGradient(1.0)), (SCAFFOLD(), WeightsForVariates())])
def test_a_correction_that_is_wrong_is_found_where_clients_differ(
    right: Algorithm, wrong: Algorithm, claims_only: None
) -> None:
    assert not failed(right, Claims(exact=True))
    assert "exact" in failed(wrong, Claims(exact=True))


@pytest.mark.long
def test_what_is_not_a_copy_is_found_by_the_contract() -> None:
    assert "what a client returned is not the workers buffer" in failed(Aliased())


@pytest.mark.long
def test_noise_that_is_declared_and_was_not_drawn_is_found_by_neighbouring_data(claims_only: None) -> None:
    assert not failed(FedAvg(), Claims(private=True))
    assert "sensitivity" in failed(Boasting(), Claims(private=True))


@pytest.mark.long
def test_models_that_travel_are_counted(claims_only: None) -> None:
    assert not failed(SCAFFOLD(), Claims(down=2, up=2))
    assert failed(SCAFFOLD(), Claims(down=1, up=2))["models"].endswith("claimed: it receives 1")


@dataclass(frozen=True)
class Later(FedAvg):
    """What it does wrong, it does after ``rounds`` rounds only."""

    what: str = "raises"
    rounds: int = 10

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        if round <= self.rounds:
            return reply
        if self.what == "raises":
            raise RuntimeError("| <b> too\nlate \x1b[31m")
        if self.what == "halves":
            return replace(reply, sums={name: scale(flat(reply.sums, name), 0.5) for name in reply.sums})
        return replace(reply, each={"model": copy(flat(message.common, "model"))})

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        if self.what == "leaves":
            raise SystemExit(0)
        return super().merge(executor, state, total, replies, round, seed)


@pytest.mark.parametrize(
    ("method", "claims", "check"),
    [
        (Later(), Claims(exact=True), "exact"),
        (Later("leaves"), Claims(exact=True), "exact"),
        (FedAvg(), Claims(exact=True), "exact"),
        (Later("halves", 2), Claims((Later("halves", 2), FedAvg())), "special case"),
        (Later("sends more", 0), Claims(up=1), "models"),
        (Later("sends more", 0), Claims(private=True), "covered"),
    ],
)
@pytest.mark.long
def test_claims_that_only_look_true_are_found(method: Algorithm, claims: Claims, check: str, claims_only: None) -> None:
    assert check in failed(method, claims)


def test_what_is_said_fits_into_a_line(claims_only: None) -> None:
    assert failed(Later(rounds=0), Claims(exact=True))["exact"].isprintable()


FEW = ("the_loss_falls", "clients_with_one_sample_take_part", "all_that_is_sent_is_named_by_a_release")
"""Of the contract, each half a second at most for any method."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(referee, "CHECKS", {name: referee.CHECKS[name] for name in FEW})


OURS: Mapping[str, Claims] = {
    "fedavg": Claims(private=True, rate=True, down=1, up=1),
    "fedprox": Claims((FedProx(mu=0.0), FedAvg()), down=1, up=1),
    "scaffold": Claims(exact=True, down=2, up=2),
    "fedpvr": Claims((FedPVR(layers=""), FedAvg())),
    "feddyn": Claims(down=1, up=1),
    "fednova": Claims(down=1, up=1),
    "moon": Claims((MOON(mu=0.0), FedAvg()), down=1, up=1),
    "fedmix": Claims((FedMix(mix=0.0), FedAvg()), down=1, up=1),
    "fedvae": Claims(down=1, up=1),
    "feddpms": Claims(),
    "gradient_coding": Claims(down=1, up=1),
    "feddm": Claims(down=1),
}
"""The twelve, with what their papers say of them."""


def test_ours_are_the_first_twelve_that_a_user_sees() -> None:
    assert [*OURS] == [*parts.KINDS["algorithm"].known][:12]


@pytest.mark.parametrize("name", OURS)
def test_our_own_methods_pass_a_few_checks(name: str, quick: Callable[[str], Algorithm], few: None) -> None:
    """Verdicts come one by one, so no more is played than these."""
    verdicts = islice(referee.referee(quick(name)), len(FEW))
    assert {one.check: one.word for one in verdicts} == {check.replace("_", " "): "pass" for check in FEW}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.long
def test_our_own_methods_pass_all(name: str, quick: Callable[[str], Algorithm]) -> None:
    verdicts = [*referee.referee(quick(name), OURS[name])]
    assert [one for one in verdicts if one.passed is False] == []
    assert sum(one.passed is True for one in verdicts) >= len(referee.CHECKS)


@dataclass(frozen=True)
class Unfinished(FedAvg):
    """Its server does not work at all."""

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        raise NotImplementedError("not written yet")


def test_a_method_that_does_not_work_fails_whatever_it_claims(few: None) -> None:
    verdicts = [*islice(referee.referee(Unfinished()), len(FEW))]
    assert [one.word for one in verdicts] == ["FAIL"] * len(FEW)
    assert all("not written yet" in one.said for one in verdicts)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad", "fedproto", "fedgen", "fedcvae"])
@pytest.mark.long
def test_an_honest_method_that_claims_nothing_is_not_accused(
    name: str, quick: Callable[[str], Algorithm], few: None
) -> None:
    """It passes what all promise, and what was not claimed is told, whatever it is."""
    verdicts = [*referee.referee(quick(name))]
    assert [one.passed for one in verdicts[: len(FEW)]] == [True] * len(FEW)
    told = {one.check: one.passed for one in verdicts[len(FEW) :]}
    assert told == dict.fromkeys(["clients that are alike", "rate", "models"])


@pytest.mark.parametrize("method", [FedDyn(1.0), FedPVR(layers="*"), SCAFFOLD(option=1)])
@pytest.mark.long
def test_those_that_correct_drift_are_exact(method: Algorithm, claims_only: None) -> None:
    assert failed(method, Claims(exact=True)) == {}


# The command


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("referee")


@pytest.mark.long
def test_the_command_writes_a_page_and_ends_with_1_where_something_fails(
    script: ModuleType, tmp_path: Path, claims_only: None
) -> None:
    argv = ["fedprox", "--constants", "mu=0.1", "--no-row", "--down", "1", "--out", str(tmp_path / "out")]
    assert script.referee([*argv, "--special-case", "mu=0 is fedavg"]) == 0
    assert re.search(
        r"\| special case +\| pass +\| the same, up to rounding +\|", (tmp_path / "out" / "referee.md").read_text()
    )
    assert script.referee([*argv, "--special-case", "mu=1 is fedavg"]) == 1
    assert '<tr class="FAIL"><td>special case</td>' in (tmp_path / "out" / "referee.html").read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name a method"),
        (["fedprx"], "did you mean 'fedprox'"),
        (["fedprox", "--constants", "nu=1"], "unknown option '--fedprox.nu'"),
        (["fedprox", "--constants", "mu=a"], "fedprox.mu takes float"),
        (["fedprox", "--constants", "mu='1"], "cannot be read"),
        (["fedprox", "--constants", "mu"], "name=value"),
        (["fedprox", "--constants", "mu=-1"], "fedprox.mu must lie in"),
        (["fedprox", "--special-case", "mu=0"], '"name=value is METHOD"'),
        (["fedprox", "--up", "-1"], "--up must lie in"),
    ],
)
def test_bad_input_is_said_in_a_sentence(argv: list[str], said: str, script: ModuleType) -> None:
    with pytest.raises(UserError, match=said):
        script.referee([*argv, *(["--no-row"] if argv else [])])
