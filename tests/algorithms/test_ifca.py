"""IFCA on two clusters of linear regressions: a plain loop in numpy, the true models, bytes and personal models."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, descended

from fedcommons import LocalSGD, UserError, flat
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.ifca import IFCA
from fedcommons.federation.personal_evaluation import personal_model
from fedcommons.testing.federations import LeastSquares

TRUTH = np.array([[1.0, 2.0, -1.0], [-1.0, 0.5, 2.0]])
CLUSTERS, RATE, STEPS = (0, 1, 1, 0, 1), 0.4, 12


@pytest.fixture
def problem(least_squares: Problem) -> LeastSquares:
    """Five clients of different sizes, without noise in the targets; client i's are those of ``TRUTH[CLUSTERS[i]]``."""
    a = least_squares(sizes=(8, 12, 9, 10, 7)).a
    return LeastSquares(a, [x @ TRUTH[c] for x, c in zip(a, CLUSTERS, strict=True)])


def models(now: Any, k: int = 2) -> np.ndarray:
    return np.stack([flat(now.state, f"model/cluster{j}").buffer.numpy() for j in range(k)])


@pytest.mark.parametrize(
    ("average", "weighting", "participation"),
    [("models", "uniform", 1.0), ("models", "samples", 0.6), ("gradients", "samples", 1.0)],
)
@pytest.mark.long
def test_it_finds_both_true_models(average: str, weighting: str, participation: float, problem: LeastSquares) -> None:
    federation, method = problem.federation(RATE).training(LocalSGD(STEPS, FULL), weighting), IFCA(2, 2.0, average)
    plan = federation.plan(30, participation, seed=4)  # with other initial models, one cluster may take all clients
    start = federation.start(method, plan)
    theta, last = models(start), dict[int, int]()
    w = np.array([len(b) for b in problem.b]) if weighting == "samples" else np.ones(5)
    for now, facts in federation.run(method, plan, start=start):
        joined = range(5) if now.participants is None else now.participants
        residuals = {i: problem.a[i] @ theta.T - problem.b[i][:, None] for i in joined}
        last |= {i: int((r**2).mean(0).argmin()) for i, r in residuals.items()}
        starts = {i: theta[last[i]] for i in joined}
        moves = {i: descended(problem, i, x, x, 0.0, RATE, STEPS) - x for i, x in starts.items()}
        sizes = [sum(last[i] == j for i in joined) for j in range(2)]
        for j in range(2):
            if members := [i for i in joined if last[i] == j]:
                divisor = sum(w[i] for i in (members if average == "models" else joined))
                theta[j] += sum(w[i] * moves[i] for i in members) / divisor
        assert np.allclose(models(now), theta, rtol=0, atol=1e-12)
        assert [facts["server/cluster0"], facts["server/cluster1"]] == sizes
        assert (facts["comm/down_bytes"], facts["comm/up_bytes"]) == (2 * 24 * len(joined), (24 + 8) * len(joined))
        for i in range(5):
            personal, _ = personal_model(method, now, i, keep_buffers=False)
            assert np.allclose(personal.buffer.numpy(), theta[last.get(i, 0)], rtol=0, atol=1e-12)
    order = [last[CLUSTERS.index(c)] for c in range(2)]
    assert np.allclose(theta[order], TRUTH, rtol=0, atol=1e-3)
    assert [last[i] for i in range(5)] == [order[c] for c in CLUSTERS]


def test_one_cluster_is_fedavg_and_equal_initial_models_are_refused(problem: LeastSquares) -> None:
    federation = problem.federation(RATE)
    plan = replace(federation.plan(3, 0.6, blocks=1))
    for (now, facts), (other, others) in zip(*(federation.run(m, plan) for m in (IFCA(1), FedAvg())), strict=True):
        assert np.array_equal(models(now, 1)[0], other.model.buffer.numpy())
        assert facts["train/loss"] == others["train/loss"]
    with pytest.raises(UserError, match=r"^ifca\.spread must be above 0"):
        IFCA(2).start(federation.model, plan.facts, 0)
    with pytest.raises(UserError, match=r"^ifca\.spread must be above 0 with model\.weights"):
        IFCA(2).check({"model.weights": "pretrained.safetensors"})


def test_the_initial_models_are_permutations_of_each_tensor(digits: Digits) -> None:
    model = digits().model
    state = IFCA(3).start(model, digits().plan(1).facts, 0)
    first, second, third = (flat(state, f"model/cluster{j}") for j in range(3))
    assert torch.equal(first.buffer, model.buffer)
    assert not torch.equal(second.buffer, third.buffer)
    for name, values in model.items():
        assert torch.equal(second[name].flatten().sort()[0], values.flatten().sort()[0])
