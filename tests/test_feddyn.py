"""FedDyn on least squares: its local objective, its state and the joint optimum. (alpha -> 0 is not FedAvg.)"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.core.algorithm import Message
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.federation.participation import participants
from fedcommons.federation.rounds import Standing
from fedcommons.seeds import set_default_generator
from fedcommons.tensors import Flat, flat
from lightning_modules import Classifier

if TYPE_CHECKING:
    from fedcommons.testing.federations import LeastSquares

    Problem = Callable[..., LeastSquares]

FULL = 1000  # a batch size above every client's number of examples: full-batch steps, in which the order only rounds
SIZES = (6, 9, 7, 17)
X, G = np.array([0.4, -1.0, 0.7]), np.array([0.3, 0.2, -0.5])  # a server model and a client's g_i
both_weightings = pytest.mark.parametrize("weighting", ["uniform", "samples"])


def _weights(weighting: str) -> np.ndarray:
    return np.array(SIZES, float) if weighting == "samples" else np.ones(4)


def _local(problem: "LeastSquares", client: int, steps: int, lr: float, **options: float | None) -> np.ndarray:
    """The local model after so many full-batch steps from ``X`` with memory ``G``."""
    federation = problem.federation(lr).training(LocalSGD(steps, FULL))
    algorithm, layout = FedDyn(**options), federation.model.layout  # pyright: ignore
    x, g_i = Flat(layout, torch.from_numpy(X.copy())), Flat(layout, torch.from_numpy(G.copy()))
    data = federation.data.clients[client]
    reply = algorithm.client(federation.work(), Message({"model": x}), {"gradient": g_i}, data, 1, 0)
    moved = flat(reply.sums, "delta").buffer.numpy()
    assert reply.memory is not None
    kept = flat(reply.memory, "gradient").buffer.numpy()
    assert np.allclose(kept, G - algorithm.alpha * moved, rtol=0, atol=1e-14)  # g_i <- g_i - alpha (y_i - x)
    return X + moved


def _play(
    problem: "LeastSquares",
    algorithm: FedDyn,
    local: LocalSGD,
    rounds: int,
    lr: float,
    participation: float,
    weighting: str = "uniform",
) -> list[Standing]:
    federation = problem.federation(lr).training(local, weighting)
    return [now for now, _ in federation.play(algorithm, federation.plan(rounds, participation))]


def _gradient_of(now: Standing, client: int) -> np.ndarray:
    """g_i: zero for a client that was never drawn."""
    return flat(now.memory[client], "gradient").buffer.numpy() if client in now.memory else np.zeros(3)


def _optimum(problem: "LeastSquares", weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """Where sum_i weights_i f_i is least."""
    parts = list(zip(weights, problem.a, problem.b, strict=True))
    hessian = np.sum([w * a.T @ a / len(b) for w, a, b in parts], axis=0)
    return np.linalg.solve(hessian, np.sum([w * a.T @ b / len(b) for w, a, b in parts], axis=0))


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("step", [2, 5])
def test_a_local_step_goes_down_the_printed_objective(squared: bool, step: int, least_squares: "Problem") -> None:
    """(y_{k-1} - y_k)/eta is the central difference of f_i(y) - <g_i, y> + (alpha/2) ||y - x||^2 at y_{k-1}.

    Unsquared, ||y - x|| takes the square's place.
    """
    problem, alpha, lr, client = least_squares(sizes=SIZES), 0.8, 0.1, 1
    y, after = (_local(problem, client, k, lr, alpha=alpha, squared=squared, clip=None) for k in (step - 1, step))

    def objective(y: np.ndarray) -> float:
        loss = np.mean((problem.a[client] @ y - problem.b[client]) ** 2) / 2
        distance = np.linalg.norm(y - X)
        return float(loss - G @ y + alpha / 2 * (distance**2 if squared else distance))

    h = 1e-5
    numeric = [(objective(y + h * e) - objective(y - h * e)) / (2 * h) for e in np.eye(3)]
    assert np.allclose((y - after) / lr, numeric, rtol=0, atol=1e-8)


@pytest.mark.parametrize("squared", [True, False])
def test_the_first_step_has_no_proximal_part(squared: bool, least_squares: "Problem") -> None:
    """At y = x, where the unsquared term has no gradient and ours is zero."""
    problem = least_squares(sizes=SIZES)
    y = _local(problem, 2, 1, 0.1, alpha=5.0, squared=squared, clip=None)
    assert np.allclose(y, X - 0.1 * (problem.gradients(X)[2] - G), rtol=0, atol=1e-14)


@pytest.mark.parametrize("clip", [0.05, 0.5])
def test_clipping_bounds_the_whole_gradient_and_keeps_its_direction(clip: float, least_squares: "Problem") -> None:
    """The corrected gradient, not the loss's: with alpha = 50 it is the pull that is too long in the second step."""
    problem, lr = least_squares(sizes=SIZES), 0.1
    first, second = (_local(problem, 1, k, lr, alpha=50.0, clip=clip) for k in (1, 2))
    for y, after in ((X, first), (first, second)):
        whole = problem.gradients(y)[1] - G + 50 * (y - X)
        assert np.linalg.norm(y - after) / lr <= clip * (1 + 1e-9)
        expected = whole * min(1, clip / np.linalg.norm(whole))
        assert np.allclose((y - after) / lr, expected, rtol=1e-5, atol=1e-9)  # torch divides by the norm + 1e-6
    assert np.linalg.norm(problem.gradients(X)[1] - G) > clip


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_distance_and_clipping_are_those_of_all_layers_together(squared: bool, clip: float | None) -> None:
    """Second step of a network of four tensors: its loss's gradient, and alpha times what the layers have moved."""
    set_default_generator("a module for FedDyn")
    module = Classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lr=0.5).double()
    data = ClientData(torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3)
    work = Work(module, torch.device("cpu"))
    x, algorithm, ends = work.initial, FedDyn(2.0, clip, squared), []
    for k in (1, 2):
        work.loop = LocalSGD(k, FULL)
        ends.append(x.buffer + flat(algorithm.client(work, Message({"model": x}), {}, data, 1, 0).sums, "delta").buffer)
    y, after = ends
    work.load(Flat(x.layout, y))
    loss = module.training_step((data.x, data.y), 0)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(module.parameters()))])
    whole = gradient + (2.0 * (y - x.buffer) if squared else (y - x.buffer) / torch.linalg.vector_norm(y - x.buffer))
    factor = 1.0 if clip is None else min(1.0, clip / float(torch.linalg.vector_norm(whole)))
    assert torch.allclose((y - after) / 0.5, factor * whole, rtol=1e-4, atol=1e-9)
    assert clip is None or factor < 0.9


def test_a_short_gradient_is_not_clipped(least_squares: "Problem") -> None:
    problem = least_squares(sizes=SIZES)
    free, bound = (_local(problem, 1, 4, 0.1, alpha=0.5, clip=c) for c in (None, 10.0))
    assert np.allclose(free, bound, rtol=0, atol=1e-14)


def test_first_round_of_two_of_four_by_hand(least_squares: "Problem") -> None:
    """One step of rate 1/8 from zero, u = -(g_a + g_b)/8, alpha = 1/2: mean = u/2, h = -u/8, x = u/2 + u/4."""
    problem = least_squares()
    (now,) = _play(problem, FedDyn(alpha=0.5, clip=None), LocalSGD(1, FULL), 1, 0.125, 0.5)
    drawn = participants(4, 0.5, 0, 1)
    u = -problem.gradients(np.zeros(3))[drawn].sum(0) / 8
    assert len(drawn) == 2
    for name, expected in (("model/mean", u / 2), ("h", -u / 8), ("model", 3 * u / 4)):
        assert np.allclose(flat(now.state, name).buffer.numpy(), expected, rtol=0, atol=1e-14)


@both_weightings
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_follows_the_paper_line_by_line(weighting: str, participation: float, least_squares: "Problem") -> None:
    """Algorithm 1 written out. The mean is over the drawn clients and plain; h divides by the weight of all four."""
    problem, lr, steps, alpha, w = least_squares(sizes=SIZES), 0.1, 3, 0.7, _weights(weighting)
    algorithm, local = FedDyn(alpha, clip=None), LocalSGD(steps, FULL)
    x, h, g = np.zeros(3), np.zeros(3), np.zeros((4, 3))
    for now in _play(problem, algorithm, local, 6, lr, participation, weighting):
        drawn = participants(4, participation, 0, now.round)
        dy = np.zeros((4, 3))
        for i in drawn:
            y = x
            for _ in range(steps):
                y = y - lr * (problem.gradients(y)[i] - g[i] + alpha * (y - x))
            dy[i] = y - x
        mean, h, g = x + w @ dy / w[drawn].sum(), h - alpha * w @ dy / w.sum(), g - alpha * dy
        x = mean - h / alpha
        for name, expected in (("model/mean", mean), ("h", h), ("model", x)):
            assert np.allclose(flat(now.state, name).buffer.numpy(), expected, rtol=0, atol=1e-12)
        assert np.allclose([_gradient_of(now, i) for i in range(4)], g, rtol=0, atol=1e-12)


@both_weightings
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_h_is_the_mean_of_all_clients_gradients(weighting: str, participation: float, least_squares: "Problem") -> None:
    """After every round, over all N clients, those never drawn counted with zero."""
    problem, w = least_squares(sizes=SIZES), _weights(weighting)
    for now in _play(problem, FedDyn(0.5), LocalSGD(2, 3), 5, 0.05, participation, weighting):
        mean = w @ np.array([_gradient_of(now, i) for i in range(4)]) / w.sum()
        assert np.allclose(mean, flat(now.state, "h").buffer.numpy(), rtol=0, atol=1e-13)
        assert np.abs(mean).max() > 1e-3


@both_weightings
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_reaches_the_joint_optimum_of_different_clients(
    weighting: str, participation: float, least_squares: "Problem"
) -> None:
    """That of sum_i f_i, or of sum_i n_i f_i; there both models agree and g_i is the gradient of f_i."""
    problem, w = least_squares(sizes=SIZES), _weights(weighting)
    rounds = 50 if participation == 1 else 110
    best = _optimum(problem, w)
    local, method = LocalSGD(5, FULL), FedDyn(1.0, clip=None)
    found = _play(problem, method, local, rounds, 0.2, participation, weighting)[-1]
    assert np.linalg.norm(found.model.buffer.numpy() - best) < 1e-8
    assert np.linalg.norm(flat(found.state, "model/mean").buffer.numpy() - best) < 1e-8
    for i in range(4):
        assert np.allclose(_gradient_of(found, i), problem.gradients(best)[i], rtol=0, atol=1e-7)
    other = _optimum(problem, _weights("uniform" if weighting == "samples" else "samples"))
    assert np.linalg.norm(best - other) > 1e-2
