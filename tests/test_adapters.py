"""Clients of other frameworks, written anew in their forms without these, and faults planted in them."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import cli
from fedcommons.errors import UserError
from fedcommons.testing import referee, theirs
from fedcommons.testing.adapters import Adapted, Result, adapted
from fedcommons.testing.referee import Claims, Verdict

Loss = Callable[[Tensor, Tensor], Tensor]


def train(module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int) -> None:
    """SGD, as anybody writes it."""
    optimizer = torch.optim.SGD(module.parameters(), rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(batch_size):
            optimizer.zero_grad()
            loss(module(x[rows]), y[rows]).backward()
            optimizer.step()


class FlowerStyle:
    """The tutorial's client: parameters are those of the state."""

    def __init__(
        self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int
    ) -> None:
        self.net, self.n = module, len(y)
        self.train = partial(train, module, loss, x, y, rate, epochs, batch_size)

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:
        return [value.cpu().numpy() for value in self.net.state_dict().values()]

    def set_parameters(self, parameters: Iterable[np.ndarray]) -> None:
        pairs = zip(self.net.state_dict(), parameters, strict=True)
        self.net.load_state_dict({name: torch.tensor(value) for name, value in pairs})

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        self.set_parameters(parameters)
        self.train()
        return self.get_parameters({}), self.n, {}


class FlowerProximal(FlowerStyle):
    """FedProx: the loss has (mu/2) ||w - w_0||^2 besides. It takes no loss: cross entropy is written into it."""

    def __init__(
        self, module: nn.Module, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int, mu: float = 0.1
    ) -> None:
        super().__init__(module, self.loss, x, y, rate, epochs, batch_size)
        self.mu = mu

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.net.parameters(), self.anchor, strict=True)
        return nn.functional.cross_entropy(outputs, y) + self.mu / 2 * sum((w - a).square().sum() for w, a in pairs)

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        self.anchor = [torch.tensor(value) for value in parameters]
        return super().fit(parameters, config)


class FlowerLoops:
    """By autograd alone, without an optimizer or batches, and with draws of its own seed."""

    def __init__(
        self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, seed: int
    ) -> None:
        self.net, self.loss, self.x, self.y, self.rate, self.epochs, self.seed = module, loss, x, y, rate, epochs, seed

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:
        return [w.detach().numpy() for w in self.net.parameters()]

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        weights = [*self.net.parameters()]
        with torch.no_grad():
            for w, value in zip(weights, parameters, strict=True):
                w.copy_(torch.from_numpy(value))
        for epoch in range(self.epochs):
            rows = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(self.seed % 2**32 + epoch))
            slopes = torch.autograd.grad(self.loss(self.net(self.x[rows]), self.y[rows]), weights)
            with torch.no_grad():
                for w, slope in zip(weights, slopes, strict=True):
                    w -= self.rate * slope
        return self.get_parameters({}), len(self.y), {}


class PFLlibStyle:
    """clientAVG: it is built with ``args``, an id and numbers of examples, and reads its data itself."""

    def __init__(self, args: SimpleNamespace, id: int, train_samples: int, test_samples: int) -> None:
        self.args, self.model, self.id, self.train_samples = args, args.model, id, train_samples

    def set_parameters(self, model: nn.Module) -> None:
        for new, old in zip(model.parameters(), self.model.parameters(), strict=True):
            old.data = new.data.clone()

    def train(self) -> None:
        a = self.args
        train(self.model, a.loss, a.x, a.y, a.rate, a.epochs, a.batch_size)


def pfllib(
    kind: type[PFLlibStyle],
    module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int,
) -> PFLlibStyle:  # fmt: skip
    args = SimpleNamespace(model=module, loss=loss, x=x, y=y, rate=rate, epochs=epochs, batch_size=batch_size)
    return kind(args, 0, len(y), 0)


class PFLlibOwnData(PFLlibStyle):
    """Its number of examples is the length of its data."""

    def __init__(self, args: SimpleNamespace, id: int, train_samples: int, test_samples: int) -> None:
        self.args, self.model, self.data = args, args.model, [*zip(args.x, args.y, strict=True)]


class Average:
    """FedAvg's server, as a strategy."""

    def weights(self, results: list[tuple[str, Result]]) -> list[float]:
        return [float(result.num_examples) for _, result in results]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[str, Result]], failures: list
    ) -> tuple[list[np.ndarray] | None, dict]:
        if not results:
            return None, {}
        weights = self.weights(results)
        return [np.average(x, 0, weights) for x in zip(*(r.parameters for _, r in results), strict=True)], {}


RIGHT = {
    "Flower": (FlowerStyle, None),
    "Flower, with a strategy": (FlowerStyle, Average),
    "Flower, by autograd alone": (FlowerLoops, None),
    "PFLlib": (partial(pfllib, PFLlibStyle), None),
    "PFLlib, with its data": (partial(pfllib, PFLlibOwnData), None),
}


# Faults, each in a client that is otherwise right


class CountsBatches(FlowerStyle):
    """``len(trainloader)`` for ``len(trainloader.dataset)``: the number of batches."""

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        return super().fit(parameters, config)[0], 1, {}


class Unweighted(Average):
    """Clients weigh alike."""

    def weights(self, results: list[tuple[str, Result]]) -> list[float]:
        return [1.0 for _ in results]


class Keeps(FlowerStyle):
    """One model for all clients, which is begun with the first one's."""

    net_of_all: nn.Module | None = None

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        if Keeps.net_of_all is None:
            self.set_parameters(parameters)
            Keeps.net_of_all = self.net
        self.net.load_state_dict(Keeps.net_of_all.state_dict())
        self.train()
        Keeps.net_of_all = self.net
        return self.get_parameters({}), self.n, {}


class KeepsMomentum(FlowerStyle):
    """The step of the last client is made once more by the next: an optimizer that outlives its client."""

    last: tuple[np.ndarray, ...] = ()

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        found, n, metrics = super().fit(parameters, config)
        before, KeepsMomentum.last = KeepsMomentum.last, tuple(y - x for x, y in zip(parameters, found, strict=True))
        same = len(before) == len(found) and all(a.shape == b.shape for a, b in zip(before, found, strict=True))
        return [y + 0.5 * b for y, b in zip(found, before, strict=True)] if same else found, n, metrics


class WrongSign(FlowerStyle):
    """x - y for y - x."""

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        found, n, metrics = super().fit(parameters, config)
        return [x - (y - x) for x, y in zip(parameters, found, strict=True)], n, metrics


class Stale(PFLlibStyle):
    """The parameters that come are not loaded."""

    def set_parameters(self, model: nn.Module) -> None:
        """Forgotten."""


FAULTS = {
    "weights": (CountsBatches, None, "it counts its examples", "a client of 9 examples says it has 1"),
    "alike": (FlowerStyle, Unweighted, "special case", "where clients weigh by their examples"),
    "keeps": (Keeps, None, "no client shows in the next", "something is kept"),
    "momentum": (KeepsMomentum, None, "no client shows in the next", "something is kept"),
    "sign": (WrongSign, None, "its training lowers its loss", "with the wrong sign"),
    "stale": (partial(pfllib, Stale), None, "it begins at the weights that it is given", "stale ones"),
}


def judged(method: Adapted, claims: Claims | None = None) -> dict[str, Verdict]:
    claims = claims or Claims((method, FedAvg()), down=1, up=1)
    return {one.check: one for one in referee.referee(method, claims)}


def judged_until(check: str, method: Adapted) -> dict[str, Verdict]:
    """The verdicts to this one, so that least squares, which take seconds, are left out."""
    found: dict[str, Verdict] = {}
    verdicts = referee.referee(method, Claims((method, FedAvg())))
    while check not in found:
        found |= {(one := next(verdicts)).check: one}
    return found


def failed(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    return {check: one.said for check, one in verdicts.items() if one.passed is False}


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_fedavg_of_another_form_passes(name: str) -> None:
    verdicts = judged_until("special case", adapted(*RIGHT[name]))
    assert failed(verdicts) == {}
    assert verdicts["special case"].passed


@pytest.mark.long
def test_what_cannot_be_judged_is_said() -> None:
    verdicts = judged(adapted(FlowerStyle))
    assert failed(verdicts) == {}
    assert verdicts["models"].passed
    for what in theirs.NOT_JUDGED:
        assert verdicts[what].passed is None
        assert verdicts[what].said.startswith("not judged: ")


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_told(fault: str) -> None:
    build, strategy, check, said = FAULTS[fault]
    assert said in failed(judged_until(check, adapted(build, strategy)))[check]


@pytest.mark.long
def test_a_constant_is_passed_and_what_has_no_loss_is_not_asked_for_least_squares() -> None:
    special = adapted(FlowerProximal, constants={"mu": 0.0}), FedAvg()
    verdicts = judged(adapted(FlowerProximal), Claims(special, exact=True))
    assert failed(verdicts) == {}
    assert "takes no loss=" in verdicts["least squares"].said
    assert "special case" in failed(judged(adapted(FlowerProximal), Claims((adapted(FlowerProximal), FedAvg()))))


@pytest.mark.long
def test_fedavg_of_another_form_is_not_exact_where_clients_differ() -> None:
    verdicts = judged(adapted(FlowerStyle), Claims(exact=True, rate=True))
    assert [*failed(verdicts)] == ["exact", "linear"]
    assert verdicts["rate"].passed


def test_a_strategy_keeps_its_state_within_a_run_and_begins_anew_in_the_next(digits: Callable[..., Any]) -> None:
    """With momentum 1 at the server a run's second round goes on with the first one's step."""

    class Momentum(Average):
        def __init__(self) -> None:
            self.rounds: list[int] = []

        def aggregate_fit(
            self, server_round: int, results: list, failures: list
        ) -> tuple[list[np.ndarray] | None, dict]:
            self.rounds.append(server_round)
            return super().aggregate_fit(server_round, results, failures)

    federation, method = digits(linear=True), adapted(FlowerStyle, Momentum)
    for _ in range(2):
        federation.play(method, federation.plan(2))
        assert method.server[0].rounds == [1, 2]


class Neither:
    """A class that has half of an interface."""

    def fit(self, x: Tensor) -> None:
        """Something else."""


class AsksForMore(FlowerStyle):
    def __init__(self, module: nn.Module, loader: object) -> None:
        """It does not get that."""


@pytest.mark.parametrize(
    ("build", "more", "said"),
    [
        (Neither, {}, "Flower's NumPyClient (get_parameters, fit), PFLlib's (set_parameters, train)"),
        (lambda module: Neither(), {}, "none of the interfaces that are known: ours (start, down, client, merge)"),
        (AsksForMore, {}, "asks for loader"),
        (FlowerStyle, {"constants": {"mu": 1.0}}, "takes no constant 'mu'"),
        (FlowerStyle, {"strategy": Neither}, "has no aggregate_fit"),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(build: Any, more: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        adapted(build, **more)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# The command


@pytest.fixture
def their(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """This file, in the folder of a command."""
    (tmp_path / "their.py").write_text(Path(__file__).read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    return "their.py"


def test_the_command_refuses_what_it_does_not_know(sweeps: Callable[[str], ModuleType], their: str) -> None:
    command = sweeps("referee").referee
    with pytest.raises(UserError, match=r"none of the interfaces that are known: ours .*Flower's .*PFLlib's"):
        command([f"{their}:Neither"])
    with pytest.raises(UserError, match="takes no constant 'nu'"):
        command([f"{their}:FlowerProximal", "--constants", "nu=1"])


BAD = {
    "their.py:Neither": "none of the interfaces",
    "their.py:AsksForMore": "asks for loader",
    "their.py:FlowerStile": "did you mean 'FlowerStyle'",
    "their.py:FlowerStyle --strategy their.py:Neither": "has no aggregate_fit",
    "their.py:FlowerStyle --strategy nowhere.py:Server": "there is no file",
    "their.py:FlowerStyle --constants mu=1": "takes no constant 'mu'",
    "their.py:FlowerStyle --rate=perhaps": "--rate takes true or false",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_ends_with_2_and_one_sentence(
    line: str, sweeps: Callable[[str], ModuleType], their: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(lambda _: sweeps("referee").referee(line.split()), resumes=False) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert BAD[line] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("resumes", [True, False])
def test_ctrl_c_advises_resume_only_where_there_is_such_an_option(
    resumes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in (
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device"), 1),
        (BrokenPipeError(), 1),
    ):

        def fail(_: object, error: BaseException = error) -> int:
            raise error

        assert cli._run(fail, resumes) == code
        assert ("--resume" in capsys.readouterr().err) is resumes


@pytest.mark.long
def test_the_command_judges_a_client_of_another_form(
    sweeps: Callable[[str], ModuleType], their: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And plays its row of table 1."""
    monkeypatch.setattr(theirs, "CHECKS", {})
    script = sweeps("referee")
    monkeypatch.setattr(script, "ROW", {**script.ROW, "federation.rounds": 2})
    argv = [f"{their}:FlowerProximal", "--strategy", f"{their}:Average", "--constants", "mu=0.1", "--down", "1"]
    assert script.referee([*argv, "--special-case", "mu=0.0 is fedavg", "--out", "out"]) == 0
    assert script.referee([*argv, "--special-case", "is fedavg", "--out", "again", "--no-row"]) == 1
    assert "flowerproximal" in (told := Path("out/referee.md").read_text(encoding="utf-8"))
    assert "% after 2 rounds" in told
    assert Path("again/referee.html").is_file()
