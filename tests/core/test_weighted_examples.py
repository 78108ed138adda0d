"""Examples with weights: f_i = sum_j w_j F(x, xi_j) / sum_j w_j, in measurements and in training."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from closed_forms import W, model_at_w, sq_spread

from fedcommons import LocalSGD, RunData
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.convergence.estimators import PARTS, Moments, Part, clients_of, delta_sq, moments
from fedcommons.core.evaluation import ModelTask
from fedcommons.data.clients import Clients, Rows
from fedcommons.testing import Federation, least_squares

ALGORITHM = FedAvg()


def _measure(federation: Federation, which: str = "own", part: Part | None = None) -> Moments:
    executor, n_sets = federation.serial(ALGORITHM), len(clients_of(federation.data, which))
    return moments(executor, ModelTask(model_at_w(federation)), which, n_sets, 2, part)


def _weighted(federation: Federation, weights: Sequence[np.ndarray]) -> Federation:
    """The same clients, their examples with these weights."""
    plain = federation.data.clients
    clients = Clients(plain.store, Rows.from_lists(list(plain.rows), weights))
    return replace(federation, data=RunData(clients, clients, {}))


def test_closed_forms_with_weights() -> None:
    """A sample's gradient is w a (<a, x> - b) with weights of mean 1; the same for training as measured."""
    sizes = 1, 30, 5
    problem, draw = least_squares(sizes=sizes), np.random.default_rng(3)
    weights = [draw.integers(1, 9, n) / 4 for n in sizes]
    totals = np.array([w.sum() for w in weights])
    scaled = [np.float32(w * (len(w) / w.sum())).astype(float) for w in weights]
    per_sample = [(w * (a @ W - b))[:, None] * a for a, b, w in zip(problem.a, problem.b, scaled, strict=True)]
    means = np.stack([g.sum(0) / n for g, n in zip(per_sample, sizes, strict=True)])
    federation = _weighted(problem.federation(0.1), weights)
    at, moments = model_at_w(federation), _measure(federation)
    assert moments.zeta_sq == pytest.approx(sq_spread(means), rel=1e-12, abs=1e-12)
    assert moments.sigma_sq == pytest.approx(np.mean([sq_spread(g) for g in per_sample]), rel=1e-12)
    shares = totals / totals.sum()  # of all weight, not of all rows
    assert moments.sizes.tolist() == totals.tolist()
    factor = shares * sum(sizes) / np.array(sizes)  # weights of mean 1 over all examples, not over each client's
    together = np.concatenate([f * g for f, g in zip(factor, per_sample, strict=True)])
    assert moments.sigma_avg_sq == pytest.approx(sq_spread(together), rel=1e-12)
    assert moments.pooled.numpy() == pytest.approx(shares @ means, rel=1e-12)
    for client, mean in zip(federation.data.clients, means, strict=True):
        of_loop = federation.training(LocalSGD(1, 3)).work().gradient(at, client).buffer  # in batches, the last smaller
        assert np.allclose(of_loop, mean, rtol=0, atol=1e-12)
    federation = federation.training(LocalSGD(1, 1000))
    ((after, _),) = federation.run(FedAvg(), federation.plan(1))  # a full-batch step from zero
    slopes = [
        -(a * (w * b)[:, None]).sum(0) / n for a, b, w, n in zip(problem.a, problem.b, scaled, sizes, strict=True)
    ]
    assert np.allclose(after.model.buffer.numpy(), -0.1 * np.mean(slopes, 0), rtol=0, atol=1e-12)


def test_the_shift_of_a_pool_is_from_the_weighted_objective_and_weights_of_one_are_no_weights() -> None:
    problem, weights = least_squares(sizes=(6, 4, 9)), [np.repeat([0.0, 1.0], 3), np.full(4, 2.0)]
    federation = problem.federation(0.1)
    sets = federation.data.clients
    clients = Clients(sets.store, Rows.from_lists(list(sets.rows)[:2], weights))
    pooled = replace(federation, data=RunData(clients, clients, {}, sets[2:]))
    g = problem.gradients(W)
    first = ((problem.a[0] @ W - problem.b[0])[:, None] * problem.a[0])[3:].mean(0)  # the others have no weight
    shift = delta_sq(_measure(pooled), _measure(pooled, "pool"))
    assert shift == pytest.approx(np.square((first + g[1]) / 2 - g[2]).sum(), rel=1e-12)
    ones = _weighted(federation, [np.ones(n) for n in (6, 4, 9)])
    a, b = _measure(federation), _measure(ones)
    assert (a.zeta_sq, a.sigma_sq, a.sigma_avg_sq) == (b.zeta_sq, b.sigma_sq, b.sigma_avg_sq)


def test_a_part_of_the_data_has_the_weights_of_its_examples() -> None:
    n = 40
    federation = _weighted(least_squares(sizes=(n,)).federation(0.1), [np.arange(n) / 4])
    client = federation.data.clients[0]
    for number in (None, 0, 3):
        part, rows = Part(32, number, 7), Part(32, number, 7).rows("own", 0, n)
        sample = part.select("own", 0, client)
        assert sample.weight is not None
        assert sample.weight.tolist() == np.float32(rows / np.arange(n).mean()).tolist()  # of mean 1 over all examples
        assert torch.equal(sample.x, client.x[rows])
    parts = [_measure(federation, part=Part(n, k, 7)).mean for k in range(PARTS)]
    whole = _measure(federation).mean
    assert torch.allclose(torch.stack(parts).mean(0), whole, rtol=1e-12)  # equal parts, disjoint, of all
