"""FedProx: K steps, their limit and the server's fixed point, all in closed form on least squares."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedprox import FedProx
from fedcommons.core.local import LocalSGD
from fedcommons.federation.rounds import Standing
from fedcommons.tensors import Flat

if TYPE_CHECKING:
    from fedcommons.testing.federations import LeastSquares

    Problem = Callable[..., LeastSquares]

FULL = 1000  # a batch size above every client's number of examples: full-batch steps


def _quadratic(problem: "LeastSquares", i: int) -> tuple[np.ndarray, np.ndarray]:
    """f_i(y) = y H y / 2 - b y + const."""
    a, b = problem.a[i], problem.b[i]
    return a.T @ a / len(b), a.T @ b / len(b)


@pytest.mark.parametrize("mu", [0.01, 2.0])
@pytest.mark.parametrize("steps", [2, 7])
def test_k_local_steps_in_closed_form(steps: int, mu: float, least_squares: "Problem") -> None:
    """Gradient descent on f_i(y) + (mu/2) ||y - x||^2: y_K = y* + (I - eta (H + mu))^K (x - y*)."""
    problem, lr, eye = least_squares(), 0.1, np.eye(3)
    federation = problem.federation(lr).training(LocalSGD(steps, FULL))
    played = federation.play(FedProx(mu), federation.plan(3))
    x = np.zeros(3)
    for now, _ in played:
        ends = []
        for i in range(4):
            hessian, b = _quadratic(problem, i)
            best = np.linalg.solve(hessian + mu * eye, b + mu * x)
            ends.append(best + np.linalg.matrix_power(eye - lr * (hessian + mu * eye), steps) @ (x - best))
        x = np.mean(ends, axis=0)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-13)


def test_many_local_steps_stop_at_the_fixed_point_of_exact_local_minima(least_squares: "Problem") -> None:
    """x = mean_i (H_i + mu)^-1 (b_i + mu x), which a larger mu brings nearer to the joint optimum.

    A round is an affine map w -> M w + c, so d + 1 rounds tell where it stops.
    """
    problem, eye, distances = least_squares(), np.eye(3), []
    for mu in (1.0, 4.0):
        inverses = [np.linalg.inv(_quadratic(problem, i)[0] + mu * eye) for i in range(4)]
        target = np.mean([inverse @ _quadratic(problem, i)[1] for i, inverse in enumerate(inverses)], axis=0)
        expected = np.linalg.solve(eye - mu * np.mean(inverses, axis=0), target)
        federation, algorithm = problem.federation(0.2).training(LocalSGD(100, FULL)), FedProx(mu)
        plan, ends = federation.plan(1), []
        for begin in (np.zeros(3), *eye):
            start = Standing(0, algorithm.start(Flat(federation.model.layout, torch.from_numpy(begin)), plan.facts, 0))
            ends.append(federation.play(algorithm, plan, start=start)[-1][0].model.buffer.numpy())
        m = np.stack([end - ends[0] for end in ends[1:]], axis=1)
        assert np.allclose(np.linalg.solve(eye - m, ends[0]), expected, rtol=0, atol=1e-7)
        distances.append(np.linalg.norm(expected - problem.optimum))
    assert distances[1] < 0.5 * distances[0]


def test_the_logged_loss_is_the_clients_own(least_squares: "Problem") -> None:
    """Without the proximal term: at x it is f_i(x), here mean b^2 / 2."""
    problem = least_squares()
    federation = problem.federation(0.1).training(LocalSGD(1, FULL))
    _, facts = federation.play(FedProx(mu=3.0), federation.plan(1))[0]
    assert facts["train/loss"] == pytest.approx(np.mean([np.mean(b**2) / 2 for b in problem.b]), rel=1e-6)
