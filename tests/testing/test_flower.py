"""Flower's own objects through the adapter; the tests run where the package flwr is installed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from foreign_clients import Average, Fitted, FlowerStyle, train
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Algorithm
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, norm, sub
from fedcommons.testing import rate, referee, theirs
from fedcommons.testing.adapters import adapted
from fedcommons.testing.arrays import arrays_of, flat_of
from fedcommons.testing.elsewhere import require_the_same_after_a_stop
from fedcommons.testing.federations import digits
from fedcommons.testing.referee import Claims

flwr = pytest.importorskip("flwr.app")
strategies, of_messages = (pytest.importorskip(f"flwr.{name}.strategy") for name in ("server", "serverapp"))
FEDERATION = digits(linear=True).training(theirs.FULL, "samples")


def fitted(module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int) -> Any:
    """A ``NumPyClient`` with nothing but ``fit``."""
    client = FlowerStyle(module, loss, x, y, rate, epochs, batch_size)

    class Client(pytest.importorskip("flwr.client").NumPyClient):
        def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
            return client.fit(parameters, config)

    return Client()


def app(module: nn.Module, loss: Any, x: Tensor, y: Tensor, batch_size: int) -> Any:
    """A ``ClientApp`` as in Flower's examples, which counts its rounds in the context."""
    result = pytest.importorskip("flwr.clientapp").ClientApp()

    @result.train()
    def fit(msg: Any, context: Any) -> Any:
        module.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        before = context.state["count"]["rounds"] if "count" in context.state else 0
        context.state["count"] = flwr.MetricRecord({"rounds": before + 1})
        context.state["arrays"] = msg.content["arrays"]
        assert before == 0 or context.state["texts"]["text"] == "b" * before
        context.state["texts"] = flwr.ConfigRecord({"text": "b" * (before + 1), "empty": [], "bytes": b"b"})
        train(module, loss, x, y, msg.content["config"]["lr"], context.run_config["local-epochs"], batch_size)
        numbers = {"num-examples": len(y), "rounds": before + 1, "id": context.node_config["partition-id"]}
        numbers["mu"] = msg.content["config"].get("proximal-mu", 0.0)
        records = {"arrays": flwr.ArrayRecord(module.state_dict()), "metrics": flwr.MetricRecord(numbers)}
        return flwr.Message(flwr.RecordDict(records), reply_to=msg)

    return result


def after(algorithm: Algorithm, rounds: int = 3) -> tuple[Flat, Mapping[str, float]]:
    """The model, and the metrics of the last round."""
    now, metrics = FEDERATION.run(algorithm, FEDERATION.plan(rounds))[-1]
    return now.model, metrics


def off(x: Flat, y: Flat) -> float:
    return norm(sub(x, y)) / norm(sub(y, FEDERATION.model))


@pytest.mark.long
def test_a_client_app_is_judged_and_its_state_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(referee, "ROUNDS", 10)
    monkeypatch.setattr(rate, "ROUNDS", 10)
    algorithm = adapted(app, config=CONFIG)
    verdicts = {v.check: v for v in referee.referee(algorithm, Claims((algorithm, FedAvg()), down=1, up=1))}
    assert [v.text for v in verdicts.values() if v.passed is False] == []
    assert verdicts["special case"].passed
    _, metrics = after(algorithm)
    assert (metrics["train/rounds"], metrics["train/id"], metrics["train/num-examples"]) == (3, 2, 12.8)


class Adam(strategies.FedAdam):
    def __init__(self, initial_parameters: Any) -> None:
        super().__init__(initial_parameters=initial_parameters, tau=1e-3)


def of_adam(x: np.ndarray, mean: np.ndarray, replies: Sequence[np.ndarray]) -> np.ndarray:
    """Flower's FedAdam in round 1: both moments start at 0, and beta^(round + 1) corrects their bias."""
    eta = 0.1 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
    return x + eta * 0.1 * (mean - x) / (0.1 * np.abs(mean - x) + 1e-3)


RULES: list[tuple[type, Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray]], np.ndarray]]] = [
    (strategies.FedAvg, lambda x, mean, replies: mean),
    (strategies.FedMedian, lambda x, mean, replies: np.median(replies, 0)),
    (Adam, of_adam),
    (of_messages.FedAvg, lambda x, mean, replies: mean),
    (of_messages.FedMedian, lambda x, mean, replies: np.median(replies, 0)),
    (of_messages.FedAdam, of_adam),
]
CONFIG = {"lr": "rate", "local-epochs": "epochs"}


@pytest.mark.parametrize(("strategy", "rule"), RULES)
def test_flowers_strategies_serve(strategy: type, rule: Callable[..., np.ndarray]) -> None:
    replies: list[list[np.ndarray]] = []

    class Recorded(Average):
        def aggregate_fit(self, server_round: int, results: list[tuple[str, Any]], failures: list) -> Any:
            replies.extend(result.parameters for _, result in results)
            return super().aggregate_fit(server_round, results, failures)

    mean, x = arrays_of(after(adapted(fitted, Recorded), 1)[0]), arrays_of(FEDERATION.model)
    expected = [rule(*values) for values in zip(x, mean, zip(*replies, strict=True), strict=True)]
    assert off(after(adapted(fitted, strategy), 1)[0], flat_of(expected, FEDERATION.model)) < 1e-6


def noisy(kind: Any = of_messages.FedAdam) -> Any:
    return of_messages.DifferentialPrivacyServerSideFixedClipping(kind(), 0.1, 1.0, 3)


MOMENTUM = {"server_learning_rate": 0.5, "server_momentum": 0.9}


def with_momentum(initial_parameters: Any) -> Any:
    """Flower's class needs ``Parameters``, whose values it changes in each round."""
    inner = strategies.FedAvgM(initial_parameters=initial_parameters, **MOMENTUM)
    return strategies.DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, 3)


STATEFUL = [
    (fitted, Adam),
    (fitted, partial(strategies.FedAdam, tau=1e-3)),
    (fitted, with_momentum),
    (app, of_messages.FedAdam),
    (app, noisy),
    (app, partial(noisy, partial(of_messages.FedAvgM, **MOMENTUM))),
]


@pytest.mark.parametrize(("client", "strategy"), STATEFUL)
def test_a_strategy_of_flower_continues_after_a_stop(client: Callable[..., Any], strategy: Any) -> None:
    algorithm = adapted(client, strategy, config=CONFIG)
    require_the_same_after_a_stop(algorithm, FEDERATION, FEDERATION.plan(4, participation=0.6))


class Reporting(FlowerStyle):
    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        arrays, n, _ = super().fit(parameters, config)
        return arrays, n, {name.replace("proximal_mu", "mu"): value for name, value in config.items()}


def by_round(number: int) -> dict[str, Any]:
    return {"step": 2**number, "lr": "rate"}


def test_the_config_of_a_strategy_reaches_its_clients_and_is_counted() -> None:
    """A strategy may choose the config of each client and round; the names of settings stand for their values."""
    prox = partial(strategies.FedProx, proximal_mu=0.5, on_fit_config_fn=by_round)
    _, metrics = after(adapted(Reporting, prox))
    assert (metrics["train/mu"], metrics["train/step"], metrics["train/server_round"]) == (0.5, 8, 3)
    assert metrics["train/lr"] == np.float32(0.1)
    _, metrics = after(adapted(app, partial(of_messages.FedProx, proximal_mu=0.5), config=CONFIG))
    assert (metrics["train/mu"], metrics["server/mu"], metrics["train/rounds"]) == (0.5, 0.5, 3)
    now, _ = FEDERATION.run(adapted(app, of_messages.FedAvg, config=CONFIG), FEDERATION.plan(1))[-1]
    assert (
        now.traffic.down == 5 * FEDERATION.model.buffer.nbytes
    )  # the config has nothing that the adapter does not set


class Halves(of_messages.FedAvg):
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        halved = flwr.ArrayRecord({name: flwr.Array(x.numpy() / 2) for name, x in arrays.items()})
        return super().configure_train(server_round, halved, config, grid)


REFUSED = [
    (partial(of_messages.FedAvg, fraction_train=0.4), r"chooses 2 of 5 clients in round 1.*participation"),
    (partial(strategies.FedAvg, fraction_fit=0.4), r"chooses 2 of 5 clients"),
    (partial(of_messages.FedAvg, min_available_nodes=9), r"waits for more than 5 clients"),
    (partial(strategies.FedAvg, min_available_clients=9), r"waits for more than 5 clients"),
    (partial(of_messages.FedAvg, arrayrecord_key="model"), r"records arrays and config"),
    (Halves, r"other arrays than the server's"),
]


@pytest.mark.parametrize(("strategy", "sentence"), REFUSED)
def test_a_strategy_that_the_adapter_cannot_follow_is_refused_before_training(strategy: Any, sentence: str) -> None:
    with pytest.raises((UserError, ValueError), match=sentence):
        FEDERATION.start(adapted(app, strategy, config=CONFIG), FEDERATION.plan(1))
