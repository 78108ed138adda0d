"""The rate on quadratics: the bound on random ones, how near FedAvg comes to it, and faults that exceed it."""

from dataclasses import dataclass
from math import sqrt

import numpy as np
import pytest

from fedcommons.algorithms.ditto import Ditto
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.one_shot import OneShot
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.convergence.rates import on_quadratics
from fedcommons.core.algorithm import Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.executor import Executor
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat, Payload, add, copy, flat
from fedcommons.testing import rate


def test_fedavg_stays_within_the_bound_on_any_quadratics() -> None:
    """Random Hessians that do not commute, step sizes up to 1/L, any number of steps."""
    draw, shares = np.random.default_rng(0), []
    for _ in range(300):
        n, d, tau = draw.integers(2, 6), draw.integers(1, 5), int(draw.integers(1, 12))
        roots = draw.normal(size=(n, d, d)) * draw.uniform(0, 2, (n, 1, d))
        a = roots @ roots.swapaxes(1, 2)
        gradients = draw.normal(size=(n, d)) * draw.exponential(size=(n, 1))
        gradients -= gradients.mean(0)  # at x* = 0
        smooth, mu = np.linalg.eigvalsh(a).max(), np.linalg.eigvalsh(a.mean(0)).min()
        eta, x = draw.uniform(0.01, 1) / smooth, draw.normal(size=d)
        start, zeta_sq = float(np.linalg.norm(x)), float(np.square(gradients).sum(1).mean())
        for r in range(60):
            error = x @ a.mean(0) @ x / 2
            shares.append(error / on_quadratics(r, eta, tau, zeta_sq, smooth, mu, start))
            y = np.repeat(x[None], n, axis=0)
            for _ in range(tau):
                y = y - eta * (np.einsum("nij,nj->ni", a, y) + gradients)
            x = y.mean(0)
    assert max(shares) <= 1
    assert max(shares) > 0.5


def test_the_bound_is_its_formula_and_a_step_size_above_1_over_L_is_refused() -> None:
    draw = np.random.default_rng(2)
    for tau in (2, 5, 9):
        mu, start, zeta = draw.uniform(0.1, 1), draw.uniform(1, 3), draw.uniform(1, 3)
        smooth = mu + draw.uniform(0.5, 2)
        eta = draw.uniform(0.1, 0.9) / smooth
        phi = (1 - (1 - eta * smooth) ** tau) / (eta * tau * smooth)
        drift = sqrt(smooth / 8) * eta * (tau - 1) * zeta / phi
        first = start + eta * (tau - 1) * zeta * sqrt(smooth / mu) / (2 * phi)
        root = drift + sqrt(smooth / 2) * (1 - phi * eta * tau * mu) ** 3 * first
        assert on_quadratics(3, eta, tau, zeta**2, smooth, mu, start) == pytest.approx(root**2, rel=1e-12)
    assert on_quadratics(10**6, 0.1, 1, 5.0, 1.0, 0.1, 1.0) < 1e-300  # one local step has no drift
    assert on_quadratics(1, 0.5, 1, 0.0, 2.0, 1.0, 1.0) == 0.25
    with pytest.raises(ValueError, match=r"must lie in \(0, 1/L\]"):
        on_quadratics(1, 0.6, 1, 0.0, 2.0, 1.0, 1.0)


@dataclass(frozen=True)
class Faster(FedAvg):
    """Local steps are longer than the learning rate."""

    times: float

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x = flat(message.common, "model")
        return weighted_reply(x, work.local(x, data, seed, lr=self.times * work.rates[0]), work.weight(data))


def shifted(state: State) -> State:
    model = copy(flat(state, "model"))
    return {**state, "model": add(model, Flat(model.layout, model.buffer.new_ones(len(model.buffer))), 1e-3)}


@dataclass(frozen=True)
class Biased(FedAvg):
    """The server adds something to the mean."""

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return shifted(super().merge(executor, state, total, replies, round, seed))


@dataclass(frozen=True)
class BiasedSCAFFOLD(SCAFFOLD):
    """The same of a method that corrects drift."""

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return shifted(super().merge(executor, state, total, replies, round, seed))


@pytest.mark.long
def test_fedavg_converges_as_the_corollary_says_and_a_changed_step_or_a_bias_exceeds_it() -> None:
    assert "is 0.48 times" in rate.within_the_bound(FedAvg())
    assert rate.not_judged(FedAvg()) is None
    assert all(rate.not_judged(method) for method in (OneShot(), Ditto(), FedDM()))  # outside the corollary
    for wrong, zeta in ((Faster(1.5), 10), (Faster(0.5), 0)):
        assert np.max(np.divide(rate.errors(wrong, zeta), rate.bounds(zeta))) > 1
    with pytest.raises(AssertionError, match="at zeta 0 after round"):
        rate.within_the_bound(Biased())


@pytest.mark.long
def test_a_method_that_corrects_drift_reaches_the_minimiser_linearly() -> None:
    assert rate.is_linear(SCAFFOLD()).startswith("linear to the exact minimiser")
    with pytest.raises(AssertionError, match="which is not linear"):
        rate.is_linear(BiasedSCAFFOLD())
