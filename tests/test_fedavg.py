"""FedAvg against closed forms on least squares, where a full-batch step of client i is w <- w - lr (H_i w - c_i)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.local import LocalSGD
from fedcommons.federation.rounds import Standing
from fedcommons.seeds import seed_for
from fedcommons.tensors import Flat

if TYPE_CHECKING:
    from conftest import LeastSquares

    Problem = Callable[..., LeastSquares]

FULL = 1000  # a batch size above every client's number of examples: full-batch steps, in which the order only rounds


def _play(
    problem: "LeastSquares",
    local: LocalSGD,
    rounds: int,
    lr: float,
    start: np.ndarray | None = None,
    weighting: str = "uniform",
) -> np.ndarray:
    """The model after ``rounds``, from ``start`` (else zero)."""
    federation, algorithm = problem.federation(lr).training(local, weighting), FedAvg()
    plan = federation.plan(rounds)
    begin = federation.model if start is None else Flat(federation.model.layout, torch.from_numpy(start.copy()))
    played = federation.play(algorithm, plan, start=Standing(0, algorithm.start(begin, plan.facts, 0)))
    return played[-1][0].model.buffer.numpy()


def test_one_local_step_with_everybody_is_a_step_on_the_pooled_data(least_squares: "Problem") -> None:
    problem, w = least_squares(), np.array([0.3, -1.0, 2.0])
    a, b = np.concatenate(problem.a), np.concatenate(problem.b)
    expected = w
    for _ in range(3):
        expected = expected - 0.2 * a.T @ (a @ expected - b) / len(b)
    assert np.allclose(_play(problem, LocalSGD(1, FULL), 3, 0.2, w), expected, rtol=0, atol=1e-14)


def test_one_client_in_r_rounds_of_k_steps_takes_r_k_steps(least_squares: "Problem") -> None:
    problem, lr, rounds, steps = least_squares(sizes=(8,)), 0.1, 4, 5
    hessian = problem.a[0].T @ problem.a[0] / 8
    shrink = np.linalg.matrix_power(np.eye(3) - lr * hessian, rounds * steps)
    expected = problem.optimum - shrink @ problem.optimum  # from zero
    assert np.allclose(_play(problem, LocalSGD(steps, FULL), rounds, lr), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_weights_are_one_or_the_number_of_samples(weighting: str, least_squares: "Problem") -> None:
    sizes = (2, 9, 4, 17)
    problem, local = least_squares(sizes=sizes), LocalSGD(epochs=2, batch_size=3)
    federation = problem.federation(0.1)
    trained = [
        local.run(federation.work(), federation.model, federation.data.clients[i], seed_for(0, "client", 1, i))[0]
        for i in range(len(sizes))
    ]
    y = np.stack([flat.buffer.numpy() for flat in trained])
    n = np.array(sizes) if weighting == "samples" else np.ones(4)
    expected = (n[:, None] * y).sum(0) / n.sum()
    assert np.allclose(_play(problem, local, 1, 0.1, weighting=weighting), expected, rtol=0, atol=1e-14)
    assert np.abs(y.mean(0) - (np.array(sizes)[:, None] * y).sum(0) / sum(sizes)).max() > 1e-3  # they differ at all


def _fixed_point(problem: "LeastSquares", steps: int, lr: float) -> np.ndarray:
    """Where FedAvg stops. A round is an affine map w -> M w + c, so d + 1 rounds tell M and c."""
    local = LocalSGD(steps, FULL)
    c = _play(problem, local, 1, lr)
    m = np.stack([_play(problem, local, 1, lr, unit) - c for unit in np.eye(len(c))], axis=1)
    found = np.linalg.solve(np.eye(len(c)) - m, c)
    assert np.allclose(_play(problem, local, 1, lr, found), found, rtol=0, atol=1e-13)
    return found


def test_the_bias_of_the_fixed_point_shrinks_linearly_with_the_learning_rate(least_squares: "Problem") -> None:
    """Theory: K > 1 local steps on different clients stop at a distance O(lr K) from the optimum, slope 1."""
    problem, rates = least_squares(), np.array([0.001, 0.002, 0.004, 0.008])
    bias = [np.linalg.norm(_fixed_point(problem, 5, lr) - problem.optimum) for lr in rates]
    slope = np.polyfit(np.log(rates), np.log(bias), 1)[0]
    assert abs(slope - 1) < 0.05
    assert np.linalg.norm(_fixed_point(problem, 1, 0.1) - problem.optimum) < 1e-12  # one step: no bias


def test_identical_clients_are_one_client(least_squares: "Problem") -> None:
    one = least_squares(sizes=(8,))
    many = type(one)(list(one.a) * 5, list(one.b) * 5)
    local = LocalSGD(3, FULL)
    assert np.allclose(_play(many, local, 4, 0.1), _play(one, local, 4, 0.1), rtol=0, atol=1e-14)
