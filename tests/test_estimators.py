"""zeta^2 and sigma^2 against closed forms, a slow double, and what must make them vanish or fall."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.local import LocalSGD
from fedcommons.convergence.estimators import Moments, moments
from fedcommons.data.clients import Clients
from fedcommons.federation.evaluation import ModelTask
from fedcommons.federation.worker import RunData
from fedcommons.tensors import Flat

if TYPE_CHECKING:
    from conftest import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

ALGORITHM = FedAvg(LocalSGD(1, 5))


def _measure(federation: "Federation", which: str = "own", blocks: int = 2, model: Flat | None = None) -> Moments:
    executor = federation.serial(ALGORITHM)
    return moments(executor, ModelTask(model or federation.model), which, len(federation.data.own), blocks)


def _values(found: Moments) -> tuple[float, float, float]:
    return found.zeta_sq, found.sigma_sq, found.sigma_avg_sq


def _share(federation: "Federation", sizes: list[int], order: np.ndarray) -> "Federation":
    """The same examples dealt anew, in this order."""
    rows = [order[a:b] for a, b in pairwise(np.cumsum([0, *sizes]))]
    clients = Clients(federation.data.clients.store, rows)
    return type(federation)(RunData(clients, clients, {}), federation.module)


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (1, 30, 5), (4,)])
def test_closed_forms_on_least_squares(sizes: tuple[int, ...], least_squares: "Problem") -> None:
    """A sample's gradient is a (<a, w> - b); unequal clients count alike."""
    problem, w = least_squares(sizes=sizes), np.array([0.5, -1.0, 2.0])
    per_sample = [a * (a @ w - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
    means = np.stack([g.mean(0) for g in per_sample])
    assert np.allclose(means, problem.gradients(w))
    zeta_sq = np.square(means - means.mean(0)).sum(1).mean()
    sigma_sq = np.mean([np.square(g - g.mean(0)).sum(1).mean() for g in per_sample])
    federation = problem.federation(0.1)
    found = _measure(federation, model=Flat(federation.model.layout, torch.from_numpy(w)))
    assert found.zeta_sq == pytest.approx(zeta_sq, rel=1e-12, abs=1e-12)
    assert found.sigma_sq == pytest.approx(sigma_sq, rel=1e-12)


def test_equals_a_slow_double_on_the_network(digits: "Digits") -> None:
    federation = digits()
    module = copy.deepcopy(federation.module()).double().eval()

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        loss = module.training_step((x, y), 0)
        assert isinstance(loss, Tensor)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    per_client = [
        torch.stack([gradient(rows.x[j : j + 1], rows.y[j : j + 1]) for j in range(len(rows))])
        for rows in federation.data.own
    ]
    means = torch.stack([g.mean(0) for g in per_client])
    for mean, rows in zip(means, federation.data.own, strict=True):
        assert torch.allclose(mean, gradient(rows.x, rows.y), rtol=0, atol=1e-12)  # the gradient of the mean loss
    zeta_sq = (means - means.mean(0)).square().sum(1).mean()
    sigma_sq = torch.stack([(g - g.mean(0)).square().sum(1).mean() for g in per_client]).mean()
    found = _measure(federation)
    assert found.zeta_sq == pytest.approx(float(zeta_sq), rel=1e-5)  # its gradients are float32
    assert found.sigma_sq == pytest.approx(float(sigma_sq), rel=1e-5)


def test_clients_with_one_sample_have_no_noise(digits: "Digits") -> None:
    found = _measure(digits(sizes=(1, 1, 1)))
    assert 0 <= found.sigma_sq < 1e-6 < found.zeta_sq  # its norms are float32


def test_identical_clients_have_no_dissimilarity(digits: "Digits") -> None:
    federation = digits(sizes=(6,))
    found = _measure(_share(federation, [6, 6, 6], np.tile(np.arange(6), 3)))
    assert 0 <= found.zeta_sq < 1e-12 < found.sigma_sq
    assert found.sigma_sq == pytest.approx(_measure(federation).sigma_sq, rel=1e-12)


def test_blocks_only_round(digits: "Digits") -> None:
    federation = digits(sizes=(4, 6, 5, 3, 4))
    whole = _measure(federation, blocks=1)
    for blocks in (2, 3, 50):
        found = _measure(federation, blocks=blocks)
        assert found.zeta_sq == pytest.approx(whole.zeta_sq, rel=1e-12)
        assert found.sigma_sq == whole.sigma_sq  # summed client by client whatever the blocks


def test_iid_clients_differ_less_than_clients_with_classes_of_their_own(digits: "Digits") -> None:
    by_class = digits(sizes=(12, 12, 12, 12, 12))
    iid = _share(by_class, [12] * 5, np.random.default_rng(0).permutation(60))
    a, b = _measure(iid), _measure(by_class)
    assert a.zeta_sq < 0.5 * b.zeta_sq
    # the law of total variance: pooled noise = noise within clients + dissimilarity, however the examples are dealt
    assert a.zeta_sq + a.sigma_sq == pytest.approx(b.zeta_sq + b.sigma_sq, rel=1e-6)


def test_dropout_is_off(digits: "Digits") -> None:
    wet, dry = digits(dropout=0.5), digits(dropout=0.0)
    assert torch.equal(wet.model.buffer, dry.model.buffer)
    executor = wet.serial(ALGORITHM)
    executor.worker.work.module.train()  # as the last client left it
    found = moments(executor, ModelTask(wet.model), "own", 5, 2)
    assert _values(found) == _values(_measure(dry))


def test_own_is_the_clients_real_data_and_train_what_it_trains_on(digits: "Digits") -> None:
    a = digits(sizes=(6, 6, 6))
    b = _share(a, [6, 6, 6], np.random.default_rng(0).permutation(18))
    both = type(a)(RunData(a.data.clients, b.data.clients, {}), a.module)
    assert _values(_measure(both, "train")) == _values(_measure(a))
    assert _values(_measure(both, "own")) == _values(_measure(b))
    assert _values(_measure(a)) != _values(_measure(b))


def test_measuring_between_rounds_changes_no_bit(digits: "Digits") -> None:
    federation = digits(dropout=0.3)
    plan, executor = federation.plan(2), federation.serial(ALGORITHM)
    first = federation.play(ALGORITHM, federation.plan(1), executor)[-1][0]
    before = first.model.buffer.clone()
    moments(executor, ModelTask(first.model), "own", 5, 2)
    assert torch.equal(first.model.buffer, before)
    then = federation.play(ALGORITHM, plan, executor, start=first)[-1][0]
    straight = federation.play(ALGORITHM, plan)[-1][0]
    assert torch.equal(then.model.buffer, straight.model.buffer)
