"""Flower-style and PFLlib-style clients and strategies without the libraries; tests name this file in options."""

from collections.abc import Callable, Iterable, Mapping
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


class Average:
    """FedAvg's server as a Flower strategy, weighted by numbers of examples."""

    def weights(self, results: list[tuple[str, Any]]) -> list[float]:
        return [float(result.num_examples) for _, result in results]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[str, Any]], failures: list
    ) -> tuple[list[np.ndarray] | None, dict]:
        if not results:
            return None, {}
        weights = self.weights(results)
        return [np.average(x, 0, weights) for x in zip(*(r.parameters for _, r in results), strict=True)], {}


class Neither:
    """A class with only some of the methods of a Flower or PFLlib client."""

    def fit(self, x: Tensor) -> None:
        """Do nothing."""


class AsksForMore(FlowerStyle):
    def __init__(self, module: nn.Module, loader: object) -> None:
        """Require an argument that no adapter passes."""
