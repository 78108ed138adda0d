"""FedDyn's local steps: its objective, and clipping. (Its server: test_scaffold.py; alpha -> 0 is not FedAvg.)"""

import numpy as np
import pytest
import torch
from closed_forms import FULL, Problem, reply_of, smooth_module

from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, flat
from fedcommons.testing.federations import LeastSquares

SIZES = (6, 9, 7, 17)
X, G = np.array([0.4, -1.0, 0.7]), np.array([0.3, 0.2, -0.5])
"""A server model and a client's g_i."""


def trained(problem: LeastSquares, client: int, steps: int, lr: float, **options: float | None) -> np.ndarray:
    """The local model after so many full-batch steps from ``X`` with memory ``G``."""
    if not steps:
        return X
    federation = problem.federation(lr)
    algorithm, layout = FedDyn(**options), federation.model.layout  # pyright: ignore
    x, g_i = (Flat(layout, torch.from_numpy(values.copy())) for values in (X, G))
    module, data, loop = federation.module(), federation.data.clients[client], LocalSGD(steps, FULL)
    reply = reply_of(algorithm, module, data, loop, {"gradient": g_i}, x)
    moved = flat(reply.sums, "delta").buffer.numpy()
    kept = flat(reply.memory or {}, "gradient").buffer.numpy()
    assert np.allclose(kept, G - algorithm.alpha * moved, rtol=0, atol=1e-14)  # g_i <- g_i - alpha (y_i - x)
    return X + moved


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_local_step_goes_down_the_printed_objective(squared: bool, step: int, least_squares: Problem) -> None:
    """(y_{k-1} - y_k)/eta is the central difference of f_i(y) - <g_i, y> + (alpha/2) ||y - x||^2, or ||y - x||."""
    problem, alpha, lr, client = least_squares(sizes=SIZES), 0.8, 0.1, 1
    y, after = (trained(problem, client, k, lr, alpha=alpha, squared=squared, clip=None) for k in (step - 1, step))

    def objective(y: np.ndarray) -> float:
        loss = np.mean((problem.a[client] @ y - problem.b[client]) ** 2) / 2
        distance = np.linalg.norm(y - X)
        return float(loss - G @ y + alpha / 2 * (distance**2 if squared else distance))

    h = 1e-5
    numeric = [(objective(y + h * e) - objective(y - h * e)) / (2 * h) for e in np.eye(3)]
    assert np.allclose((y - after) / lr, numeric, rtol=0, atol=1e-8)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1, 1e3])
def test_distance_and_clipping_are_those_of_all_layers_together(squared: bool, clip: float | None) -> None:
    """Second step of a network of four tensors: its loss's gradient, and alpha times what the layers have moved."""
    module, draws = smooth_module(0.5), torch.Generator().manual_seed(0)
    data = ClientData(torch.randn(6, 4, generator=draws, dtype=torch.float64), torch.arange(6) % 3)
    work, algorithm = Work(module, torch.device("cpu")), FedDyn(2.0, clip, squared)
    replies = [reply_of(algorithm, smooth_module(0.5), data, LocalSGD(k, FULL)) for k in (1, 2)]
    x = work.initial
    y, after = (x.buffer + flat(reply.sums, "delta").buffer for reply in replies)
    work.load(Flat(x.layout, y))
    loss = module.training_step((data.x, data.y), 0)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])
    distance = torch.linalg.vector_norm(y - x.buffer)
    whole = gradient + (2.0 * (y - x.buffer) if squared else (y - x.buffer) / distance)
    factor = 1.0 if clip is None else min(1.0, clip / float(torch.linalg.vector_norm(whole)))
    assert torch.allclose((y - after) / 0.5, factor * whole, rtol=1e-4, atol=1e-9)
    assert (factor < 0.9) == (clip == 0.1)
