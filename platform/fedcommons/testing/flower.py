"""Objects of Flower, made from arrays and numbers; the package flwr is imported only for objects of its classes."""

import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn


def is_flowers(kind: type) -> bool:
    """Return whether a class is Flower's or is derived from a class of Flower."""
    return any(base.__module__.split(".")[0] == "flwr" for base in kind.__mro__)


def parameters_for(strategy: object, arrays: Sequence[np.ndarray]) -> Any:
    """Return the arrays as ``Parameters`` if ``strategy`` is one of Flower's classes, otherwise as a list."""
    if not (isinstance(strategy, type) and is_flowers(strategy)):
        return list(arrays)
    from flwr.common import ndarrays_to_parameters  # pyright: ignore[reportMissingImports]

    return ndarrays_to_parameters(list(arrays))


def aggregate(strategy: Any, round: int, results: Mapping[int, Any]) -> tuple[list[np.ndarray] | None, Mapping]:
    """Return the arrays and the metrics of ``strategy.aggregate_fit`` for the clients' ``adapters.Result`` objects."""
    if not is_flowers(type(strategy)):
        return strategy.aggregate_fit(round, [(str(client), result) for client, result in results.items()], [])
    from flwr import common  # pyright: ignore[reportMissingImports]

    status, pack = common.Status(common.Code.OK, ""), common.ndarrays_to_parameters
    fitted = [
        (SimpleNamespace(cid=str(i)), common.FitRes(status, pack(r.parameters), r.num_examples, dict(r.metrics)))
        for i, r in results.items()
    ]
    parameters, metrics = strategy.aggregate_fit(round, fitted, [])
    return parameters and common.parameters_to_ndarrays(parameters), metrics


class AppClient:
    """A ``ClientApp`` with the interface of a ``NumPyClient``.

    arrays, numbers: the array records and the metric records of the context's state, by name.

    Args:
        app: the ClientApp.
        module: the client's module, which names the arrays of a message by its ``state_dict``.
        names: names of the parameters in the order of ``fit``'s arrays.
        number: the client's number, the node's ``partition-id``.
    """

    def __init__(self, app: Any, module: nn.Module, names: Sequence[str], number: int) -> None:
        self.app, self.module, self.names, self.number = app, module, tuple(names), number
        self.arrays: dict[str, dict[str, np.ndarray]] = {}
        self.numbers: dict[str, dict[str, Any]] = {}

    def fit(self, parameters: Sequence[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict]:
        """Send the app a message ``train`` with ``parameters`` and ``config``, and return what its reply contains.

        The context's ``run_config`` and ``node_config`` have the values of ``config`` too.
        """
        from flwr import app as flwr  # pyright: ignore[reportMissingImports]

        array, config = flwr.Array, {"server-round": config["server_round"], **config}
        model = {name: array(x.numpy(force=True)) for name, x in self.module.state_dict().items()}
        model |= {name: array(x) for name, x in zip(self.names, parameters, strict=True)}
        content = flwr.RecordDict({"arrays": flwr.ArrayRecord(model), "config": flwr.ConfigRecord(config)})
        state = flwr.RecordDict(
            {name: flwr.ArrayRecord({k: array(x) for k, x in arrays.items()}) for name, arrays in self.arrays.items()}
        )
        state.update({name: flwr.MetricRecord(numbers) for name, numbers in self.numbers.items()})
        context = flwr.Context(1, self.number, {"partition-id": self.number, **config}, state, config)
        about = flwr.Metadata(1, "", 0, self.number, "", "", time.time(), flwr.DEFAULT_TTL, "train")
        reply = self.app(flwr.Message(content=content, metadata=about), context).content
        self.arrays = {name: {k: x.numpy() for k, x in record.items()} for name, record in state.array_records.items()}
        self.numbers = {name: dict(record) for name, record in state.metric_records.items()}
        (sent,), (metrics,) = reply.array_records.values(), reply.metric_records.values()
        return [sent[name].numpy() for name in self.names], metrics["num-examples"], dict(metrics)
