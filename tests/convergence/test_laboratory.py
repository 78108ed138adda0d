"""Convergence parameters at one model: closed forms, a slow double, estimates from parts, what a run logs."""

import copy
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import Digits, Problem, W, model_at_w, sq_spread
from torch import Tensor

from fedcommons import Clients, Experiment, Flat, RunData, UserError
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.convergence import lemma1
from fedcommons.convergence.estimators import PARTS, Moments, Part, clients_of, delta_sq, mixed, moments
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core.evaluation import ModelTask
from fedcommons.federation import checkpoint
from fedcommons.runs import assemble, build, experiment
from fedcommons.testing import Federation, LeastSquares
from fedcommons.tracking.metric_names import NAMES
from fedcommons.tracking.run_folder import read_rounds

ALGORITHM = FedAvg()


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
    sets = federation.data.clients
    return replace(federation, data=RunData(sets[:n], sets[:n], {}, sets[n:])), model_at_w(federation)


def test_equals_a_slow_double_on_the_network_without_dropout(digits: Digits) -> None:
    federation = digits(dropout=0.5)
    module = copy.deepcopy(federation.module()).double().eval()

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        loss = module.training_step((x, y), 0)
        assert isinstance(loss, Tensor)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])

    per_client = [
        np.stack([gradient(rows.x[j : j + 1], rows.y[j : j + 1]).numpy() for j in range(len(rows))])
        for rows in federation.data.real
    ]
    zeta_sq = sq_spread(np.stack([g.mean(0) for g in per_client]))
    expected = zeta_sq, np.mean([sq_spread(g) for g in per_client]), sq_spread(np.concatenate(per_client))
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
    local, pool = (_measure(federation, which, model=model, part=part) for which in ("own", "pool"))
    assert local.v == pytest.approx(v[:n], rel=1e-10)
    assert pool.v == pytest.approx(v[n:], rel=1e-10)
    v_of_pooled = (20 / 70) ** 2 * v[3] + (50 / 70) ** 2 * v[4]
    assert local.v_of_mean == pytest.approx(sum(v[:n]) / 9)
    assert local.v_of_pooled == pytest.approx((60**2 * v[0] + 40**2 * v[1]) / 110**2)
    assert pool.v_of_pooled == pytest.approx(v_of_pooled)
    pooled = (20 * means[3] + 50 * means[4]) / 70
    assert pool.sq_of_pooled == pytest.approx(np.square(pooled).sum() - v_of_pooled)
    shift = np.square(np.mean(means[:n], 0) - pooled).sum()
    assert delta_sq(local, pool) == pytest.approx(shift - sum(v[:n]) / 9 - v_of_pooled)


def test_exact_estimates_of_identical_clients_are_not_below_zero(least_squares: Problem) -> None:
    alike = _share(least_squares(sizes=(5,)).federation(0.1), [5] * 3, np.tile(np.arange(5), 3))
    draw, layout = np.random.default_rng(0), alike.model.layout
    exact = [_measure(alike, model=Flat(layout, torch.from_numpy(draw.normal(size=3)))) for _ in range(50)]
    assert min(m.mean_sq - m.sq_of_mean for m in exact) < 0  # by rounding
    assert min(m.zeta_sq for m in exact) == 0


def _estimates(local: Moments, pool: Moments) -> list[float]:
    noises = local.sigma_sq, local.sigma_avg_sq, pool.sigma_avg_sq
    return [local.sq_of_mean, local.zeta_sq, *noises, delta_sq(local, pool), *mixed(local, pool, 0.3)]


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


ALWAYS = {"gradient_sq", "zeta_sq", "zeta_hat_sq", "sigma_sq", "sigma_hat_sq", "sigma_avg_sq"}


def _commons(federation: Federation, n: int) -> Federation:
    """The first n sets are clients' own, the others the pool, of which each client trains on one."""
    sets = federation.data.clients
    local, pool = sets[:n], sets[n:]
    both = Clients(sets.store, [np.concatenate(rows) for rows in zip(local.rows, pool.rows, strict=True)])
    return replace(federation, data=RunData(both, local, {}, pool))


def _laboratory(federation: Federation, p: float = 0.3, blocks: int = 2, **options: Any) -> Laboratory:
    return Laboratory(federation.serial(ALGORITHM), federation.data, p, blocks, **options)


def _at(federation: Federation) -> ModelTask:
    """Least squares at W."""
    return ModelTask(model_at_w(federation))


@pytest.mark.parametrize("blocks", [1, 2, 50])
def test_every_parameter_has_its_closed_form_on_least_squares(blocks: int, least_squares: Problem) -> None:
    problem, p = least_squares(sizes=(1, 30, 5, 6, 2, 9)), 0.3
    each = [a * (a @ W - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
    local, pool, shared = each[:3], each[3:], np.concatenate(each[3:])
    train = [np.concatenate(both) for both in zip(local, pool, strict=True)]

    def zeta_sq(sets: list[np.ndarray]) -> float:
        return sq_spread(np.stack([g.mean(0) for g in sets]))

    def sigma_sq(sets: list[np.ndarray]) -> float:
        return float(np.mean([sq_spread(g) for g in sets]))

    def smoothness(*sets: np.ndarray) -> float:
        return float(np.linalg.norm(np.concatenate(sets), 2) ** 2 / sum(map(len, sets)))

    gradient = np.mean([g.mean(0) for g in local], 0)
    delta_sq = np.square(gradient - shared.mean(0)).sum()
    l_max, l_pool = max(map(smoothness, problem.a[:3])), smoothness(*problem.a[3:])
    mixtures = [
        (np.concatenate([g, shared]), np.repeat([(1 - p) / len(g), p / len(shared)], [len(g), len(shared)]))
        for g in local
    ]  # a share p of the weight lies on the pool
    lemma = (1 - p) * sigma_sq(local) + p * sq_spread(shared) + p * (1 - p) * (zeta_sq(local) + delta_sq)
    expected = {
        "gradient_sq": np.square(gradient).sum(),
        "zeta_sq": zeta_sq(local), "zeta_hat_sq": zeta_sq(train),
        "zeta_mix_sq": sq_spread(np.stack([w @ g for g, w in mixtures])), "zeta_lemma1_sq": 0.49 * zeta_sq(local),
        "sigma_sq": sigma_sq(local), "sigma_hat_sq": sigma_sq(train),
        "sigma_mix_sq": np.mean([w @ np.square(g - w @ g).sum(1) for g, w in mixtures]), "sigma_lemma1_sq": lemma,
        "sigma_avg_sq": sq_spread(np.concatenate(local)), "sigma_pool_sq": sq_spread(shared), "delta_sq": delta_sq,
        "L_max": l_max, "L_p": max(map(smoothness, problem.a[:3], problem.a[3:])),
        "L_pool": l_pool, "L_lemma1": 0.7 * l_max + 0.3 * l_pool,
    }  # fmt: skip
    federation = _commons(problem.federation(0.1), 3)
    assert _measure(federation, blocks=blocks).sigma_sq == _measure(federation).sigma_sq  # client by client
    result = _laboratory(federation, p, blocks).measure(_at(federation), hessians=True)
    assert result.keys() == expected.keys() == set(NAMES)
    for name, estimate in result.items():
        assert estimate.value == pytest.approx(expected[name], rel=5e-3 if name[0] == "L" else 1e-12), name
        assert estimate.standard_error == 0


@pytest.mark.ray
def test_ray_actors_measure_the_bits_of_one_process(digits: Digits, ray_session: None) -> None:
    from fedcommons.federation.ray_executor import RayActors

    federation = _commons(digits(sizes=(20, 26, 25, 13, 17, 24), dropout=0.3), 3)
    at, executor = ModelTask(federation.model), RayActors(federation.build(ALGORITHM), federation.data, 2, 0)
    try:
        for samples in (None, 16):
            options = {"p": 0.3, "blocks": 3, "samples": samples}
            serial = Laboratory(federation.serial(ALGORITHM), federation.data, **options).measure(at, hessians=True)
            assert Laboratory(executor, federation.data, **options).measure(at, hessians=True) == serial
    finally:
        executor.close()


def test_standard_errors_are_of_the_mean_over_parts_and_l_is_of_all_parts_together(least_squares: Problem) -> None:
    problem, parts = least_squares(sizes=(60, 40, 10)), [Part(32, k, 7) for k in range(8)]
    federation = problem.federation(0.1)
    laboratory, at = _laboratory(federation, samples=32, seed=7), _at(federation)
    values, result = [laboratory.moments(at, "own", part).zeta_sq for part in parts], laboratory.measure(at, True)
    zeta_sq = result["zeta_sq"]
    assert zeta_sq.value == pytest.approx(np.mean(values))
    assert zeta_sq.standard_error == pytest.approx(np.std(values, ddof=1) / 8**0.5)
    rows = [np.unique(np.concatenate([part.rows("own", i, len(a)) for part in parts])) for i, a in enumerate(problem.a)]
    expected = max(np.linalg.norm(a[r], 2) ** 2 / len(r) for a, r in zip(problem.a, rows, strict=True))
    assert result["L_max"].value == pytest.approx(expected, rel=5e-3)
    assert result["L_max"].standard_error == 0


def test_measuring_all_samples_is_exact_and_bytes_by_hand(least_squares: Problem, digits: Digits) -> None:
    """Three weights of 8 bytes come down; for each data set and part they go up, and two numbers or with L three."""
    problem = least_squares(sizes=(20, 30, 16, 14))
    alone, shared = problem.federation(0.1), _commons(problem.federation(0.1), 2)
    at, whole = _at(shared), _laboratory(shared)
    for samples in (44, 1000):
        laboratory = _laboratory(shared, samples=samples)
        assert not laboratory.subsampled
        assert laboratory.measure(at, hessians=True) == whole.measure(at, hessians=True)
    assert _laboratory(shared, samples=43).subsampled  # client 1 trains on 44
    assert _laboratory(alone).nbytes(at) == 4 * (24 + 5 * 8)
    assert _laboratory(alone).nbytes(at, hessians=True) == 4 * (24 + 6 * 8)
    assert whole.nbytes(at) == laboratory.nbytes(at) == 2 * (24 + 2 * 5 * 8)
    assert _laboratory(shared, samples=16).nbytes(at, hessians=True) == 2 * (24 + 2 * (8 * 5 * 8 + 8))
    network = digits(batch_norm=True)
    at, n = ModelTask(network.model, network.work().buffers), network.model.layout.size
    assert _laboratory(network).nbytes(at) == 5 * (4 * n + 4 * 14 + 8 * (n + 2))  # 14 buffers
    assert _laboratory(network).measure(at).keys() == ALWAYS
    with pytest.raises(ValueError, match="no example is shared"):
        _laboratory(network).moments(at, "pool")


SHUFFLED = {"sharing.setting": "shuffled_real", "sharing.p": 0.5}


def _config(tmp_path: Path, **values: Any) -> Experiment:
    short = {"federation.rounds": 3, "measure.every": 2, "client.epochs": 1, "tracking.wandb": "off",
             "model.name": "linear", "seed": 5, "artifacts": str(tmp_path / "artifacts")}  # fmt: skip
    return presets.experiment("smoke", "digits", short | values)


@pytest.mark.parametrize("samples", [None, 16])
@pytest.mark.long
def test_a_run_logs_the_laboratorys_values_and_trains_as_without(samples: int | None, tmp_path: Path) -> None:
    values = SHUFFLED | {"model.name": "cnn", "model.batch_norm": True, "federation.blocks": 2}
    values |= {} if samples else {"data.limit": 60, "model.channels": (2, 4)}  # second derivatives take long
    config = _config(tmp_path, **values, **{"measure.samples": samples, "measure.smoothness": not samples})
    summary = experiment.run(config, tmp_path / "run")
    last, lines = checkpoint.load_latest(tmp_path / "run" / "checkpoints"), read_rounds(tmp_path / "run")
    assert last is not None
    ready = assemble.assemble(build.build(config))
    at = ModelTask(last.model, last.buffers)
    laboratory = Laboratory(ready.executor(), ready.data, ready.shared.p, config.federation.blocks, samples, seed=5)
    result = laboratory.measure(at, hessians=not samples)
    expected = {f"convergence/{name}": e.value for name, e in result.items()}
    if samples:
        expected |= {f"convergence/{name}_se": e.standard_error for name, e in result.items()}
        assert all(e.standard_error > 0 for e in result.values())
    expected["convergence/bytes"] = laboratory.nbytes(at, hessians=not samples)
    assert {name: value for name, value in lines[-1].items() if name.startswith("convergence/")} == expected
    measured = [line["round"] for line in lines if "convergence/zeta_sq" in line]
    assert measured == [r for r, _ in summary["zeta_sq"]] == [0, 2, 3]
    experiment.run(_config(tmp_path, **values, **{"measure.every": 0}), tmp_path / "plain")
    others = [{name: v for name, v in line.items() if not name.startswith("convergence/")} for line in lines]
    assert others == read_rounds(tmp_path / "plain")


def test_a_share_outside_0_and_1_is_refused() -> None:
    for p in (-0.01, 1.01):
        for formula, numbers in ((lemma1.zeta_sq, [1.0]), (lemma1.smoothness, [1.0] * 2), (lemma1.sigma_sq, [1.0] * 4)):
            with pytest.raises(UserError, match=r"p, .*must lie in \[0, 1\]"):
                formula(p, *numbers)
