"""FedAvg, FedProx and the server optimizers against closed forms and the papers' recursions on least squares."""

from math import sqrt

import numpy as np
import pytest
from closed_forms import FULL, Problem, fixed_point, play, quadratic, slope, weights_of

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import LocalSGD
from fedcommons.testing.federations import LeastSquares

Adaptive = FedAdagrad | FedAdam | FedYogi
RATE = 0.1
both_weightings = pytest.mark.parametrize("weighting", ["uniform", "samples"])


def test_one_client_in_r_rounds_of_k_steps_takes_r_k_steps(least_squares: Problem) -> None:
    problem, rounds, steps = least_squares(sizes=(8,)), 4, 5
    shrink = np.linalg.matrix_power(np.eye(3) - RATE * quadratic(problem, 0)[0], rounds * steps)
    model = play(problem, FedAvg(), LocalSGD(steps, FULL), rounds, RATE)[-1].model.buffer.numpy()
    assert np.allclose(model, problem.optimum - shrink @ problem.optimum, rtol=0, atol=1e-14)


def test_the_bias_of_the_fixed_point_shrinks_linearly_with_the_learning_rate(least_squares: Problem) -> None:
    """K > 1 local steps on different clients stop at a distance O(lr K) from the optimum; one step has no bias."""
    problem, rates = least_squares(), np.array([0.001, 0.002, 0.004, 0.008])

    def bias(steps: int, lr: float) -> float:
        federation = problem.federation(lr).training(LocalSGD(steps, FULL))
        return float(np.linalg.norm(fixed_point(federation, FedAvg()) - problem.optimum))

    assert abs(slope(rates, [bias(5, lr) for lr in rates]) - 1) < 0.05
    assert bias(1, RATE) < 1e-12


@pytest.mark.parametrize("mu", [0.01, 2.0])
@pytest.mark.parametrize("steps", [2, 7])
def test_k_local_steps_of_fedprox_in_closed_form(steps: int, mu: float, least_squares: Problem) -> None:
    """Gradient descent on f_i(y) + (mu/2) ||y - x||^2: y_K = y* + (I - eta (H + mu))^K (x - y*)."""
    problem, eye, x = least_squares(), np.eye(3), np.zeros(3)
    for now in play(problem, FedProx(mu), LocalSGD(steps, FULL), 3, RATE):
        ends = []
        for i in range(4):
            hessian, c = quadratic(problem, i)
            best = np.linalg.solve(hessian + mu * eye, c + mu * x)
            ends.append(best + np.linalg.matrix_power(eye - RATE * (hessian + mu * eye), steps) @ (x - best))
        x = np.mean(ends, axis=0)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-13)


def test_fedproxs_logged_loss_has_no_proximal_term(least_squares: Problem) -> None:
    """At x it is f_i(x), here mean b^2 / 2; over two steps the mean of f_i at both places."""
    problem, losses = least_squares(), np.zeros((4, 2))
    for i, (a, b) in enumerate(zip(problem.a, problem.b, strict=True)):
        losses[i] = [np.mean((a @ x - b) ** 2) / 2 for x in (np.zeros(3), RATE * a.T @ b / len(b))]
    for steps in (1, 2):
        federation = problem.federation(RATE).training(LocalSGD(steps, FULL))
        _, facts = federation.play(FedProx(mu=3.0), federation.plan(1))[0]
        assert facts["train/loss"] == pytest.approx(losses[:, :steps].mean(), rel=1e-6)


def server_models(problem: LeastSquares, method: Algorithm, rounds: int, weighting: str = "uniform"):
    """With one full-batch step Delta = -0.1 sum_i w_i grad f_i(x)."""
    return [now.model.buffer.numpy() for now in play(problem, method, LocalSGD(1, FULL), rounds, RATE, 1.0, weighting)]


def delta(problem: LeastSquares, x: np.ndarray, weighting: str) -> np.ndarray:
    w = weights_of(weighting, [len(b) for b in problem.b])
    return -RATE * (w / w.sum()) @ problem.gradients(x)


def second_moment(method: Adaptive, v: float, d: float) -> float:
    if isinstance(method, FedAdagrad):
        return v + d * d
    if isinstance(method, FedAdam):
        return method.beta_2 * v + (1 - method.beta_2) * d * d
    return v - (1 - method.beta_2) * d * d * np.sign(v - d * d)


@both_weightings
@pytest.mark.parametrize(
    "method",
    [
        FedAdagrad(), FedAdagrad(0.8, 0.3, 0.2), FedAdam(), FedAdam(0.5, 0.7, 0.05, 0.02), FedYogi(),
        FedYogi(0.5, 0.3, 0.1, 0.05), FedYogi(0.0, 0.0, 0.1, 0.05),
    ],
)  # fmt: skip
def test_algorithm_2_element_by_element(method: Adaptive, weighting: str, least_squares: Problem) -> None:
    problem = least_squares(sizes=(8, 3, 12, 5))
    x, m, v = np.zeros(3), [0.0] * 3, [method.tau**2] * 3
    for model in server_models(problem, method, 8, weighting):
        for j, d in enumerate(delta(problem, x, weighting).tolist()):
            m[j] = method.beta_1 * m[j] + (1 - method.beta_1) * d
            v[j] = second_moment(method, v[j], d)
            x[j] = x[j] + method.server_lr * m[j] / (sqrt(v[j]) + method.tau)
        assert np.allclose(model, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("beta", "server_lr"), [(0.0, 1.0), (0.5, 1.0), (0.9, 0.3)])
def test_fedavgm_is_the_heavy_ball(beta: float, server_lr: float, least_squares: Problem) -> None:
    """x_(t+1) = x_t + eta Delta(x_t) + beta (x_t - x_(t-1)), x_0 = x_(-1) = 0."""
    problem = least_squares()
    before = x = np.zeros(3)
    for model in server_models(problem, FedAvgM(beta, server_lr), 12):
        before, x = x, x + server_lr * delta(problem, x, "uniform") + beta * (x - before)
        assert np.allclose(model, x, rtol=0, atol=1e-13)
