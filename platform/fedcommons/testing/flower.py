"""Objects of Flower, made from arrays and numbers; the package flwr is imported only for objects of its classes."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from fedcommons.errors import UserError, name_of

PATIENCE = 5
"""Maximum number of requests for the nodes in a round. A strategy with too few nodes asks again each second."""


def is_flowers(kind: type) -> bool:
    """Return whether a class is Flower's or is derived from a class of Flower."""
    return any(base.__module__.split(".")[0] == "flwr" for base in kind.__mro__)


def build_with_weights(build: Callable[..., Any], arrays: Sequence[np.ndarray]) -> Any:
    """Return the strategy that ``build`` returns for the initial weights.

    A class of Flower gets the weights as ``Parameters``, and another class or a function gets a list of arrays. If this
    call raises an error or returns a strategy of Flower, ``build`` is called a second time, with ``Parameters``.
    """

    def of_flower() -> Any:
        from flwr.common import ndarrays_to_parameters  # pyright: ignore[reportMissingImports]

        return build(initial_parameters=ndarrays_to_parameters(list(arrays)))

    kind = build.func if isinstance(build, partial) else build
    if isinstance(kind, type) and is_flowers(kind):
        return of_flower()
    try:
        strategy = build(initial_parameters=list(arrays))
    except Exception:  # Flower's classes raise errors of several types for a list
        if "flwr" not in sys.modules:
            raise
        return of_flower()
    return of_flower() if is_flowers(type(strategy)) else strategy


def content_of_record(value: Any) -> Any:
    """Return the content of Flower's ``ArrayRecord`` or ``Parameters``; raise a TypeError for another object."""
    if not (is_flowers(type(value)) and type(value).__name__ in ("ArrayRecord", "Parameters")):
        raise TypeError
    return vars(value) if type(value).__name__ == "Parameters" else {key: x.numpy() for key, x in value.items()}


def with_content(name: str, content: Any) -> Any:
    """Return Flower's object of the class ``name`` whose ``content_of_record`` is ``content``."""
    from flwr.common import Parameters  # pyright: ignore[reportMissingImports]

    return _record(content) if name == "ArrayRecord" else Parameters(**content)


def configs(
    strategy: Any, round: int, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any], n: int
) -> dict[int, dict[str, Any]]:
    """Return what ``configure_train`` or ``configure_fit`` adds to ``config`` for each client that it chooses.

    Args:
        strategy: a strategy, for which all clients are available. A strategy that is not Flower's sends nothing.
        round: number of the round, from 1.
        arrays: the server's arrays by name.
        config: the config that ``configure_train`` gets.
        n: number of clients.

    Raises:
        UserError: the strategy waits for more clients.
        ValueError: the strategy sends more than the server's arrays and a config, or other arrays.
    """
    if not is_flowers(type(strategy)):
        return {client: {} for client in range(n)}
    call = _train if hasattr(strategy, "configure_train") else _fit
    result = dict[int, dict[str, Any]]()
    for client, sent, has_arrays in call(strategy, round, arrays, config, n):
        if not has_arrays:
            raise ValueError("the strategy sends other arrays than the server's")
        config_of_round = {**config, "server_round": round, "server-round": round}
        result[client] = {name: value for name, value in sent.items() if config_of_round.get(name) != value}
    return result


Sent = Iterator[tuple[int, Mapping[str, Any], bool]]
"""For each chosen client its number, the config, and whether the arrays are the server's."""


def _fit(strategy: Any, round: int, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any], n: int) -> Sent:
    from flwr import common, server  # pyright: ignore[reportMissingImports]

    def wait_for(n_clients: int, timeout: int = 0) -> bool:
        return n_clients <= n or _waits(strategy, n)

    manager, parameters = server.SimpleClientManager(), common.ndarrays_to_parameters([*arrays.values()])
    manager.wait_for = wait_for
    for i in range(n):
        manager.register(SimpleNamespace(cid=str(i)))
    for client, sent in strategy.configure_fit(round, parameters, manager):
        yield int(client.cid), sent.config, sent.parameters == parameters


def _train(strategy: Any, round: int, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any], n: int) -> Sent:
    from flwr import app as flwr  # pyright: ignore[reportMissingImports]

    with suppress(ImportError):  # without an identity of the process, Flower's newer versions create no message
        from flwr.supercore.task_identity import TaskIdentity as Task  # pyright: ignore[reportMissingImports]

        Task.task_id, Task.run_id, Task.node_id = 1, 1, 1
    record, asked = _record(arrays), count(1)

    def get_node_ids() -> list[int]:
        return [*range(n)] if next(asked) < PATIENCE else _waits(strategy, n)

    grid = SimpleNamespace(get_node_ids=get_node_ids)
    for message in strategy.configure_train(round, record, flwr.ConfigRecord(dict(config)), grid):
        if message.content.keys() != {"arrays", "config"}:
            raise ValueError(f"a message to a client must have the records arrays and config, got {[*message.content]}")
        yield message.metadata.dst_node_id, message.content["config"], message.content["arrays"] == record


def _waits(strategy: object, n: int) -> Any:
    raise UserError(f"{name_of(type(strategy))} waits for more than {n} clients: see its minimum numbers of clients.")


def _record(arrays: Mapping[str, np.ndarray]) -> Any:
    from flwr import app as flwr  # pyright: ignore[reportMissingImports]

    return flwr.ArrayRecord({name: flwr.Array(x) for name, x in arrays.items()})


def aggregate(
    strategy: Any, round: int, names: Sequence[str], results: Mapping[int, Any]
) -> tuple[list[np.ndarray] | None, Mapping[str, Any]]:
    """Return the arrays and the metrics that a strategy merges from the clients' results.

    names: names of the arrays in a result, in their order.
    """
    if not is_flowers(type(strategy)):
        return strategy.aggregate_fit(round, [(str(client), result) for client, result in results.items()], [])
    if hasattr(strategy, "aggregate_train"):
        from flwr import app as flwr  # pyright: ignore[reportMissingImports]

        replies = []
        for i, result in results.items():
            numbers = flwr.MetricRecord({**result.metrics, "num-examples": result.num_examples})
            records = {"arrays": _record(dict(zip(names, result.parameters, strict=True))), "metrics": numbers}
            replies.append(flwr.Message(content=flwr.RecordDict(records), metadata=_about(i, 0)))
        merged, numbers = strategy.aggregate_train(round, replies)
        return merged and [merged[name].numpy() for name in names], numbers or {}
    from flwr import common  # pyright: ignore[reportMissingImports]

    status = common.Status(common.Code.OK, "")
    fitted = []
    for i, r in results.items():
        weights = common.ndarrays_to_parameters(r.parameters)
        fitted.append((SimpleNamespace(cid=str(i)), common.FitRes(status, weights, r.num_examples, dict(r.metrics))))
    parameters, metrics = strategy.aggregate_fit(round, fitted, [])
    return parameters and common.parameters_to_ndarrays(parameters), metrics


def _about(sender: int, receiver: int) -> Any:
    """Return the metadata of a message of a training."""
    from flwr import app as flwr  # pyright: ignore[reportMissingImports]

    return flwr.Metadata(1, "", sender, receiver, "", "", time.time(), flwr.DEFAULT_TTL, "train")


class AppClient:
    """A ``ClientApp`` with the interface of a ``NumPyClient``.

    arrays, numbers, configs: the array, metric and config records of the context's state, by name.

    Args:
        app: the ClientApp.
        module: the client's module, whose ``state_dict`` names the arrays of a message.
        names: names of the parameters in the order of ``fit``'s arrays.
        number: the client's number, the node's ``partition-id``.
    """

    def __init__(self, app: Any, module: nn.Module, names: Sequence[str], number: int) -> None:
        self.app, self.values, self.names, self.number = app, module.state_dict, tuple(names), number
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        self.numbers: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}

    def fit(self, parameters: Sequence[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        """Send the app a message ``train`` with ``parameters`` and ``config``, and return what its reply contains.

        The context's ``run_config`` and ``node_config`` have the values of ``config`` too.
        """
        from flwr import app as flwr  # pyright: ignore[reportMissingImports]

        config = {"server-round": config["server_round"], **config}
        model = {name: x.numpy(force=True) for name, x in self.values().items()}
        model |= dict(zip(self.names, parameters, strict=True))
        content = flwr.RecordDict({"arrays": _record(model), "config": flwr.ConfigRecord(config)})
        state = flwr.RecordDict({name: _record(arrays) for name, arrays in self.arrays.items()})
        state.update({name: flwr.MetricRecord(numbers) for name, numbers in self.numbers.items()})
        state.update({name: flwr.ConfigRecord(values) for name, values in self.configs.items()})
        context = flwr.Context(1, self.number, {"partition-id": self.number, **config}, state, config)
        reply = self.app(flwr.Message(content=content, metadata=_about(0, self.number)), context).content
        self.arrays = {name: {k: x.numpy() for k, x in record.items()} for name, record in state.array_records.items()}
        self.numbers = {name: dict(record) for name, record in state.metric_records.items()}
        self.configs = {name: dict(record) for name, record in state.config_records.items()}
        (sent,), (metrics,) = reply.array_records.values(), reply.metric_records.values()
        return [sent[name].numpy() for name in self.names], metrics["num-examples"], dict(metrics)
