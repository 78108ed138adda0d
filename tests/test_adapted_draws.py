"""Draws of clients and strategies of other frameworks: other batches in each round and for each seed."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from fedcommons.core.algorithm import Facts, Message
from fedcommons.core.local import LocalSGD
from fedcommons.tensors import flat
from fedcommons.testing import theirs
from fedcommons.testing.adapters import Adapted, adapted
from fedcommons.testing.federations import digits

ORDERS: dict[str, Callable[[Any, int], Any]] = {
    "torch's generator": lambda client, n: torch.randperm(n),
    "numpy's generator": lambda client, n: np.random.permutation(n),  # noqa: NPY002
    "Python's generator": lambda client, n: random.sample(range(n), n),
    "a torch.Generator of its own": lambda client, n: torch.randperm(n, generator=client.of_torch),
    "a numpy Generator of its own": lambda client, n: client.of_numpy.permutation(n),
    "a RandomState of its own": lambda client, n: client.old_numpy.permutation(n),
    "a random.Random of its own": lambda client, n: client.of_python.sample(range(n), n),
    "a loader's generator": lambda client, n: torch.cat([rows for (rows,) in client.loader]),
    "a sampler's generator": lambda client, n: torch.cat([rows for (rows,) in client.sampled]),
}


class PFLlib:
    """PFLlib's clientBase seeds when it is built: ``torch.manual_seed(0)``."""

    def __init__(self, order: str, module: nn.Module, loss: Any, x: Tensor, y: Tensor, rate: float) -> None:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        self.of_torch, self.of_numpy = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.old_numpy, self.of_python = np.random.RandomState(0), random.Random(0)
        rows = TensorDataset(torch.arange(len(y)))
        self.loader = DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(0))
        self.sampled = DataLoader(rows, sampler=RandomSampler(rows, generator=torch.Generator().manual_seed(0)))
        self.model, self.loss, self.x, self.y, self.rate, self.train_samples = module, loss, x, y, rate, len(y)
        self.order = partial(ORDERS[order], self)

    def set_parameters(self, model: nn.Module) -> None:
        self.model.load_state_dict(model.state_dict())

    def train(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), self.rate)
        for rows in torch.as_tensor(np.asarray(self.order(len(self.y)))).split(4):
            optimizer.zero_grad()
            self.loss(self.model(self.x[rows]), self.y[rows]).backward()
            optimizer.step()


class SeedsInTraining(PFLlib):
    def train(self) -> None:
        torch.manual_seed(0)
        super().train()


class Strategy:
    """Weighs clients by numbers that it drew when it was built."""

    def __init__(self) -> None:
        self.weights = np.random.rand(2)  # noqa: NPY002

    def aggregate_fit(self, server_round: int, results: list, failures: list) -> tuple[list[np.ndarray] | None, dict]:
        if not results:
            return None, {}
        several = zip(*(result.parameters for _, result in results), strict=True)
        return [np.asarray(sum(w * one for w, one in zip(self.weights, each, strict=False))) for each in several], {}


def _weights(algorithm: Adapted, seed: int) -> Tensor:
    federation = digits(linear=True, lr=0.1).training(LocalSGD(epochs=1, batch_size=4), "samples")
    message = Message({"model": federation.model})
    return flat(
        algorithm.client(federation.work(), message, {}, federation.data.clients[0], 1, seed).sums, "delta"
    ).buffer


@pytest.mark.parametrize("order", ORDERS)
def test_a_client_that_seeds_when_it_is_built_draws_other_batches_for_each_seed(order: str) -> None:
    algorithm = adapted(partial(PFLlib, order))
    first, other, again = (_weights(algorithm, seed) for seed in (1, 2, 1))
    assert not torch.equal(first, other)
    assert torch.equal(first, again)


def test_a_strategy_is_built_by_the_seed_of_the_run() -> None:
    """Also where the process has drawn before, or the run goes on in another process."""
    federation = digits(linear=True)
    facts = Facts(2, [1, 1], rounds=3)
    drawn = []
    for seed in (1, 2, 1):
        np.random.seed(len(drawn))  # noqa: NPY002  (what stood there before does not matter)
        algorithm = adapted(partial(PFLlib, "torch's generator"), Strategy)
        state = algorithm.start(federation.model, facts, seed)
        drawn.append(algorithm.server[0].weights.tolist())
        algorithm.server.clear()  # as in another process
        algorithm.merge(SimpleNamespace(), state, {}, {}, 3, seed=99)  # pyright: ignore[reportArgumentType]
        assert algorithm.server[0].weights.tolist() == drawn[-1]
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_client_that_seeds_while_it_trains_is_named() -> None:
    check = theirs.CHECKS["it_draws_anew_in_each_round"]
    check(adapted(partial(PFLlib, "torch's generator")), theirs.FULL)
    with pytest.raises(AssertionError, match="seeds torch's generator"):
        check(adapted(partial(SeedsInTraining, "torch's generator")), theirs.FULL)
