"""zeta^2, sigma^2 and delta^2 against closed forms, a slow double, and what must make them vanish or fall.

And from parts of the data: unbiased, which they are not without the correction.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

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
from fedcommons.core.local import LocalSGD
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients, Rows
from fedcommons.federation.evaluation import ModelTask
from fedcommons.tensors import Flat

if TYPE_CHECKING:
    from conftest import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

ALGORITHM = FedAvg()


W = np.array([0.5, -1.0, 2.0])
"""Where least squares are measured."""


def _measure(
    federation: "Federation",
    which: str = "own",
    blocks: int = 2,
    model: Flat | None = None,
    part: Part | None = None,
) -> Moments:
    executor, n_sets = federation.serial(ALGORITHM), len(clients_of(federation.data, which))
    return moments(executor, ModelTask(model or federation.model), which, n_sets, blocks, part)


def _values(found: Moments) -> tuple[float, float, float]:
    return found.zeta_sq, found.sigma_sq, found.sigma_avg_sq


def _share(federation: "Federation", sizes: list[int], order: np.ndarray) -> "Federation":
    """The same examples dealt anew, in this order."""
    rows = [order[a:b] for a, b in pairwise(np.cumsum([0, *sizes]))]
    clients = Clients(federation.data.clients.store, rows)
    return type(federation)(RunData(clients, clients, {}), federation.module)


def _with_pool(problem: "LeastSquares", n: int) -> tuple["Federation", Flat]:
    """The first ``n`` sets are the clients' data, the others the pool; and the model W."""
    federation = problem.federation(0.1)
    sets, model = federation.data.clients, Flat(federation.model.layout, torch.from_numpy(W))
    return replace(federation, data=RunData(sets[:n], sets[:n], {}, sets[n:])), model


def _sq_spread(each: np.ndarray) -> float:
    """Mean squared distance of the rows from their mean."""
    return np.square(each - each.mean(0)).sum(1).mean()


@pytest.mark.parametrize(("n", "sizes"), [(3, (8, 8, 8, 5, 5)), (3, (1, 30, 5, 2, 40)), (1, (4, 3))])
def test_closed_forms_on_least_squares(n: int, sizes: tuple[int, ...], least_squares: "Problem") -> None:
    """A sample's gradient is a (<a, w> - b); unequal clients count alike, but for what is pooled."""
    problem = least_squares(sizes=sizes)
    per_sample = [a * (a @ W - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
    means = np.stack([g.mean(0) for g in per_sample])
    assert np.allclose(means, problem.gradients(W))
    in_pool = np.concatenate(per_sample[n:])
    federation, model = _with_pool(problem, n)
    own, pool = (_measure(federation, which, model=model) for which in ("own", "pool"))
    assert own.zeta_sq == pytest.approx(_sq_spread(means[:n]), rel=1e-12, abs=1e-12)
    assert own.sigma_sq == pytest.approx(np.mean([_sq_spread(g) for g in per_sample[:n]]), rel=1e-12)
    assert own.sigma_avg_sq == pytest.approx(_sq_spread(np.concatenate(per_sample[:n])), rel=1e-12)
    assert pool.sigma_avg_sq == pytest.approx(_sq_spread(in_pool), rel=1e-12)
    shift = np.square(means[:n].mean(0) - in_pool.mean(0)).sum()
    assert delta_sq(own, pool) == pytest.approx(shift, rel=1e-12)


@pytest.mark.parametrize("blocks", [1, 3])
def test_each_client_has_its_own_dissimilarity_and_noise(blocks: int, least_squares: "Problem") -> None:
    problem = least_squares(sizes=(1, 30, 5, 12))
    per_sample = [a * (a @ W - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
    means = np.stack([g.mean(0) for g in per_sample])
    federation, model = _with_pool(problem, 4)
    own, executor = _measure(federation, model=model), federation.serial(ALGORITHM)
    each = zeta_sq_of_each(executor, ModelTask(model), "own", own, blocks)
    assert each == pytest.approx(np.square(means - means.mean(0)).sum(1), rel=1e-12)
    assert each.mean() == pytest.approx(own.zeta_sq, rel=1e-12)
    assert own.sigma_sq_of_each == pytest.approx([_sq_spread(g) for g in per_sample], abs=1e-12)


def test_equals_a_slow_double_on_the_network(digits: "Digits") -> None:
    federation = digits()
    module = copy.deepcopy(federation.module()).double().eval()

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        loss = module.training_step((x, y), 0)
        assert isinstance(loss, Tensor)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    per_client = [
        torch.stack([gradient(rows.x[j : j + 1], rows.y[j : j + 1]) for j in range(len(rows))])
        for rows in federation.data.own
    ]
    means = torch.stack([g.mean(0) for g in per_client])
    for mean, rows in zip(means, federation.data.own, strict=True):
        assert torch.allclose(mean, gradient(rows.x, rows.y), rtol=0, atol=1e-12)  # the gradient of the mean loss
    zeta_sq = (means - means.mean(0)).square().sum(1).mean()
    sigma_sq = torch.stack([(g - g.mean(0)).square().sum(1).mean() for g in per_client]).mean()
    pooled = torch.cat(per_client)
    sigma_avg_sq = (pooled - pooled.mean(0)).square().sum(1).mean()
    found = _measure(federation)
    assert found.zeta_sq == pytest.approx(float(zeta_sq), rel=1e-5)  # its gradients are float32
    assert found.sigma_sq == pytest.approx(float(sigma_sq), rel=1e-5)
    assert found.sigma_avg_sq == pytest.approx(float(sigma_avg_sq), rel=1e-5)


def test_clients_with_one_sample_have_no_noise(digits: "Digits") -> None:
    found = _measure(digits(sizes=(1, 1, 1)))
    assert 0 <= found.sigma_sq < 1e-6 < found.zeta_sq  # its norms are float32


def test_identical_clients_have_no_dissimilarity(digits: "Digits") -> None:
    federation = digits(sizes=(6,))
    found = _measure(_share(federation, [6, 6, 6], np.tile(np.arange(6), 3)))
    assert 0 <= found.zeta_sq < 1e-12 < found.sigma_sq
    assert found.sigma_sq == pytest.approx(_measure(federation).sigma_sq, rel=1e-12)


def test_blocks_only_round(digits: "Digits") -> None:
    federation = digits(sizes=(4, 6, 5, 3, 4))
    whole = _measure(federation, blocks=1)
    for blocks in (2, 3, 50):
        found = _measure(federation, blocks=blocks)
        assert found.zeta_sq == pytest.approx(whole.zeta_sq, rel=1e-12)
        assert found.sigma_sq == whole.sigma_sq  # summed client by client whatever the blocks


def test_iid_clients_differ_less_than_clients_with_classes_of_their_own(digits: "Digits") -> None:
    by_class = digits(sizes=(12, 12, 12, 12, 12))
    iid = _share(by_class, [12] * 5, np.random.default_rng(0).permutation(60))
    a, b = _measure(iid), _measure(by_class)
    assert a.zeta_sq < 0.5 * b.zeta_sq
    # the law of total variance: pooled noise = noise within clients + dissimilarity, however the examples are dealt
    assert a.zeta_sq + a.sigma_sq == pytest.approx(b.zeta_sq + b.sigma_sq, rel=1e-6)


def test_dropout_is_off(digits: "Digits") -> None:
    wet, dry = digits(dropout=0.5), digits(dropout=0.0)
    assert torch.equal(wet.model.buffer, dry.model.buffer)
    executor = wet.serial(ALGORITHM)
    executor.worker.work.module.train()  # as the last client left it
    found = moments(executor, ModelTask(wet.model), "own", 5, 2)
    assert _values(found) == _values(_measure(dry))


def test_own_is_the_clients_real_data_and_train_what_it_trains_on(digits: "Digits") -> None:
    a = digits(sizes=(6, 6, 6))
    b = _share(a, [6, 6, 6], np.random.default_rng(0).permutation(18))
    both = type(a)(RunData(a.data.clients, b.data.clients, {}), a.module)
    assert _values(_measure(both, "train")) == _values(_measure(a))
    assert _values(_measure(both, "own")) == _values(_measure(b))
    assert _values(_measure(a)) != _values(_measure(b))


def test_measuring_between_rounds_changes_no_bit(digits: "Digits") -> None:
    federation = digits(dropout=0.3)
    plan, executor = federation.plan(2), federation.serial(ALGORITHM)
    first = federation.play(ALGORITHM, federation.plan(1), executor)[-1][0]
    before = first.model.buffer.clone()
    moments(executor, ModelTask(first.model), "own", 5, 2)
    assert torch.equal(first.model.buffer, before)
    then = federation.play(ALGORITHM, plan, executor, start=first)[-1][0]
    straight = federation.play(ALGORITHM, plan)[-1][0]
    assert torch.equal(then.model.buffer, straight.model.buffer)


def test_iid_clients_differ_by_what_sampling_leaves_as_one_over_their_size(digits: "Digits") -> None:
    """E zeta^2 = sigma_avg^2 (N - 1)/(N n - 1) over the ways to deal N n examples to N clients."""
    population = digits(sizes=(120,) * 5, linear=True)
    n_clients, sizes, means = 4, (8, 32, 128), []
    for n in sizes:
        found = []
        for seed in range(24):
            order = np.random.default_rng(seed).permutation(600)[: n_clients * n]
            found.append(_measure(_share(population, [n] * n_clients, order)))
        ratios = [m.zeta_sq / m.sigma_avg_sq * (n_clients * n - 1) / (n_clients - 1) for m in found]
        assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios) / len(ratios) ** 0.5
        means.append(np.mean([m.zeta_sq for m in found]))
    slope = np.polyfit(np.log(sizes), np.log(means), 1)[0]
    assert abs(slope + 1) < 0.1


@pytest.mark.parametrize("samples", [16, 27, 100])
def test_parts_are_disjoint_and_together_as_many_as_were_asked_for(samples: int) -> None:
    parts = [Part(samples, k, seed=3).rows("own", 5, 100).tolist() for k in range(PARTS)]
    assert all(2 <= len(part) == len(set(part)) for part in parts)
    assert not any(set(a) & set(b) for a, b in combinations(parts, 2))
    assert {len(part) for part in parts} <= {samples // PARTS, -(-samples // PARTS)}
    assert sum(map(len, parts)) == samples


def test_parts_are_drawn_anew_for_each_seed_set_and_client() -> None:
    def rows(seed: int, which: str, client: int) -> list[int]:
        return Part(16, 0, seed).rows(which, client, 1000).tolist()

    keys = [(0, "own", 0), (1, "own", 0), (0, "train", 0), (0, "own", 1)]
    assert len({tuple(rows(*key)) for key in keys}) == len(keys)
    assert rows(*keys[0]) == rows(*keys[0])


@pytest.mark.parametrize(("samples", "n"), [(16, 15), (1000, 15), (16, 1)])
def test_a_client_too_small_to_be_cut_is_measured_whole(samples: int, n: int) -> None:
    assert all(Part(samples, k, seed=0).rows("own", 0, n).tolist() == list(range(n)) for k in range(PARTS))


def test_a_part_is_examples_with_their_labels(digits: "Digits") -> None:
    examples = digits(sizes=(5, 40)).data.own[1]
    rows = Part(20, 2, seed=0).rows("own", 1, 40)
    part = Part(20, 2, seed=0).of("own", 1, examples)
    assert torch.equal(part.x, examples.x[rows])
    assert torch.equal(part.y, examples.y[rows])


def test_what_is_subtracted_are_the_squared_standard_errors_of_mean_gradients(least_squares: "Problem") -> None:
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
    assert own.v_of_pooled == pytest.approx((60**2 * v[0] + 40**2 * v[1]) / 110**2)
    assert pool.v_of_pooled == pytest.approx(v_of_pooled)
    pooled = (20 * means[3] + 50 * means[4]) / 70
    assert pool.sq_of_pooled == pytest.approx(np.square(pooled).sum() - v_of_pooled)
    shift = np.square(np.mean(means[:n], 0) - pooled).sum()
    assert delta_sq(own, pool) == pytest.approx(shift - sum(v[:n]) / 9 - v_of_pooled)


def test_where_clients_are_alike_estimates_scatter_around_zero(least_squares: "Problem") -> None:
    alike = _share(least_squares(sizes=(40,)).federation(0.1), [40] * 3, np.tile(np.arange(40), 3))
    found = [_measure(alike, part=Part(16, 0, seed)).zeta_sq for seed in range(100)]
    assert min(found) < 0 < max(found)
    assert abs(np.mean(found)) < 4 * np.std(found) / len(found) ** 0.5


def test_what_was_wholly_measured_is_not_negative_by_rounding(least_squares: "Problem") -> None:
    alike = _share(least_squares(sizes=(5,)).federation(0.1), [5] * 3, np.tile(np.arange(5), 3))
    draw, layout = np.random.default_rng(0), alike.model.layout
    found = [_measure(alike, model=Flat(layout, torch.from_numpy(draw.normal(size=3)))) for _ in range(50)]
    assert min(m.mean_sq - m.sq_of_mean for m in found) < 0
    assert min(m.zeta_sq for m in found) == 0


def _estimates(own: Moments, pool: Moments) -> list[float]:
    noises = own.sigma_sq, own.sigma_avg_sq, pool.sigma_avg_sq
    return [own.sq_of_mean, own.zeta_sq, *noises, delta_sq(own, pool), *mixed(own, pool, 0.3)]


def test_estimates_from_a_part_are_unbiased_and_would_not_be_without_their_correction(least_squares: "Problem") -> None:
    """Two examples of the first client and of the pool; the second client is too small to be cut."""
    federation, model = _with_pool(least_squares(sizes=(60, 10, 40)), 2)
    exact = np.array(_estimates(*(_measure(federation, which, model=model) for which in ("own", "pool"))))
    unbiased, naive = [], []
    for seed in range(300):
        found = [_measure(federation, which, 1, model, Part(16, 0, seed)) for which in ("own", "pool")]
        unbiased.append(_estimates(*found))
        naive.append(_estimates(*(replace(m, v=np.zeros_like(m.v)) for m in found)))
    for estimates, right in ((unbiased, True), (naive, False)):
        error = np.abs(np.mean(estimates, 0) - exact) / (np.std(estimates, 0) / len(estimates) ** 0.5)
        assert ((error < 4) == right).all(), error


# --- weights of examples: f_i = sum_j w_j F(x, xi_j) / sum_j w_j


def _weighted(federation: "Federation", weights: Sequence[np.ndarray]) -> "Federation":
    """The same clients, their examples with these weights."""
    plain = federation.data.clients
    clients = Clients(plain.store, Rows.of(list(plain.rows), weights))
    return replace(federation, data=RunData(clients, clients, {}))


def _at(federation: "Federation") -> Flat:
    return Flat(federation.model.layout, torch.from_numpy(W))


@pytest.mark.parametrize("sizes", [(8, 8, 8), (1, 30, 5)])
def test_closed_forms_with_weights(sizes: tuple[int, ...], least_squares: "Problem") -> None:
    """A sample's gradient is w a (<a, x> - b) with weights of mean 1; the same for training as measured."""
    problem, draw = least_squares(sizes=sizes), np.random.default_rng(3)
    weights = [draw.integers(1, 9, n) / 4 for n in sizes]
    totals = np.array([w.sum() for w in weights])
    scaled = [np.float32(w * (len(w) / w.sum())).astype(float) for w in weights]
    per_sample = [(w * (a @ W - b))[:, None] * a for a, b, w in zip(problem.a, problem.b, scaled, strict=True)]
    means = np.stack([g.sum(0) / n for g, n in zip(per_sample, sizes, strict=True)])
    federation = _weighted(problem.federation(0.1), weights)
    at, found = _at(federation), _measure(federation, model=_at(federation))
    assert found.zeta_sq == pytest.approx(_sq_spread(means), rel=1e-12, abs=1e-12)
    assert found.sigma_sq == pytest.approx(np.mean([_sq_spread(g) for g in per_sample]), rel=1e-12)
    shares = totals / totals.sum()  # of all weight, not of all rows
    sq_mean = sum(s * np.square(g).sum(1).mean() for s, g in zip(shares, per_sample, strict=True))
    assert found.sizes.tolist() == totals.tolist()
    assert found.sigma_avg_sq == pytest.approx(sq_mean - np.square(shares @ means).sum(), rel=1e-12)
    each = zeta_sq_of_each(federation.serial(ALGORITHM), ModelTask(at), "own", found, 2)
    assert each == pytest.approx(np.square(means - means.mean(0)).sum(1), rel=1e-12)
    for client, mean in zip(federation.data.clients, means, strict=True):
        of_loop = federation.training(LocalSGD(1, 3)).work().gradient(at, client).buffer  # in batches, the last smaller
        assert np.allclose(of_loop, mean, rtol=0, atol=1e-12)
    federation = federation.training(LocalSGD(1, 1000))
    ((after, _),) = federation.play(FedAvg(), federation.plan(1))  # a full-batch step from zero
    slopes = [
        -(a * (w * b)[:, None]).sum(0) / n for a, b, w, n in zip(problem.a, problem.b, scaled, sizes, strict=True)
    ]
    assert np.allclose(after.model.buffer.numpy(), -0.1 * np.mean(slopes, 0), rtol=0, atol=1e-12)


def test_the_shift_of_a_pool_is_from_the_weighted_objective(least_squares: "Problem") -> None:
    problem, weights = least_squares(sizes=(6, 4, 9)), [np.repeat([0.0, 1.0], 3), np.full(4, 2.0)]
    federation = problem.federation(0.1)
    sets = federation.data.clients
    clients = Clients(sets.store, Rows.of(list(sets.rows)[:2], weights))
    federation = replace(federation, data=RunData(clients, clients, {}, sets[2:]))
    own, pool = (_measure(federation, which, model=_at(federation)) for which in ("own", "pool"))
    g = problem.gradients(W)
    first = ((problem.a[0] @ W - problem.b[0])[:, None] * problem.a[0])[3:].mean(0)  # the others have no weight
    shift = np.square((first + g[1]) / 2 - g[2]).sum()
    assert delta_sq(own, pool) == pytest.approx(shift, rel=1e-12)


def test_weights_of_one_are_no_weights(digits: "Digits", least_squares: "Problem") -> None:
    plain = least_squares(sizes=(5, 9)).federation(0.1)
    ones = _weighted(plain, [np.ones(5), np.ones(9)])
    assert _values(_measure(plain, model=_at(plain))) == _values(_measure(ones, model=_at(ones)))
    plain = digits()
    ones = _weighted(plain, [np.ones(n) for n in plain.data.clients.sizes])
    assert _values(_measure(ones)) == pytest.approx(_values(_measure(plain)), rel=1e-6)
    ends = [f.play(ALGORITHM, f.plan(2))[-1][0].model.buffer for f in (plain, ones)]
    assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-6)


def test_an_example_that_two_clients_hold_at_half_weight_counts_as_one(least_squares: "Problem") -> None:
    """AGC's 1/d_j: the sum over clients of size times grad f_i is that of the examples, each once; so within a client.

    Two copies within one client change neither its mean gradient nor its size.
    """
    problem = least_squares(sizes=(4, 6))
    plain = problem.federation(0.1)

    def measured(rows: list[list[int]], weights: list[list[float]]) -> Moments:
        clients = Clients(
            plain.data.clients.store, Rows.of([np.array(r) for r in rows], [np.array(w) for w in weights])
        )
        return _measure(replace(plain, data=RunData(clients, clients, {})), model=_at(plain))

    def total(rows: list[list[int]], weights: list[list[float]]) -> Tensor:
        found = measured(rows, weights)
        return found.pooled * found.sizes.sum()

    once = total([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [[1.0] * 4, [1.0] * 6])
    between = total([[0, 1, 2, 3, 9], [4, 5, 6, 7, 8, 9]], [[1.0] * 4 + [0.5], [1.0] * 5 + [0.5]])
    within = total([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [[0.5, 0.5, 1.0, 1.0, 1.0], [1.0] * 6])
    assert torch.allclose(between, once, rtol=1e-6)  # weights of mean 1 are rounded to float32
    assert torch.allclose(within, once, rtol=1e-6)
    assert not torch.allclose(total([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [[1.0] * 5, [1.0] * 6]), once, rtol=1e-3)
    single = measured([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], [[1.0] * 4, [1.0] * 6])
    doubled = measured([[0, 0, 1, 1, 2, 2, 3, 3], [4, 5, 6, 7, 8, 9]], [[0.5] * 8, [1.0] * 6])
    assert doubled.zeta_sq == pytest.approx(single.zeta_sq)
    assert doubled.sizes.tolist() == [4, 6]


def test_a_part_of_the_data_has_the_weights_of_its_examples(least_squares: "Problem") -> None:
    n = 40
    federation = _weighted(least_squares(sizes=(n,)).federation(0.1), [np.arange(n) / 4])
    client = federation.data.clients[0]
    for number in (None, 0, 3):
        part, rows = Part(32, number, 7), Part(32, number, 7).rows("own", 0, n)
        found = part.of("own", 0, client)
        assert found.weight is not None
        assert found.weight.tolist() == np.float32(rows / np.arange(n).mean()).tolist()  # of mean 1 over all examples
        assert torch.equal(found.x, client.x[rows])
    parts = [_measure(federation, part=Part(n, k, 7), model=_at(federation)).mean for k in range(PARTS)]
    whole = _measure(federation, model=_at(federation)).mean
    assert torch.allclose(torch.stack(parts).mean(0), whole, rtol=1e-12)  # equal parts, disjoint, of all
