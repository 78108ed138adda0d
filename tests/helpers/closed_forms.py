"""Closed forms for tests of algorithms on least squares, f_i(y) = y H_i y / 2 - c_i y, and a smooth module."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons import Algorithm, ClientData, LocalSGD, Message, Reply, Work, set_default_generator
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import EMPTY, Flat, Payload
from fedcommons.testing.federations import Federation, LeastSquares
from lightning_modules import Classifier

Digits = Callable[..., Federation]
Problem = Callable[..., LeastSquares]
"""The types of the fixtures ``digits`` and ``least_squares``."""

FULL = 1000
"""A batch size above every client's number of examples: in full-batch steps, the order affects only rounding."""

W = np.array([0.5, -1.0, 2.0])
"""Weights at which the parameters of least squares are measured."""


def model_at_w(federation: Federation) -> Flat:
    return Flat(federation.model.layout, torch.from_numpy(W))


def sq_spread(each: np.ndarray) -> float:
    """Return the mean squared distance of the rows from their mean."""
    return np.square(each - each.mean(0)).sum(1).mean()


def quadratic(problem: LeastSquares, i: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the Hessian H_i and the vector c_i of client i's loss f_i(y) = y H_i y / 2 - c_i y."""
    a, b = problem.a[i], problem.b[i]
    return a.T @ a / len(b), a.T @ b / len(b)


def descended(
    problem: LeastSquares, i: int, start: np.ndarray, x: np.ndarray, lam: float, lr: float, steps: int
) -> np.ndarray:
    """Return the result of K = ``steps`` steps of gradient descent on f_i(v) + (lam/2) ||v - x||^2 from ``start``.

    In closed form: v_K = v* + (I - lr (H_i + lam I))^K (start - v*), with the minimiser v*.
    """
    hessian, b = quadratic(problem, i)
    pulled = hessian + lam * np.eye(3)
    best = np.linalg.solve(pulled, b + lam * x)
    return best + np.linalg.matrix_power(np.eye(3) - lr * pulled, steps) @ (start - best)


def optimum(problem: LeastSquares, weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the minimiser of sum_i weights_i f_i over the clients' losses f_i."""
    parts = [(w, *quadratic(problem, i)) for i, w in enumerate(weights)]
    return np.linalg.solve(sum(w * h for w, h, _ in parts), sum(w * c for w, _, c in parts))


def weights_of(weighting: str, sizes: Sequence[int]) -> np.ndarray:
    return np.array(sizes, float) if weighting == "samples" else np.ones(len(sizes))


def play(
    problem: LeastSquares, algorithm: Algorithm, local: LocalSGD, rounds: int, lr: float,
    participation: float = 1.0, weighting: str = "uniform",
) -> list[Standing]:  # fmt: skip
    federation = problem.federation(lr).training(local, weighting)
    return [now for now, _ in federation.run(algorithm, federation.plan(rounds, participation))]


def round_from(federation: Federation, algorithm: Algorithm, start: np.ndarray) -> np.ndarray:
    """Return the server model after one round from the model ``start``."""
    plan, model = federation.plan(1), Flat(federation.model.layout, torch.from_numpy(start.copy()))
    played = federation.run(algorithm, plan, start=Standing(0, algorithm.start(model, plan.facts, 0)))
    return played[-1][0].model.buffer.numpy()


def fixed_point(federation: Federation, algorithm: Algorithm, tolerance: float = 1e-12) -> np.ndarray:
    """Return the fixed point of the rounds. A round is an affine map w -> M w + c, so d + 1 rounds give M and c."""
    c = round_from(federation, algorithm, np.zeros(3))
    m = np.stack([round_from(federation, algorithm, unit) - c for unit in np.eye(3)], axis=1)
    point = np.linalg.solve(np.eye(3) - m, c)
    assert np.allclose(round_from(federation, algorithm, point), point, rtol=0, atol=tolerance)
    return point


def slope(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float:
    """Return the order of convergence: the least-squares slope of log y over log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def smooth_module(lr: float, scale: float = 1.0) -> Classifier:
    """Return a float64 MLP with four inputs, five features and three classes; it is differentiable everywhere."""
    set_default_generator("a smooth module")
    module = Classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lr=lr).double()
    module.head = "network.2"
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    return module


def reply_of(
    method: Algorithm, module: LightningModule, data: ClientData, loop: LocalSGD | None = None,
    memory: Payload = EMPTY, x: Flat | None = None, seed: int = 0,
) -> Reply:  # fmt: skip
    """Return a client's reply in round 1 to the model x (default: the module's weights).

    loop: local training; default: one full-batch step.
    """
    work = Work(module, torch.device("cpu"), loop or LocalSGD(1, FULL))
    return method.client(work, Message({"model": x or work.initial}), memory, data, 1, seed)
