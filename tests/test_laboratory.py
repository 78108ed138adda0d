"""All parameters at one model: closed forms, standard errors, bytes, what a run logs; Lemma 1 on exact mixtures."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.convergence import lemma1
from fedcommons.convergence.estimators import Part, delta_sq, mixed
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.convergence.names import NAMES
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients
from fedcommons.errors import UserError
from fedcommons.federation import checkpoint
from fedcommons.federation.evaluation import ModelTask
from fedcommons.runs import build, experiment
from fedcommons.tensors import Flat
from fedcommons.testing import Federation, LeastSquares
from fedcommons.tracking.run_folder import read_rounds

Digits = Callable[..., Federation]
Problem = Callable[..., LeastSquares]
ALGORITHM = FedAvg()
W = np.array([0.5, -1.0, 2.0])

ALWAYS = {"gradient_sq", "zeta_sq", "zeta_hat_sq", "sigma_sq", "sigma_hat_sq", "sigma_avg_sq"}


def _commons(federation: Federation, n: int) -> Federation:
    """The first n sets are clients' own, the others the pool, of which each client trains on one."""
    sets = federation.data.clients
    own, pool = sets[:n], sets[n:]
    both = Clients(sets.store, [np.concatenate(rows) for rows in zip(own.rows, pool.rows, strict=True)])
    return replace(federation, data=RunData(both, own, {}, pool))


def _laboratory(federation: Federation, p: float = 0.3, blocks: int = 2, **options: Any) -> Laboratory:
    return Laboratory(federation.serial(ALGORITHM), federation.data, p, blocks, **options)


def _at(federation: Federation) -> ModelTask:
    """Least squares at W."""
    return ModelTask(Flat(federation.model.layout, torch.from_numpy(W)))


def _spread(each: np.ndarray) -> float:
    return np.square(each - each.mean(0)).sum(1).mean()


@pytest.mark.parametrize("sizes", [(8, 8, 8, 4, 4, 4), (1, 30, 5, 6, 2, 9)])
def test_every_parameter_has_its_closed_form_on_least_squares(sizes: tuple[int, ...], least_squares: Problem) -> None:
    problem, p = least_squares(sizes=sizes), 0.3
    each = [a * (a @ W - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
    own, pool, shared = each[:3], each[3:], np.concatenate(each[3:])
    train = [np.concatenate(both) for both in zip(own, pool, strict=True)]

    def zeta_sq(sets: list[np.ndarray]) -> float:
        return _spread(np.stack([g.mean(0) for g in sets]))

    def sigma_sq(sets: list[np.ndarray]) -> float:
        return float(np.mean([_spread(g) for g in sets]))

    def smoothness(*sets: np.ndarray) -> float:
        return float(np.linalg.norm(np.concatenate(sets), 2) ** 2 / sum(map(len, sets)))

    gradient = np.mean([g.mean(0) for g in own], 0)
    delta_sq = np.square(gradient - shared.mean(0)).sum()
    l_max, l_pool = max(map(smoothness, problem.a[:3])), smoothness(*problem.a[3:])
    sigma_mix_sq = (1 - p) * sigma_sq(own) + p * _spread(shared) + p * (1 - p) * (zeta_sq(own) + delta_sq)
    expected = {
        "gradient_sq": np.square(gradient).sum(),
        "zeta_sq": zeta_sq(own), "zeta_hat_sq": zeta_sq(train),
        "zeta_mix_sq": 0.49 * zeta_sq(own), "zeta_lemma1_sq": 0.49 * zeta_sq(own),
        "sigma_sq": sigma_sq(own), "sigma_hat_sq": sigma_sq(train),
        "sigma_mix_sq": sigma_mix_sq, "sigma_lemma1_sq": sigma_mix_sq,
        "sigma_avg_sq": _spread(np.concatenate(own)), "sigma_pool_sq": _spread(shared), "delta_sq": delta_sq,
        "L_max": l_max, "L_p": max(map(smoothness, problem.a[:3], problem.a[3:])),
        "L_pool": l_pool, "L_lemma1": 0.7 * l_max + 0.3 * l_pool,
    }  # fmt: skip
    federation = _commons(problem.federation(0.1), 3)
    result = _laboratory(federation, p).measure(_at(federation), hessians=True)
    assert result.keys() == expected.keys() == set(NAMES)
    for name, estimate in result.items():
        assert estimate.value == pytest.approx(expected[name], rel=5e-3 if name[0] == "L" else 1e-12), name
        assert estimate.standard_error == 0


@pytest.mark.ray
def test_ray_actors_measure_the_bits_of_one_process(digits: Digits, ray_session: None) -> None:
    from fedcommons.federation.ray_actors import RayActors

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
    zeta_sq, half = result["zeta_sq"], 2.365 * np.std(values, ddof=1) / 8**0.5  # t with 7 degrees of freedom
    assert zeta_sq.value == pytest.approx(np.mean(values))
    assert zeta_sq.interval == pytest.approx((zeta_sq.value - half, zeta_sq.value + half), rel=1e-3)
    rows = [np.unique(np.concatenate([part.rows("own", i, len(a)) for part in parts])) for i, a in enumerate(problem.a)]
    assert [len(r) for r in rows] == [32, 32, 10]
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
    work, n = network.work(), network.model.layout.size
    assert len(work.buffers.buffer) == 14  # mean and variance of 3 and 4 channels
    assert _laboratory(network).nbytes(ModelTask(network.model, work.buffers)) == 5 * (4 * n + 4 * 14 + 8 * (n + 2))
    assert _laboratory(network).measure(ModelTask(network.model, work.buffers)).keys() == ALWAYS
    with pytest.raises(ValueError, match="commons"):
        _laboratory(network).moments(ModelTask(network.model, work.buffers), "pool")


SHUFFLED = {"sharing.setting": "shuffled_real", "sharing.p": 0.5}


def _config(tmp_path: Path, **values: Any) -> Experiment:
    short = {"federation.rounds": 3, "measure.every": 2, "client.epochs": 1, "tracking.wandb": "off",
             "model.name": "linear", "seed": 5, "artifacts": str(tmp_path / "artifacts")}  # fmt: skip
    return presets.experiment("smoke", "digits", short | values)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"sharing.setting": "local_synthetic"}, ALWAYS),
        (SHUFFLED | {"measure.smoothness": True}, set(NAMES)),
    ],
)
@pytest.mark.long
def test_a_run_logs_what_its_sharing_setting_has(values: dict[str, Any], names: set[str], tmp_path: Path) -> None:
    summary, lines = experiment.run(_config(tmp_path, **values), tmp_path / "run"), read_rounds(tmp_path / "run")
    measured = {line["round"]: {n for n in NAMES if f"convergence/{n}" in line} for line in lines}
    assert measured == {0: names, 1: set(), 2: names, 3: names}
    sets, numbers = 1 + ("sharing.setting" in values), 650 + 2 + ("measure.smoothness" in values)
    assert lines[0]["convergence/bytes"] == 4 * (4 * 650 + 8 * sets * numbers)  # 4 clients, 650 weights
    for name in NAMES:
        course = [[line["round"], line[f"convergence/{name}"]] for line in lines if f"convergence/{name}" in line]
        assert summary.get(name, []) == course


@pytest.mark.parametrize("samples", [None, 16])
@pytest.mark.long
def test_a_run_logs_the_laboratorys_values_and_trains_as_without(samples: int | None, tmp_path: Path) -> None:
    values = SHUFFLED | {"model.name": "cnn", "model.batch_norm": True, "federation.blocks": 2}
    config = _config(tmp_path, **values, **{"measure.samples": samples, "measure.smoothness": not samples})
    experiment.run(config, tmp_path / "run")
    last, lines = checkpoint.load_latest(tmp_path / "run" / "checkpoints"), read_rounds(tmp_path / "run")
    assert last is not None
    ready = build.assemble(build.prepare(config))
    at = ModelTask(last.model, last.buffers)
    laboratory = Laboratory(ready.executor(), ready.data, ready.shared.p, config.federation.blocks, samples, seed=5)
    result = laboratory.measure(at, hessians=not samples)
    expected = {f"convergence/{name}": e.value for name, e in result.items()}
    if samples:
        expected |= {f"convergence/{name}_se": e.standard_error for name, e in result.items()}
        assert all(e.standard_error > 0 for e in result.values())
    expected["convergence/bytes"] = laboratory.nbytes(at, hessians=not samples)
    assert {name: value for name, value in lines[-1].items() if name.startswith("convergence/")} == expected
    experiment.run(_config(tmp_path, **values, **{"measure.every": 0}), tmp_path / "plain")
    others = [{name: v for name, v in line.items() if not name.startswith("convergence/")} for line in lines]
    assert others == read_rounds(tmp_path / "plain")
    models = [max((tmp_path / name).glob("checkpoints/*.safetensors")).read_bytes() for name in ("run", "plain")]
    assert models[0] == models[1]


N = 4  # clients
SHARES = (0.0, 1e-3, 0.06, 0.3, 0.5, 0.9, 1.0)


def _problem(seed: int, shift: float) -> LeastSquares:
    """N clients of unequal size, and a pool in two parts whose answers are off by about ``shift``."""
    draw = np.random.default_rng(seed)
    a = [draw.normal(size=(n, 3)) * draw.uniform(0.5, 2, 3) for n in (5, 9, 1, 7, 4, 3)]
    b = [x @ draw.normal(size=3) + draw.normal(size=len(x)) for x in a]
    return LeastSquares(a, [*b[:N], *(y + shift * draw.normal(size=len(y)) for y in b[N:])])


def _mixture(own: np.ndarray, pool: np.ndarray, p: float) -> tuple[np.ndarray, float]:
    """Mean of the per-sample gradients where a share p of the weight lies on the pool's, and their noise."""
    each = np.concatenate([own, pool])
    weights = np.repeat([(1 - p) / len(own), p / len(pool)], [len(own), len(pool)])
    mean = weights @ each
    return mean, weights @ np.square(each - mean).sum(1)


def test_dissimilarity_and_noise_of_exact_mixtures_are_the_lemmas() -> None:
    for seed, shift in product(range(6), (0, 1, 300)):
        problem, w = _problem(seed, shift), np.random.default_rng(seed).normal(size=3)
        each = [a * (a @ w - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
        in_pool = np.concatenate(each[N:])
        federation = problem.federation(0.1)
        sets = federation.data.clients
        data = RunData(sets[:N], sets[:N], {}, sets[N:])
        laboratory = _laboratory(replace(federation, data=data), 0.0)
        at = ModelTask(Flat(federation.model.layout, torch.from_numpy(w)))
        own, pool = laboratory.moments(at, "own"), laboratory.moments(at, "pool")
        for p in SHARES:
            means, noises = zip(*(_mixture(g, in_pool, p) for g in each[:N]), strict=True)
            zeta_sq, sigma_sq = np.square(means - np.mean(means, 0)).sum(1).mean(), np.mean(noises)
            rounding = 1e-15 * np.square(in_pool.mean(0)).sum()  # of the pool's gradient, common to all clients
            by_lemma = (
                lemma1.zeta_sq(p, own.zeta_sq),
                lemma1.sigma_sq(p, own.sigma_sq, pool.sigma_avg_sq, own.zeta_sq, delta_sq(own, pool)),
            )
            for result in (by_lemma, mixed(own, pool, p)):
                assert result == pytest.approx((zeta_sq, sigma_sq), rel=1e-9, abs=rounding)


def test_no_mixture_is_less_smooth_than_the_lemma_says() -> None:
    for seed in range(20):
        problem = _problem(seed, 0)
        hessians = [a.T @ a / len(a) for a in problem.a[:N]]
        in_pool = np.concatenate(problem.a[N:])
        of_pool = in_pool.T @ in_pool / len(in_pool)
        l_max, l_pool = max(np.linalg.norm(h, 2) for h in hessians), np.linalg.norm(of_pool, 2)
        for p in SHARES:
            l_mix = max(np.linalg.norm((1 - p) * h + p * of_pool, 2) for h in hessians)
            bound = lemma1.smoothness(p, float(l_max), float(l_pool))
            assert l_mix <= bound * (1 + 1e-12)
            if p in (0, 1):
                assert bound == pytest.approx(l_mix)


def test_a_share_outside_0_and_1_and_how_to_measure_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"measure\.samples .*16"):
        experiment.run(_config(tmp_path, **{"measure.samples": 15, "measure.every": 1}), tmp_path / "run")
    for p in (-0.01, 1.01):
        for formula, numbers in ((lemma1.zeta_sq, [1.0]), (lemma1.smoothness, [1.0] * 2), (lemma1.sigma_sq, [1.0] * 4)):
            with pytest.raises(UserError, match=r"p, .*must lie in \[0, 1\]"):
                formula(p, *numbers)
