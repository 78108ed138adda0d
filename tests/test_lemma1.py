"""Lemma 1 on exact mixtures: two equalities and a bound, whatever the pool."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.convergence import lemma1
from fedcommons.convergence.estimators import delta_sq, mixed
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients
from fedcommons.errors import UserError
from fedcommons.federation.evaluation import ModelTask
from fedcommons.tensors import Flat
from fedcommons.testing import Federation, LeastSquares

Digits = Callable[..., Federation]

ALGORITHM = FedAvg()
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


@pytest.mark.parametrize("shift", [0, 1, 300])
def test_dissimilarity_and_noise_of_exact_mixtures_are_the_lemmas(shift: float) -> None:
    """Also from the moments, without the gradients of a mixture."""
    for seed in range(6):
        problem, w = _problem(seed, shift), np.random.default_rng(seed).normal(size=3)
        each = [a * (a @ w - b)[:, None] for a, b in zip(problem.a, problem.b, strict=True)]
        in_pool = np.concatenate(each[N:])
        federation = problem.federation(0.1)
        sets = federation.data.clients
        data = RunData(sets[:N], sets[:N], {}, sets[N:])
        executor = replace(federation, data=data).serial(ALGORITHM)
        laboratory = Laboratory(executor, data, 0.0, blocks=2)
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
    slack = []
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
            slack.append(bound / l_mix)
    assert max(slack) > 1.1  # no equality in between


def test_a_network_that_trains_on_exact_mixtures_has_what_the_lemma_says(digits: Digits) -> None:
    """A client of n_i images and a pool of 8: its own 24 times and the pool's n_i times make p = 1/4."""
    federation = digits(sizes=(4, 8, 2, 3, 5), linear=True)
    sets = federation.data.clients
    own, pool = sets[:3], sets[3:]
    shared = np.concatenate(list(pool.rows))
    mixtures = [np.concatenate([np.repeat(rows, 24), np.repeat(shared, len(rows))]) for rows in own.rows]
    data = RunData(Clients(sets.store, mixtures), own, {}, pool)
    executor = replace(federation, data=data).serial(ALGORITHM)
    result = Laboratory(executor, data, 0.25, blocks=2).measure(ModelTask(federation.model), hessians=True)
    value = {name: estimate.value for name, estimate in result.items()}
    for name in ("zeta", "sigma"):
        assert value[f"{name}_mix_sq"] == pytest.approx(value[f"{name}_hat_sq"], rel=1e-5)
        assert value[f"{name}_lemma1_sq"] == pytest.approx(value[f"{name}_hat_sq"], rel=1e-5)
    assert 0.5 * value["L_lemma1"] < value["L_p"] <= value["L_lemma1"]


def test_a_share_outside_0_and_1_is_refused() -> None:
    for p in (-0.01, 1.01, float("nan")):
        for formula, numbers in ((lemma1.zeta_sq, [1.0]), (lemma1.smoothness, [1.0] * 2), (lemma1.sigma_sq, [1.0] * 4)):
            with pytest.raises(UserError, match=r"p, .*must lie in \[0, 1\]"):
                formula(p, *numbers)
