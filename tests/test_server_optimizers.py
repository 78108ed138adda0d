"""FedAvgM, FedAdagrad, FedAdam, FedYogi: the papers' recursions in plain numbers, and what they become in limits."""

from collections.abc import Callable
from math import copysign, sqrt
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import LocalSGD

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

Adaptive = FedAdagrad | FedAdam | FedYogi

RATE = 0.1
"""Of the clients, who make one step with all their examples, so that Delta = -0.1 sum_i w_i grad f_i(x)."""


def _models(problem: "LeastSquares", method: Algorithm, rounds: int, weighting: str = "uniform") -> list[np.ndarray]:
    federation = problem.federation(RATE).training(LocalSGD(1, 1000), weighting)
    return [standing.model.buffer.numpy() for standing, _ in federation.play(method, federation.plan(rounds))]


def _delta(problem: "LeastSquares", x: np.ndarray, weighting: str) -> np.ndarray:
    sizes = [len(b) for b in problem.b]
    w = np.array(sizes if weighting == "samples" else [1.0] * len(sizes))
    return -RATE * (w / w.sum()) @ problem.gradients(x)


def _v(method: Adaptive, v: float, d: float) -> float:
    if isinstance(method, FedAdagrad):
        return v + d * d
    if isinstance(method, FedAdam):
        return method.beta_2 * v + (1 - method.beta_2) * d * d
    sign = 0.0 if v == d * d else copysign(1.0, v - d * d)
    return v - (1 - method.beta_2) * d * d * sign


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(
    "method",
    [
        FedAdagrad(), FedAdagrad(0.8, 0.3, 0.2), FedAdam(), FedAdam(0.5, 0.7, 0.05, 0.02), FedYogi(),
        FedYogi(0.5, 0.3, 0.1, 0.05), FedYogi(0.0, 0.0, 0.1, 0.05),
    ],
)  # fmt: skip
def test_algorithm_2_element_by_element(method: Adaptive, weighting: str, least_squares: "Problem") -> None:
    problem = least_squares(sizes=(8, 3, 12, 5))
    x, m, v = np.zeros(3), [0.0] * 3, [method.tau**2] * 3
    for found in _models(problem, method, 8, weighting):
        delta = _delta(problem, x, weighting)
        for j, d in enumerate(delta.tolist()):
            m[j] = method.beta_1 * m[j] + (1 - method.beta_1) * d
            v[j] = _v(method, v[j], d)
            x[j] = x[j] + method.server_lr * m[j] / (sqrt(v[j]) + method.tau)
        assert np.allclose(found, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("beta", "server_lr"), [(0.0, 1.0), (0.5, 1.0), (0.9, 0.3)])
def test_fedavgm_is_the_heavy_ball(beta: float, server_lr: float, least_squares: "Problem") -> None:
    """x_(t+1) = x_t + eta Delta(x_t) + beta (x_t - x_(t-1)), x_0 = x_(-1) = 0."""
    problem = least_squares()
    before = x = np.zeros(3)
    for found in _models(problem, FedAvgM(beta, server_lr), 12):
        before, x = x, x + server_lr * _delta(problem, x, "uniform") + beta * (x - before)
        assert np.allclose(found, x, rtol=0, atol=1e-13)


def test_fedavgm_converges_at_the_rate_of_its_companion_matrix(least_squares: "Problem") -> None:
    problem, beta = least_squares(), 0.5
    hessian = sum(a.T @ a / len(b) for a, b in zip(problem.a, problem.b, strict=True)) / len(problem.b)
    eye = np.eye(3)
    companion = np.block([[eye - RATE * hessian + beta * eye, -beta * eye], [eye, np.zeros((3, 3))]])
    slowest = np.abs(np.linalg.eigvals(companion)).max()
    errors = [np.linalg.norm(x - problem.optimum) for x in _models(problem, FedAvgM(beta), 160)]
    assert (errors[159] / errors[59]) ** (1 / 100) == pytest.approx(slowest, rel=2e-3)
    assert slowest < 0.98 * (1 - RATE * np.linalg.eigvalsh(hessian)[0])  # and that of FedAvg is slower


def test_fedavgm_without_momentum_is_fedavg_bit_for_bit(digits: "Digits") -> None:
    federation = digits()
    plain, same = (federation.play(m, federation.plan(4)) for m in (FedAvg(), FedAvgM(0.0, 1.0)))
    for (a, _), (b, _) in zip(plain, same, strict=True):
        assert torch.equal(a.model.buffer, b.model.buffer)


@pytest.mark.parametrize("kind", [FedAdagrad, FedYogi])
def test_little_adaptivity_is_fedavg_up_to_the_second_order(
    kind: type[FedAdagrad] | type[FedYogi], least_squares: "Problem"
) -> None:
    """sqrt(v) = tau (1 + O(1/tau^2)), so with eta = 2 tau and beta_1 = 0 the error falls by 4 where tau doubles."""
    problem = least_squares()
    plain = _models(problem, FedAvg(), 3)[-1]
    taus = np.array([4.0, 8.0, 16.0])
    errors = [
        np.linalg.norm(_models(problem, kind(beta_1=0.0, server_lr=2 * tau, tau=tau), 3)[-1] - plain) for tau in taus
    ]
    assert np.polyfit(np.log(taus), np.log(errors), 1)[0] == pytest.approx(-2, abs=0.1)


def test_fedyogi_forgets_more_slowly_than_fedadam(least_squares: "Problem") -> None:
    """After a large v, v of FedAdam falls geometrically, that of FedYogi by Delta^2 at most (the paper's section 3)."""
    problem = least_squares()
    states = {}
    for method in (FedAdam(tau=10.0), FedYogi(tau=10.0)):
        federation = problem.federation(RATE).training(LocalSGD(1, 1000))
        states[type(method)] = federation.play(method, federation.plan(20))[-1][0].state["v"]
    assert (states[FedAdam].buffer < 100 * 0.99**20 + 1).all()
    assert (states[FedYogi].buffer > 100 - 1).all()
