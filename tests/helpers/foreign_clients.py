"""Flower-style and PFLlib-style clients and strategies without the libraries; tests name this file in options."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Fitted = tuple[list[np.ndarray], int, dict]


def train(
    module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int, **options: Any
) -> None:
    optimizer = torch.optim.SGD(module.parameters(), rate, **options)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(batch_size):
            optimizer.zero_grad()
            loss(module(x[rows]), y[rows]).backward()
            optimizer.step()


class FlowerStyle:
    """The client of Flower's tutorial, whose parameters are all values of the module's state_dict."""

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

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        self.set_parameters(parameters)
        self.train()
        return self.get_parameters({}), self.n, {}


class FlowerProximal(FlowerStyle):
    """FedProx as a client of Flower's form; it takes no loss, as its loss is always cross entropy."""

    def __init__(
        self, module: nn.Module, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int, mu: float = 0.1
    ) -> None:
        super().__init__(module, self.loss, x, y, rate, epochs, batch_size)
        self.mu = mu

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        pairs = zip(self.net.parameters(), self.anchor, strict=True)
        return nn.functional.cross_entropy(outputs, y) + self.mu / 2 * sum((w - a).square().sum() for w, a in pairs)

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        self.anchor = [torch.tensor(value) for value in parameters]
        return super().fit(parameters, config)


class Seeding:
    """A client of PFLlib's form that seeds torch in its constructor; it has no attribute for the number of examples."""

    def __init__(
        self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int
    ) -> None:
        torch.manual_seed(0)
        self.model, self.data, self.loss, self.rate = module, [*zip(x, y, strict=True)], loss, rate
        self.epochs, self.batch_size = epochs, batch_size

    def set_parameters(self, model: nn.Module) -> None:
        for new, old in zip(model.parameters(), self.model.parameters(), strict=True):
            old.data = new.data.clone()

    def train(self) -> None:
        x, y = (torch.stack(each) for each in zip(*self.data, strict=True))
        optimizer = torch.optim.SGD(self.model.parameters(), self.rate)
        for _ in range(self.epochs):
            for rows in torch.randperm(len(y)).split(self.batch_size):
                optimizer.zero_grad()
                self.loss(self.model(x[rows]), y[rows]).backward()
                optimizer.step()


class KeepsLast(Seeding):
    """FedPer as a client of PFLlib's form: the last tensors of its model are personal."""

    def __init__(
        self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int, n: int = 1
    ) -> None:
        super().__init__(module, loss, x, y, rate, epochs, batch_size)
        self.n = n

    def set_parameters(self, model: nn.Module) -> None:
        for new, old in [*zip(model.parameters(), self.model.parameters(), strict=True)][: -self.n]:
            old.data = new.data.clone()


class Average:
    """FedAvg's server as a Flower strategy, weighted by numbers of examples."""

    def weights(self, results: list[tuple[str, Any]]) -> list[float]:
        return [float(result.num_examples) for _, result in results]

    def aggregate_fit(self, server_round: int, results: list[tuple[str, Any]], failures: list) -> tuple[Any, dict]:
        if not results:
            return None, {}
        weights = self.weights(results)
        return [np.average(x, 0, weights) for x in zip(*(r.parameters for _, r in results), strict=True)], {}


class ControlServer(Average):
    """SCAFFOLD's server for the digits federation of 64 examples, with clients weighted by examples."""

    def __init__(self, initial_parameters: list[np.ndarray]) -> None:
        self.control = [np.zeros_like(x) for x in initial_parameters]

    def aggregate_fit(self, server_round: int, results: list[tuple[str, Any]], failures: list) -> tuple[Any, dict]:
        arrays, _ = super().aggregate_fit(server_round, results, failures)
        if arrays is None:
            return None, {}
        share, k = sum(self.weights(results)) / 64, len(self.control)
        changes = [np.float32(share * change) for change in arrays[k:]]  # np.average returns float64
        self.control = [c + change for c, change in zip(self.control, changes, strict=True)]
        return arrays[:k] + self.control, {"skill": results[0][1].metrics["skill"]}


class Configured:
    """A client of Flower's form without get_parameters, whose settings come from the server's ``config``."""

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self.module, self.data = module, (x, y)

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        settings = config["lr"], config["local-epochs"], 1000
        client = FlowerStyle(self.module, nn.functional.cross_entropy, *self.data, *settings)
        arrays, n, _ = client.fit(parameters, config)
        return arrays, n, {"skill": n / 2, "note": "text"}


class FlowerScaffold(FlowerStyle):
    """SCAFFOLD, option 2: after the model's arrays, the server sends c, and clients send the change of their c_i.

    control: a copy of the module with c_i as its parameters, which are zero at first.
    """

    def __init__(
        self, module: nn.Module, loss: Loss, x: Tensor, y: Tensor, rate: float, epochs: int, batch_size: int
    ) -> None:
        super().__init__(module, loss, x, y, rate, epochs, batch_size)
        self.gradient_of, self.rate, self.epochs = (lambda: loss(module(x), y)), rate, epochs
        self.control = deepcopy(module).requires_grad_(False)
        for c_i in self.control.parameters():
            c_i.zero_()

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> Fitted:
        k = len(weights := [*self.net.parameters()])
        start, c = (list(map(torch.tensor, part)) for part in (parameters[:k], parameters[k:]))
        controls = [c_i.clone() for c_i in self.control.parameters()]
        c = c or [torch.zeros_like(x) for x in start]
        self.set_parameters(parameters[:k])
        for _ in range(self.epochs):
            gradients = torch.autograd.grad(self.gradient_of(), weights)
            with torch.no_grad():
                for w, g, c_i, c_all in zip(weights, gradients, controls, c, strict=True):
                    w -= self.rate * (g - c_i + c_all)
        after, n = self.get_parameters({}), self.n
        lengths = [(x - torch.tensor(y)) / (self.epochs * self.rate) for x, y in zip(start, after, strict=True)]
        for c_i, c_all, mean in zip(self.control.parameters(), c, lengths, strict=True):
            c_i += mean - c_all
        changes = ((new - old).numpy() for new, old in zip(self.control.parameters(), controls, strict=True))
        return [*after, *changes], n, {"skill": 0.5}


class Neither:
    """A class with only some of the methods of a Flower or PFLlib client."""

    def fit(self, x: Tensor) -> None:
        """Do nothing."""


class AsksForMore(FlowerStyle):
    def __init__(self, module: nn.Module, loader: object) -> None:
        """Require an argument that no adapter passes."""
