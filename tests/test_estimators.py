"""zeta^2, sigma^2 and delta^2 against closed forms and a slow double; estimates from parts of the data are unbiased."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.convergence.estimators import (
    PARTS,
    Moments,
    Part,
    clients_of,
    delta_sq,
    mixed,
    moments,
    zeta_sq_of_each,
)
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients
from fedcommons.federation.evaluation import ModelTask
from fedcommons.tensors import Flat
from fedcommons.testing import Federation, LeastSquares

Digits = Callable[..., Federation]
Problem = Callable[..., LeastSquares]

ALGORITHM = FedAvg()
W = np.array([0.5, -1.0, 2.0])
"""Where least squares are measured."""


def _measure(
    federation: Federation, which: str = "own", blocks: int = 2, model: Flat | None = None, part: Part | None = None
) -> Moments:
    executor, n_sets = federation.serial(ALGORITHM), len(clients_of(federation.data, which))
    return moments(executor, ModelTask(model or federation.model), which, n_sets, blocks, part)


def _values(result: Moments) -> tuple[float, float, float]:
    return result.zeta_sq, result.sigma_sq, result.sigma_avg_sq


def _share(federation: Federation, sizes: list[int], order: np.ndarray) -> Federation:
    """The same examples, partitioned anew in this order."""
    rows = [order[a:b] for a, b in pairwise(np.cumsum([0, *sizes]))]
    clients = Clients(federation.data.clients.store, rows)
    return Federation(RunData(clients, clients, {}), federation.module)


def _with_pool(problem: LeastSquares, n: int) -> tuple[Federation, Flat]:
    """The first ``n`` sets are the clients' data, the others the pool; and the model W."""
    federation = problem.federation(0.1)
    sets, model = federation.data.clients, Flat(federation.model.layout, torch.from_numpy(W))
    return replace(federation, data=RunData(sets[:n], sets[:n], {}, sets[n:])), model


def _sq_spread(each: np.ndarray) -> float:
    """Mean squared distance of the rows from their mean."""
    return np.square(each - each.mean(0)).sum(1).mean()


@pytest.mark.parametrize(("n", "sizes"), [(3, (8, 8, 8, 5, 5)), (3, (1, 30, 5, 2, 40)), (1, (4, 3))])
def test_closed_forms_on_least_squares(n: int, sizes: tuple[int, ...], least_squares: Problem) -> None:
    """A sample's gradient is a (<a, w> - b); unequal clients count alike, but for what is pooled; blocks only round."""
    problem = least_squares(sizes=sizes)
    per_sample = [a * (a @ W - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
    means = np.stack([g.mean(0) for g in per_sample])
    in_pool = np.concatenate(per_sample[n:])
    federation, model = _with_pool(problem, n)
    own, pool = (_measure(federation, which, model=model) for which in ("own", "pool"))
    noise, pooled = np.mean([_sq_spread(g) for g in per_sample[:n]]), _sq_spread(np.concatenate(per_sample[:n]))
    assert _values(own) == pytest.approx((_sq_spread(means[:n]), noise, pooled), rel=1e-12, abs=1e-12)
    assert pool.sigma_avg_sq == pytest.approx(_sq_spread(in_pool), rel=1e-12)
    shift = np.square(means[:n].mean(0) - in_pool.mean(0)).sum()
    assert delta_sq(own, pool) == pytest.approx(shift, rel=1e-12)
    assert own.sigma_sq_of_each == pytest.approx([_sq_spread(g) for g in per_sample[:n]], abs=1e-12)
    for blocks in (1, 3, 50):
        each = zeta_sq_of_each(federation.serial(ALGORITHM), ModelTask(model), "own", own, blocks)
        assert each == pytest.approx(np.square(means[:n] - means[:n].mean(0)).sum(1), rel=1e-12, abs=1e-12)
        again = _measure(federation, blocks=blocks, model=model)
        assert again.zeta_sq == pytest.approx(own.zeta_sq, rel=1e-12, abs=1e-12)
        assert again.sigma_sq == own.sigma_sq  # summed client by client whatever the blocks


def test_equals_a_slow_double_on_the_network_without_dropout(digits: Digits) -> None:
    federation = digits(dropout=0.5)
    module = copy.deepcopy(federation.module()).double().eval()

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        loss = module.training_step((x, y), 0)
        assert isinstance(loss, Tensor)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    per_client = [
        np.stack([gradient(rows.x[j : j + 1], rows.y[j : j + 1]).numpy() for j in range(len(rows))])
        for rows in federation.data.own
    ]
    for each, rows in zip(per_client, federation.data.own, strict=True):
        assert np.allclose(each.mean(0), gradient(rows.x, rows.y), rtol=0, atol=1e-12)  # of the mean loss
    zeta_sq = _sq_spread(np.stack([g.mean(0) for g in per_client]))
    expected = zeta_sq, np.mean([_sq_spread(g) for g in per_client]), _sq_spread(np.concatenate(per_client))
    assert _values(_measure(federation)) == pytest.approx(expected, rel=1e-5)  # its gradients are float32


def test_own_is_the_clients_real_data_and_train_what_it_trains_on(digits: Digits) -> None:
    a = digits(sizes=(6, 6, 6))
    b = _share(a, [6, 6, 6], np.random.default_rng(0).permutation(18))
    both = Federation(RunData(a.data.clients, b.data.clients, {}), a.module)
    assert _values(_measure(both, "train")) == _values(_measure(a))
    assert _values(_measure(both, "own")) == _values(_measure(b)) != _values(_measure(a))


def test_parts_are_disjoint_keyed_and_a_small_client_is_measured_whole() -> None:
    for samples in (16, 27, 100):
        parts = [Part(samples, k, seed=3).rows("own", 5, 100).tolist() for k in range(PARTS)]
        assert all(2 <= len(part) == len(set(part)) for part in parts)
        assert not any(set(a) & set(b) for a, b in combinations(parts, 2))
        assert {len(part) for part in parts} <= {samples // PARTS, -(-samples // PARTS)}
        assert sum(map(len, parts)) == samples
    keys = [(0, "own", 0), (1, "own", 0), (0, "train", 0), (0, "own", 1)]
    rows = [tuple(Part(16, 0, seed).rows(which, client, 1000).tolist()) for seed, which, client in [*keys, keys[0]]]
    assert len(set(rows)) == len(keys)
    assert rows[0] == rows[-1]
    for samples, n in ((16, 15), (1000, 15), (16, 1)):
        assert all(Part(samples, k, seed=0).rows("own", 0, n).tolist() == list(range(n)) for k in range(PARTS))


def test_what_is_subtracted_are_the_squared_standard_errors_of_mean_gradients(least_squares: Problem) -> None:
    """(1/m - 1/n) times the unbiased variance, of three or so of every client but the third, who is measured whole."""
    problem, n, part = least_squares(sizes=(60, 40, 10, 20, 50)), 3, Part(20, 5, seed=1)
    federation, model = _with_pool(problem, n)
    means, v = [], []
    for number, (a, b) in enumerate(zip(problem.a, problem.b, strict=True)):
        which, client = ("own", number) if number < n else ("pool", number - n)
        rows = part.rows(which, client, len(b))
        each = (a * (a @ W - b)[:, None])[rows]
        means.append(each.mean(0))
        v.append((1 / len(rows) - 1 / len(b)) * each.var(0, ddof=1).sum())
    own, pool = (_measure(federation, which, model=model, part=part) for which in ("own", "pool"))
    assert own.v == pytest.approx(v[:n], rel=1e-10)
    assert pool.v == pytest.approx(v[n:], rel=1e-10)
    v_of_pooled = (20 / 70) ** 2 * v[3] + (50 / 70) ** 2 * v[4]
    assert own.v_of_mean == pytest.approx(sum(v[:n]) / 9)
    assert own.sigma_sq_of_each.mean() == pytest.approx(own.sigma_sq, rel=1e-12)
    assert own.v_of_pooled == pytest.approx((60**2 * v[0] + 40**2 * v[1]) / 110**2)
    assert pool.v_of_pooled == pytest.approx(v_of_pooled)
    pooled = (20 * means[3] + 50 * means[4]) / 70
    assert pool.sq_of_pooled == pytest.approx(np.square(pooled).sum() - v_of_pooled)
    shift = np.square(np.mean(means[:n], 0) - pooled).sum()
    assert delta_sq(own, pool) == pytest.approx(shift - sum(v[:n]) / 9 - v_of_pooled)


def test_exact_estimates_of_identical_clients_are_not_below_zero(least_squares: Problem) -> None:
    alike = _share(least_squares(sizes=(5,)).federation(0.1), [5] * 3, np.tile(np.arange(5), 3))
    draw, layout = np.random.default_rng(0), alike.model.layout
    exact = [_measure(alike, model=Flat(layout, torch.from_numpy(draw.normal(size=3)))) for _ in range(50)]
    assert min(m.mean_sq - m.sq_of_mean for m in exact) < 0  # by rounding
    assert min(m.zeta_sq for m in exact) == 0


def _estimates(own: Moments, pool: Moments) -> list[float]:
    noises = own.sigma_sq, own.sigma_avg_sq, pool.sigma_avg_sq
    return [own.sq_of_mean, own.zeta_sq, *noises, delta_sq(own, pool), *mixed(own, pool, 0.3)]


@pytest.mark.long
def test_estimates_from_a_part_are_unbiased_and_would_not_be_without_their_correction(least_squares: Problem) -> None:
    federation, model = _with_pool(least_squares(sizes=(60, 10, 40)), 2)
    exact = np.array(_estimates(*(_measure(federation, which, model=model) for which in ("own", "pool"))))
    unbiased, naive = [], []
    for seed in range(300):
        result = [_measure(federation, which, 1, model, Part(16, 0, seed)) for which in ("own", "pool")]
        unbiased.append(_estimates(*result))
        naive.append(_estimates(*(replace(m, v=np.zeros_like(m.v)) for m in result)))
    for estimates, right in ((unbiased, True), (naive, False)):
        error = np.abs(np.mean(estimates, 0) - exact) / (np.std(estimates, 0) / len(estimates) ** 0.5)
        assert ((error < 4) == right).all(), error
