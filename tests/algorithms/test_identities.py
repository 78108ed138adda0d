"""FedAvg, FedProx, FedNova and server optimizers in closed form; methods that are one another, bit for bit."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, descended, fixed_point, optimum, play, round_from, slope, weights_of

from fedcommons import Algorithm, Clients, Flat, LocalSGD, flat
from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedbuff import FedBuff
from fedcommons.algorithms.feddf import FedDF
from fedcommons.algorithms.fedgen import FedGEN
from fedcommons.algorithms.fedmix import FedMix
from fedcommons.algorithms.fednova import FedNova, normaliser
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.fedvae import FedVAE
from fedcommons.algorithms.gradient_coding import GradientCoding
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.qfedavg import QFedAvg
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedcommons.federation.rounds import Standing
from fedcommons.testing.federations import Federation, LeastSquares

Adaptive = FedAdagrad | FedAdam | FedYogi
RATE = 0.1


@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize("steps", [2, 7])
def test_k_local_steps_of_fedprox_in_closed_form(steps: int, mu: float, least_squares: Problem) -> None:
    """Gradient descent on f_i(y) + (mu/2) ||y - x||^2."""
    problem, x = least_squares(), np.zeros(3)
    for now in play(problem, FedProx(mu), LocalSGD(steps, FULL), 3, RATE):
        x = np.mean([descended(problem, i, x, x, mu, RATE, steps) for i in range(4)], axis=0)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-13)


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


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(
    "method",
    [FedAdagrad(), FedAdagrad(0.8, 0.3, 0.2), FedAdam(), FedAdam(0.5, 0.7, 0.05, 0.02), FedYogi(),
     FedYogi(0.5, 0.3, 0.1, 0.05), FedYogi(0.0, 0.0, 0.1, 0.05)],
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
def test_fednovas_normaliser_is_the_sum_of_the_weights_of_the_gradients(r: float, steps: int) -> None:
    """Heavy ball: gradient j is in the buffers of steps j, j+1, ..., K with weights 1, r, ..., r^(K-j)."""
    explicit = sum(sum(r ** (k - j) for k in range(j, steps + 1)) for j in range(1, steps + 1))
    assert normaliser(steps, r) == pytest.approx(explicit, rel=1e-11)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fednova_takes_the_mean_direction_for_the_mean_number_of_steps(weighting: str, least_squares: Problem) -> None:
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


@pytest.mark.parametrize(("weighting", "q"), [("uniform", 0.0), ("uniform", 0.5), ("samples", 1.0), ("samples", 5.0)])
def test_q_fedavg_is_the_papers_algorithm_2(weighting: str, q: float, least_squares: Problem) -> None:
    """With L = 1/lr in place; a larger q is fairer after many rounds: the largest loss is smaller."""
    sizes, lr, x = (8, 3, 12, 5), 0.1, np.zeros(3)
    problem, w = least_squares(sizes=sizes), weights_of(weighting, sizes)
    for now in play(problem, QFedAvg(q), LocalSGD(2, FULL), 5, lr, 1.0, weighting):
        f = np.array([((a @ x - b) ** 2).mean() / 2 for a, b in zip(problem.a, problem.b, strict=True)])
        moves = np.stack([x - descended(problem, i, x, x, 0.0, lr, 2) for i in range(4)]) / lr
        h = q * f ** (q - 1) * (moves**2).sum(1) + f**q / lr
        x = x - (w * f**q) @ moves / (w @ h)
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-12)
    if q > 0:
        ends = [server_models(problem, QFedAvg(each), 60)[-1] for each in (0.0, q)]
        worst = [max(((a @ end - b) ** 2).mean() for a, b in zip(problem.a, problem.b, strict=True)) for end in ends]
        assert worst[1] < worst[0]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_bias_of_unequal_steps_vanishes_with_the_learning_rate(momentum: float, least_squares: Problem) -> None:
    """FedNova's error is of order eta; FedAvg's limit is the optimum of sum_i a_i f_i (objective inconsistency)."""
    problem, rates = least_squares(), np.array([0.0005, 0.001, 0.002])
    wrong = optimum(problem, [normaliser(steps, momentum) for steps in STEPS])
    for method, limit in ((FedNova(), problem.optimum), (FedAvg(), wrong)):
        errors = [np.linalg.norm(fixed_point(unequal(problem, lr, momentum), method) - limit) for lr in rates]
        assert abs(slope(rates, [*map(float, errors)]) - 1) < 0.05
    assert np.linalg.norm(wrong - problem.optimum) > 0.05


LOCAL = LocalSGD(epochs=1, batch_size=5, augment=True)


def tiny(
    digits: Digits, weighting: str, local: LocalSGD = LOCAL, method: Algorithm | None = None, **options: Any
) -> Federation:
    return digits(**{"dropout": 0.3, "method": method or FedAvg(), **options}).training(local, weighting)


def course(federation: Federation, algorithm: Algorithm, rounds: int, participation: float = 1.0) -> list[Standing]:
    return [now for now, _ in federation.run(algorithm, federation.plan(rounds, participation))]


def bits(x: Flat) -> bytes:
    return x.buffer.numpy().tobytes()


SMALL_GENERATOR = FedGEN(iterations=2, noise_size=3, hidden=8, batch_size=6, weight=0.0)
EXACT: "dict[str, Algorithm]" = {
    "FedProx(mu=0)": FedProx(mu=0.0), "FedPVR(layers=())": FedPVR(layers=""), "MOON(mu=0)": MOON(mu=0.0),
    "FedAvgM(0, 1)": FedAvgM(0.0, 1.0), "FedGEN(weight=0)": SMALL_GENERATOR, "FedVAE": FedVAE(),
    "Ditto's server": Ditto(), "FedBuff, synchronous": FedBuff(3, 3, refill="step"),
    "QFedAvg(q=0)": QFedAvg(q=0.0), "FedDF(server_steps=0)": FedDF(server_steps=0),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_without_its_term_a_method_is_fedavg_bit_for_bit(name: str, digits: Digits) -> None:
    """In every round, also for clients that sat out in between."""
    method = EXACT[name]
    for weighting in ("uniform", "samples"):
        federation = tiny(digits, weighting, method=method)
        ours, theirs = (course(federation, each, 3, 0.6) for each in (method, FedAvg()))
        assert [bits(now.model) for now in ours] == [bits(now.model) for now in theirs]


ROUNDED: "dict[str, tuple[Algorithm, LocalSGD]]" = {
    "FedMix(mix=0)": (FedMix(mix=0.0), LOCAL),  # it differentiates twice, and a CPU may have other kernels for that
    "FedNova, equal steps": (FedNova(), LocalSGD(3, FULL, augment=True)),
}


@pytest.mark.parametrize(("momentum", "weighting"), [(0.0, "uniform"), (0.9, "samples")])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_method_is_fedavg_up_to_rounding(name: str, momentum: float, weighting: str, digits: Digits) -> None:
    method, local = ROUNDED[name]
    federation = tiny(digits, weighting, local, method, momentum=momentum)
    ours, theirs = (course(federation, each, 2, 0.6) for each in (method, FedAvg()))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.model.buffer, b.model.buffer, rtol=0, atol=2e-6)


def test_gradient_coding_without_stragglers_is_fedavg_weighted_by_sizes(digits: Digits) -> None:
    federation = digits().training(LocalSGD(3, 4), "samples")
    ours, theirs = (course(federation, method, 2)[-1].model.buffer for method in (GradientCoding(), FedAvg()))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_fedpvr_on_all_layers_is_scaffold_bit_for_bit(digits: Digits) -> None:
    """Models, server's and clients' controls."""
    federation = tiny(digits, "samples")
    ours, theirs = (course(federation, each, 3, 0.6) for each in (FedPVR(layers="*"), SCAFFOLD()))
    fedavg = course(federation, FedAvg(), 2, 0.6)
    assert [bits(ours[i].model) == bits(fedavg[i].model) for i in range(2)] == [True, False]  # controls begin at zero
    for a, b in zip(ours, theirs, strict=True):
        assert bits(a.model) == bits(b.model)
        assert bits(flat(a.state, "control")) == bits(flat(b.state, "control"))
        controls, expected = ({i: bits(flat(m, "control")) for i, m in now.memory.items()} for now in (a, b))
        assert controls == expected
