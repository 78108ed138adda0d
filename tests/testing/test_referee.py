"""The referee: false claims and a planted fault of another program fail, true claims of our own methods pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbuff import FedBuff
from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.core.client_worker import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Payload, copy, flat, scale
from fedcommons.testing import rate, referee, theirs
from fedcommons.testing.referee import Claims

FOREIGN = Path(__file__).parents[1] / "helpers" / "foreign_clients.py"


def failed(algorithm: Algorithm, claims: Claims = referee.NOTHING, until: str = "") -> dict[str, str]:
    """Return the failed checks with their reasons; ``until``: the last check, as least squares take time."""
    result: dict[str, str] = {}
    for verdict in referee.referee(algorithm, claims):
        result |= {verdict.check: verdict.text} if verdict.passed is False else {}
        if verdict.check == until:
            break
    return result


@pytest.fixture
def claims_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract is tested in test_every_algorithm.py; a fraction of the rounds suffices here."""
    monkeypatch.setattr(referee, "CHECKS", {})
    monkeypatch.setattr(referee, "ROUNDS", 80)
    monkeypatch.setattr(rate, "ROUNDS", 50)


@dataclass(frozen=True)
class Changed(FedAvg):
    """FedAvg whose client replies are changed after round ``rounds``."""

    change: Callable[[Reply, Message], Reply]
    rounds: int = 0

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        return reply if round <= self.rounds else self.change(reply, message)


def _fail(reply: Reply, message: Message) -> Reply:
    raise RuntimeError("| <b> too\nlate \x1b[31m")


UNWEIGHTED = Changed(
    lambda r, _: replace(r, sums={name: scale(flat(r.sums, name), 1 / r.weight) for name in r.sums}, weight=1.0)
)
"""FedLab, issue 305: clients weigh alike, whatever they are to weigh by."""


def _boast(reply: Reply, message: Message) -> Reply:
    """Declare twice the noise that was drawn, and send a model that no release covers."""
    releases = [replace(event, sigma=2 * event.sigma) for event in reply.releases]
    return replace(reply, each={"model": copy(flat(message.common, "model"))}, releases=releases)


@pytest.mark.long
def test_a_false_claim_fails(claims_only: None) -> None:
    assert failed(UNWEIGHTED, Claims((UNWEIGHTED, FedAvg())), "special case")["special case"].isprintable()
    assert failed(Changed(_fail, 10), Claims(exact=True), "exact")["exact"].isprintable()
    assert "labels of this data set are not classes" in failed(FedDM(), Claims(exact=True), "exact")["exact"]
    assert {"exact", "linear"} <= failed(FedAvg(), Claims(exact=True), "linear").keys()
    assert {"sensitivity", "covered"} <= failed(Changed(_boast), Claims(private=True), "covered").keys()


@pytest.mark.long
def test_true_claims_of_our_methods_pass(claims_only: None) -> None:
    special = (FedProx(mu=0.0), FedAvg())
    assert failed(FedAvg(), Claims(special, private=True, rate=True, down=1, up=1)) == {}
    assert failed(SCAFFOLD(), Claims(exact=True, down=2, up=2)) == {}
    assert failed(FedBuff(), Claims((FedBuff(5, 5, refill="step"), FedAvg())), "special case") == {}


@pytest.mark.long
def test_the_contract_fails_a_method_that_does_not_work_and_what_is_not_claimed_is_not_judged() -> None:
    verdicts = [*referee.referee(Changed(_fail))]
    assert [verdict.word for verdict in verdicts if "too late" in verdict.text] == ["FAIL"]
    assert sum("same error as in the check" in verdict.text for verdict in verdicts) > 5
    assert {verdict.check for verdict in verdicts if verdict.passed is None} >= {"rate", "models"}


@pytest.fixture(scope="module")
def script(sweeps: Callable[[str], ModuleType]) -> ModuleType:
    return sweeps("referee")


@pytest.mark.long
def test_the_command_writes_a_page_and_ends_with_1_where_a_check_fails(
    script: ModuleType, tmp_path: Path, claims_only: None
) -> None:
    argv = ["fedprox", "--constants", "mu=0.1", "--no-row", "--down", "1", "--out", str(tmp_path / "out")]
    assert script.referee([*argv, "--special-case", "mu=1 is fedavg"]) == 1
    assert "| special case" in (tmp_path / "out" / "referee.md").read_text()
    assert '<tr class="FAIL"><td>special case</td>' in (tmp_path / "out" / "referee.html").read_text()


@pytest.mark.long
def test_the_command_judges_a_client_of_another_form_and_runs_its_row(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, "CHECKS", {})
    fewer = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 500}
    monkeypatch.setattr(script, "ROW", {**script.ROW, **fewer})
    monkeypatch.chdir(tmp_path)
    argv = [f"{FOREIGN}:FlowerProximal", "--strategy", f"{FOREIGN}:Average", "--constants", "mu=0.1", "--down", "1"]
    assert script.referee([*argv, "--special-case", "mu=0.0 is fedavg", "--out", "out"]) == 0
    argv = [f"{FOREIGN}:Configured", "--fit-config", "lr=rate local-epochs=epochs", "--special-case", "is fedavg"]
    assert script.referee([*argv, "--out", "out"]) == 0
    assert "% after 2 rounds" in Path("out/referee.md").read_text(encoding="utf-8")
    assert Path("out/referee.html").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [("", "name a method"), ("fedprx", "did you mean 'fedprox'"),
     ("fedprox --constants nu=1", "unknown option '--fedprox.nu'"), ("fedprox --constants mu", "name=value"),
     ("fedprox --special-case mu=0", "is METHOD"),
     ("fedprox --strategy their.py:Average", "--strategy needs a client of Flower's form"),
     ("fedprox --fit-config lr=1", "--fit-config needs a client of Flower's form"),
     ("their.py:FlowerProximal --constants nu=1", "takes no constant 'nu'"),
     ("their.py:Neither", "none of the interfaces"), ("their.py:AsksForMore", "asks for loader"),
     ("their.py:FlowerStyle --strategy their.py:Neither", "neither aggregate_fit nor aggregate_train")],
)  # fmt: skip
def test_bad_input_is_refused(
    argv: str, message: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("their.py").write_text(FOREIGN.read_text(), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        script.referee(argv.split())
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"their.py"}
