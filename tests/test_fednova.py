"""FedNova: the normaliser in closed form, and the bias of unequal local work that it takes away."""

from dataclasses import replace

import numpy as np
import pytest
from closed_forms import FULL, Problem, fixed_point, optimum, round_from, slope, weights_of

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fednova import FedNova, normaliser
from fedcommons.core.local import LocalSGD
from fedcommons.data.clients import Clients
from fedcommons.testing.federations import Federation, LeastSquares

STEPS = (8, 1, 4, 2)
"""Local steps of the four clients, where they differ."""


def unequal(problem: LeastSquares, lr: float, momentum: float = 0.0) -> Federation:
    """Its clients take ``STEPS`` full-batch steps in place of eight epochs, by the rule of equal work."""
    federation = problem.federation(lr, momentum).training(LocalSGD(8, FULL))
    clients = federation.data.clients
    n_own = [-(-n * steps // 8) for n, steps in zip(clients.sizes, STEPS, strict=True)]
    return replace(federation, data=replace(federation.data, clients=Clients(clients.store, clients.rows, n_own)))


@pytest.mark.parametrize("r", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 100])
def test_the_normaliser_is_the_sum_of_the_weights_of_the_gradients(r: float, steps: int) -> None:
    """Heavy ball: gradient j is in the buffers of steps j, j+1, ..., K with weights 1, r, ..., r^(K-j)."""
    explicit = sum(sum(r ** (k - j) for k in range(j, steps + 1)) for j in range(1, steps + 1))
    assert normaliser(steps, r) == pytest.approx(explicit, rel=1e-11)
    assert r or normaliser(steps, r) == steps


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_takes_the_mean_direction_for_the_mean_number_of_steps(
    weighting: str, least_squares: Problem
) -> None:
    """x - (sum_i w_i a_i)(sum_i w_i d_i), with w_i summing to one, from steps taken by hand."""
    sizes, lr, a = (16, 8, 40, 24), 0.05, np.array(STEPS, float)
    problem, y = least_squares(sizes=sizes), np.zeros((4, 3))
    for i, steps in enumerate(STEPS):
        for _ in range(steps):
            y[i] = y[i] - lr * problem.gradients(y[i])[i]
    w = weights_of(weighting, sizes) / weights_of(weighting, sizes).sum()
    federation = replace(unequal(problem, lr), weighting=weighting)
    result = round_from(federation, FedNova(), np.zeros(3))
    assert np.allclose(result, (w @ a) * (w @ (y / a[:, None])), rtol=0, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_bias_of_unequal_steps_vanishes_with_the_learning_rate(momentum: float, least_squares: Problem) -> None:
    """FedNova's error is of order eta; FedAvg's limit is the optimum of sum_i a_i f_i (objective inconsistency)."""
    problem, rates = least_squares(), np.array([0.0005, 0.001, 0.002])
    wrong = optimum(problem, [normaliser(steps, momentum) for steps in STEPS])
    for method, limit in ((FedNova(), problem.optimum), (FedAvg(), wrong)):
        errors = [np.linalg.norm(fixed_point(unequal(problem, lr, momentum), method) - limit) for lr in rates]
        assert abs(slope(rates, [*map(float, errors)]) - 1) < 0.05
    assert np.linalg.norm(wrong - problem.optimum) > 0.05
