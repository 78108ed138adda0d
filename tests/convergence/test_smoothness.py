"""L against dense matrices: the iteration, products with the Hessian, closed forms on least squares."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from closed_forms import Digits, Problem
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons import Examples, Flat, RunData
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.convergence.estimators import Part
from fedcommons.convergence.smoothness import hessian_vector, smoothness, smoothness_of_each, spectral_norm
from fedcommons.core.evaluation import ModelTask
from fedcommons.data.clients import Clients, Rows
from fedcommons.testing import Federation
from fedcommons.testing.federations import Noise
from lightning_modules import Classifier
from lightning_modules.networks import CNN

ALGORITHM = FedAvg()


def _symmetric(eigenvalues: list[float], seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues in random directions, float64."""
    draw = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=draw, dtype=torch.float64))
    return q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T


def test_the_iteration_approaches_the_largest_modulus_from_below() -> None:
    tie, single, zero = _symmetric([3, -3, 1, 0]), _symmetric([-4]), torch.zeros(4, 4, dtype=torch.float64)
    for matrix in (_symmetric([3, 2, 1, 0.1]), _symmetric([-3, 2, 1, 0]), tie, single, zero):
        largest = float(np.abs(np.linalg.eigvalsh(matrix.numpy())).max())
        for seed in range(5):
            start = 10 * torch.randn(len(matrix), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            exact = spectral_norm(matrix.mv, start, 1e-12, 50)
            assert exact == pytest.approx(largest, rel=1e-9, abs=0)
            assert 0.999 * largest <= spectral_norm(matrix.mv, start) <= largest * (1 + 1e-12)
    assert math.isnan(spectral_norm(lambda v: v * math.inf, torch.ones(4, dtype=torch.float64)))
    close, steps = torch.linspace(0.9, 1, 30, dtype=torch.float64), list[float]()
    spectral_norm(lambda v: steps.append(0.0) or close * v, torch.ones(30, dtype=torch.float64), tolerance=0, most=5)
    assert len(steps) == 5  # no more products than it may


class _Tiny(nn.Module):
    """31 parameters in use, and two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(3, 4), nn.Linear(1, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _dense(module: LightningModule, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian of the mean loss, (P, P)."""
    names, shapes = zip(*((name, p.shape) for name, p in module.named_parameters()), strict=True)
    sizes = [shape.numel() for shape in shapes]

    def loss(flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        logits = torch.func.functional_call(module, dict(zip(names, parts, strict=True)), (x,))
        return nn.functional.cross_entropy(logits, y)

    at = nn.utils.parameters_to_vector(module.parameters()).detach()
    dense = torch.autograd.functional.hessian(loss, at, vectorize=True)
    assert isinstance(dense, Tensor)
    return dense


def _rows(module: LightningModule, batches: list[tuple[Tensor, Tensor]], seed: int = 0) -> Tensor:
    """The Hessian, product by product."""
    size = sum(p.numel() for p in module.parameters())
    return torch.stack([hessian_vector(module, batches, v, seed) for v in torch.eye(size, dtype=torch.float64)])


def test_products_are_with_the_hessian_of_the_mean_loss_over_all_batches() -> None:
    """Of a module that draws, rows make a symmetric matrix only if all products saw the same draws."""
    torch.manual_seed(0)
    module = Classifier(_Tiny(), lr=0.1).double()
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3
    batches = list(zip(x.split([5, 3, 1]), y.split([5, 3, 1]), strict=True))
    dense = _dense(module, x, y)
    assert torch.allclose(_rows(module, batches), dense, rtol=1e-10, atol=1e-14)
    assert dense.norm() > 0.1
    rows = _rows(Classifier(nn.Sequential(_Tiny(), Noise(0.5)), lr=0.1).double(), batches, 7)
    assert torch.allclose(rows, rows.T, rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match=r"float16.* use float32"):
        hessian_vector(module.half(), [(x.half(), y)], torch.zeros(len(dense)))


def test_dropout_is_off_and_batch_norm_uses_running_statistics_or_is_refused(digits: Digits) -> None:
    def product(module: LightningModule) -> Tensor:
        draw = torch.Generator().manual_seed(3)
        v = torch.randn(sum(p.numel() for p in module.parameters()), generator=draw, dtype=torch.float64)
        return hessian_vector(module, [(torch.randn(6, 1, 8, 8, generator=draw), torch.arange(6))], v)

    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10, track_running_stats=False))
    with pytest.raises(ValueError, match=r"network\.2 .*batch"):
        product(Classifier(network, lr=0.1))
    wet, dry = digits(dropout=0.9).module().train(), digits(dropout=0.0).module().eval()
    assert torch.equal(product(wet), product(dry))
    torch.manual_seed(0)
    module = Classifier(CNN((1, 8, 8), 10, channels=(2, 3), hidden=5, batch_norm=True), lr=0.1).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert torch.equal(product(module.train()), product(module.eval()))
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_the_hessian_is_that_of_a_part_and_has_the_weights_of_the_examples(least_squares: Problem) -> None:
    """A^T diag(w) A / sum_j w_j."""
    problem, draw = least_squares(sizes=(50, 70, 60)), np.random.default_rng(1)
    plain = problem.federation(0.1)
    executor, at = plain.serial(ALGORITHM), ModelTask(plain.model)
    part = Part(16, 3, seed=1)
    rows = [problem.a[i][part.rows("own", i, len(problem.a[i]))] for i in range(2)]
    expected = [np.linalg.norm(a, 2) ** 2 / len(a) for a in rows]
    assert smoothness_of_each(executor, at, "own", 2, 2, part) == pytest.approx(expected, rel=5e-3)

    def each(weights: list[np.ndarray]) -> tuple[list[float], float]:
        clients = Clients(plain.data.clients.store, Rows.from_lists(list(plain.data.clients.rows), weights))
        executor = replace(plain, data=RunData(clients, clients, {})).serial(ALGORITHM)
        return smoothness_of_each(executor, at, "own", 3, 2), smoothness(executor, at, "own", 3, 2)

    weights = [draw.integers(0, 9, len(b)) / 4 for b in problem.b]
    hessians = [a.T @ (w[:, None] * a) / w.sum() for a, w in zip(problem.a, weights, strict=True)]
    result, of_mean = each(weights)
    assert result == pytest.approx([np.linalg.norm(h, 2) for h in hessians], rel=1e-4)
    assert of_mean == pytest.approx(np.linalg.norm(np.mean(hessians, 0), 2), rel=1e-4)


class _Saddle(LightningModule):
    """f(w) = mean of <x, w^4> / 12, whose Hessian is diag(mean of x w^2); w begins at ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (batch[0] @ self.w**4).mean() / 12

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_of_a_saddle_l_is_the_largest_modulus() -> None:
    """Client 1 bends by -8, 1 and 2, client 2 by 2, -1 and 0, so that both together do by -3, 0 and 1."""
    x = torch.tensor([[-8.0, 1, 2], [2, -1, 0]], dtype=torch.float64)
    clients = Clients(Examples(x, torch.zeros(2)), [np.array([0]), np.array([1])])
    federation = Federation(RunData(clients, clients, {}), _Saddle)
    layout = federation.model.layout
    for w in (1, 3):
        executor, at = federation.serial(ALGORITHM), ModelTask(Flat(layout, torch.full((3,), w, dtype=torch.float64)))
        assert smoothness_of_each(executor, at, "own", 2, 1) == pytest.approx([8 * w**2, 2 * w**2], rel=5e-3)
        assert smoothness(executor, at, "own", 2, 1) == pytest.approx(3 * w**2, rel=5e-3)
