"""Clients of other frameworks: right ones pass, planted faults are detected, draws follow the seed of the run."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from foreign_clients import (
    Average,
    Configured,
    ControlServer,
    Fitted,
    FlowerProximal,
    FlowerScaffold,
    FlowerStyle,
    KeepsLast,
    Seeding,
    train,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedper import FedPer
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.algorithm import Facts, Message, require_attributes
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, flat, norm, select, sub
from fedcommons.testing import rate, referee, theirs
from fedcommons.testing.adapters import Adapted, adapted
from fedcommons.testing.elsewhere import require_the_same_after_a_stop
from fedcommons.testing.federations import digits
from fedcommons.testing.referee import Claims, Verdict


class SeededByUs(FlowerStyle):
    """It orders its examples by the seed that it takes."""

    def __init__(self, module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float, epochs: int, seed: int) -> None:
        rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed % 2**32))
        super().__init__(module, loss, x[rows], y[rows], rate, epochs, batch_size=1000)


RIGHT = {
    "Flower, with a strategy": (FlowerStyle, Average),
    "Flower, with our seed": (SeededByUs, None),
    "Flower, with config": (Configured, None, {}, {"lr": "rate", "local-epochs": "epochs"}),
    "PFLlib": (Seeding, None),
}


class Miscounts(FlowerStyle):
    """It returns the number of batches, not of examples."""

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        return super().fit(parameters, config)[0], 1, {}


class WrongSign(FlowerStyle):
    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        after, n, metrics = super().fit(parameters, config)
        return [x - (y - x) for x, y in zip(parameters, after, strict=True)], n, metrics


class Unmoved(FlowerStyle):
    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        return parameters, self.n, {}


def drops_incomplete_batches(
    module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int
) -> FlowerStyle:
    return FlowerStyle(module, loss, x, y, rate, epochs if len(y) >= batch_size else 0, batch_size)


def with_another(epochs: int = 2, is_sum: bool = False, n: int = 0, **options: Any) -> Callable[..., FlowerStyle]:
    """A function that builds a client whose training differs from FedAvg's."""

    def build(module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float, batch_size: int) -> FlowerStyle:
        client = FlowerStyle(module, loss, x, y, rate, epochs, batch_size)
        summed = (lambda outputs, y: len(y) * loss(outputs, y)) if is_sum else loss
        client.train = partial(train, module, summed, x, y, rate, epochs, batch_size, **options)
        client.n = n or client.n
        return client

    return build


SUSPECTS: dict[str, dict[str, Any]] = {
    "difference: momentum 0.9": {"momentum": 0.9},
    "zero_grad": {"momentum": 1.0},  # the same steps
    "decay 0.0005": {"weight_decay": 5e-4},
    "difference: 1 instead of 2 epochs": {"epochs": 1},
    "difference: 3 instead of 2 epochs": {"epochs": 3},
    "difference: the sum": {"is_sum": True},
    "difference: equal weights": {"n": 1},
    "none of these": {"momentum": 0.7},
}


class Stale(Seeding):
    def set_parameters(self, model: nn.Module) -> None:
        """Keep the old weights."""


FAULTS = {
    "weights": (Miscounts, None, "it counts its examples", "a client of 9 examples reports 1 examples"),
    "sign": (WrongSign, None, "its training lowers its loss", "with the wrong sign"),
    "unmoved": (Unmoved, None, "its training lowers its loss", "weights that it received"),
    "no batch": (drops_incomplete_batches, None, "its training lowers its loss", "incomplete batch"),
    "stale": (Stale, None, "it begins at the weights that it is given", "does not begin at the weights"),
}


def _failed(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    return {check: verdict.text for check, verdict in verdicts.items() if verdict.passed is False}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(referee, "ROUNDS", 20)
    monkeypatch.setattr(rate, "ROUNDS", 20)


def judged(method: Adapted, claims: Claims | None = None, until: str = "") -> dict[str, Verdict]:
    """Return the verdicts up to the check ``until``."""
    result: dict[str, Verdict] = {}
    for verdict in referee.referee(method, claims or Claims((method, FedAvg()), down=1, up=1)):
        result[verdict.check] = verdict
        if verdict.check == until:
            break
    return result


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_fedavg_of_another_form_passes(name: str) -> None:
    verdicts = judged(adapted(*RIGHT[name]), until="special case")
    assert _failed(verdicts) == {}
    assert verdicts["special case"].passed


def test_the_refusal_of_batch_norm_names_the_users_client() -> None:
    with pytest.raises(UserError, match=r"foreign_clients\.py:FlowerStyle .*BatchNorm"):
        require_attributes(adapted(FlowerStyle), nn.Sequential(nn.BatchNorm1d(2)))


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected(fault: str) -> None:
    build, strategy, check, difference = FAULTS[fault]
    assert difference in _failed(judged(adapted(build, strategy), until=check))[check]


@pytest.mark.long
@pytest.mark.parametrize("difference", SUSPECTS)
def test_the_difference_to_the_special_case_is_named(difference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "CHECKS", {})
    verdicts = judged(adapted(with_another(**SUSPECTS[difference])), until="special case")
    assert difference in _failed(verdicts)["special case"]


class AsksForASetting(FlowerStyle):
    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        self.train.keywords["epochs"] = config["local-epochs"]
        return super().fit(parameters, config)


def test_an_error_of_all_checks_is_one_failure_and_an_unmoved_client_is_judged_once() -> None:
    verdicts = judged(adapted(AsksForASetting))
    ((_, text),) = _failed(verdicts).items()
    assert "'local-epochs'" in text
    assert sum("same error as in the check" in verdict.text for verdict in verdicts.values()) >= len(theirs.CHECKS)
    unmoved = judged(adapted(Unmoved), until="no client shows in the next")
    assert "wrong sign" not in _failed(unmoved)["its training lowers its loss"]
    assert unmoved["no client shows in the next"].passed is None


@pytest.mark.long
def test_checks_that_cannot_judge_foreign_clients_are_reported_as_not_judged() -> None:
    verdicts = judged(adapted(FlowerStyle), Claims((adapted(FlowerStyle), FedAvg()), rate=True, down=1, up=1))
    assert _failed(verdicts) == {}
    assert all(verdicts[what].passed for what in ("special case", "rate", "models"))
    assert all(verdicts[what].passed is None for what in theirs.NOT_JUDGED)


@pytest.mark.long
def test_a_constant_is_passed_and_a_client_without_loss_is_not_asked_for_least_squares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(theirs, "CHECKS", {})
    proximal, special = adapted(FlowerProximal), adapted(FlowerProximal, constants={"mu": 0.0})
    verdicts = judged(proximal, Claims((special, FedAvg()), exact=True))
    assert _failed(verdicts) == {}
    assert "takes no loss=" in verdicts["least squares"].text
    wrong = judged(proximal, Claims((proximal, FedAvg()), down=1, up=2), "models")
    assert [*_failed(wrong)] == ["special case", "models"]
    assert [*_failed(judged(proximal, Claims(down=2, up=1), "models"))] == ["models"]


class Drawing(Seeding):
    """It seeds all that it draws from when it is built, and records what it draws in its training."""

    draws: ClassVar[list[list[float]]] = []

    def __init__(self, module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float, epochs: int) -> None:
        super().__init__(module, loss, x, y, rate, epochs, batch_size=4)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        self.of_torch, self.of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.of_python = random.Random(0)
        self.loader = DataLoader(self.data, shuffle=True, generator=torch.Generator().manual_seed(0))  # pyright: ignore

    def train(self) -> None:
        super().train()
        of_torch = [torch.rand(1, generator=source).item() for source in (None, self.of_torch, self.loader.generator)]
        of_numpy = [np.random.rand(), self.of_numpy.random()]  # noqa: NPY002
        self.draws.append([*of_torch, *of_numpy, random.random(), self.of_python.random()])


@pytest.mark.long
def test_a_clients_and_a_strategys_attributes_stay_between_rounds_and_in_checkpoints() -> None:
    """So SCAFFOLD in Flower's form equals ours, also with absent clients, and after a stop."""
    federation, scaffold = digits(linear=True).training(theirs.FULL, "samples"), adapted(FlowerScaffold, ControlServer)
    verdicts = judged(scaffold, Claims((scaffold, SCAFFOLD()), down=2, up=2), until="models")
    assert _failed(verdicts) == {}
    assert verdicts["special case"].passed
    require_the_same_after_a_stop(scaffold, federation, federation.plan(4, participation=0.6))


@pytest.mark.long
def test_a_personal_layer_stays_with_a_client_and_is_not_called_a_fault() -> None:
    """PFLlib's personalised clients keep layers of ``model``; so such a client of FedPer equals ours."""
    federation, foreign = digits().training(theirs.FULL, "samples"), adapted(KeepsLast, constants={"n": 2})
    plan = federation.plan(4, participation=0.6)
    (a, _), (b, _) = (federation.run(method, plan)[-1] for method in (foreign, FedPer("network.last")))
    shared = flat(b.state, "shared")
    moved = norm(sub(shared, select(federation.model, shared.layout.names)))
    assert norm(sub(select(a.model, shared.layout.names), shared)) <= 1e-5 * moved
    require_the_same_after_a_stop(foreign, federation, plan)
    verdicts = judged(adapted(KeepsLast), until="no client shows in the next")
    assert _failed(verdicts) == {}
    begins = verdicts["it begins at the weights that it is given"]
    assert begins.passed is None
    assert "network.last.bias" in begins.text


def test_metrics_of_clients_and_of_a_strategy_are_recorded() -> None:
    federation, config = digits(linear=True), {"lr": 0.1, "local-epochs": 1}
    algorithm = adapted(Configured, config=config)
    assert federation.run(algorithm, federation.plan(1))[-1][1]["train/skill"] == np.mean([9, 16, 12, 20, 7]) / 2
    algorithm = adapted(FlowerScaffold, ControlServer)
    assert federation.run(algorithm, federation.plan(1))[-1][1]["server/skill"] == 0.5


class SeedsInTraining(Seeding):
    def train(self) -> None:
        torch.manual_seed(0)
        super().train()


class RandomWeights(Average):
    """It weighs clients by numbers that it drew when it was built."""

    def __init__(self) -> None:
        self.numbers = np.random.rand(2).tolist()  # noqa: NPY002


def test_a_client_that_seeds_when_it_is_built_draws_other_numbers_for_each_seed() -> None:
    Drawing.draws.clear()
    federation, algorithm = digits(linear=True), adapted(Drawing)
    message, data = Message({"model": federation.model}), federation.data.clients[0]
    for seed in (1, 2, 1):
        algorithm.client(federation.work(), message, {}, data, 1, seed)
    first, other, again = Drawing.draws
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_strategy_is_built_with_the_seed_of_the_run() -> None:
    """Also where the run goes on in another process."""
    facts, model, numbers = Facts(2, [1, 1], rounds=3), digits(linear=True).model, []
    for seed in (1, 2, 1):
        np.random.seed(len(numbers))  # noqa: NPY002
        algorithm = adapted(Seeding, RandomWeights)
        without_values = Flat(model.layout, model.buffer.to("meta"))  # as a check before a run starts it
        adapted(Seeding, ControlServer).start(without_values, facts, seed)
        state = algorithm.start(model, facts, seed)
        numbers.append(algorithm.server and algorithm.server.strategy.numbers)
        other = adapted(Seeding, RandomWeights)  # as in another process
        other.merge(SimpleNamespace(), state, {}, {}, 3, seed=99)  # pyright: ignore[reportArgumentType]
        assert other.server
        assert other.server.strategy.numbers == numbers[-1]
    assert numbers[0] == numbers[2] != numbers[1]


def test_a_client_that_seeds_while_it_trains_is_detected() -> None:
    check = theirs.CHECKS["it_draws_anew_in_each_round"]
    check(adapted(Seeding), theirs.FULL)
    with pytest.raises(AssertionError, match="seeds torch's generator"):
        check(adapted(SeedsInTraining), theirs.FULL)
