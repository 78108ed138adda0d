"""Quality of a pool: closed forms, a slow double loop, and pools whose quality is known."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons import Examples, LocalSGD, UserError, Work, generator, set_default_generator
from fedcommons.audits.quality import compared, pool_quality
from fedcommons.config import schema as config
from fedcommons.runs import build
from lightning_modules.classifier import Classifier
from lightning_modules.networks.linear import Linear

DATA = build.load(config.Data(limit=300))


def points(n: int, seed: int, d: int = 3) -> Tensor:
    return torch.randn(n, d, generator=generator(seed, "points"))


def by_loops(real: Tensor, pool: Tensor, k: int) -> dict[str, float]:
    def far(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).norm())

    def radius(i: int, features: Tensor) -> float:
        return sorted(far(features[i], features[j]) for j in range(len(features)) if j != i)[k - 1]

    of_real, of_pool = ([radius(i, features) for i in range(len(features))] for features in (real, pool))
    in_real = [[far(y, x) <= r for x, r in zip(real, of_real, strict=True)] for y in pool]
    in_pool = [[far(x, y) <= r for y, r in zip(pool, of_pool, strict=True)] for x in real]
    return {
        "precision": float(np.mean([any(row) for row in in_real])),
        "recall": float(np.mean([any(row) for row in in_pool])), "density": float(np.sum(in_real)) / (k * len(pool)),
        "coverage": float(np.mean(np.any(in_real, 0))), "kernel_distance": mmd_by_loops(real, pool),
    }  # fmt: skip


def mmd_by_loops(real: Tensor, pool: Tensor) -> float:
    def k(a: Tensor, b: Tensor) -> float:
        return (float(a.double() @ b.double()) / len(a) + 1) ** 3

    def within(features: Tensor) -> float:
        return float(np.mean([k(a, b) for i, a in enumerate(features) for j, b in enumerate(features) if i != j]))

    return within(real) + within(pool) - 2 * float(np.mean([k(a, b) for a in real for b in pool]))


@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_the_equations_say_and_real_data_as_a_pool_are_perfect(seed: int) -> None:
    real, pool = points(9, seed), 0.7 * points(12, seed + 100) + 0.3
    for k in (1, 3):
        expected = pytest.approx(by_loops(real, pool, k), abs=1e-9)
        assert compared(real.flip(0), pool.flip(0), k) == expected  # in any order
    real = points(600, seed)  # more than a chunk
    result = compared(real, real, 4)
    assert result["precision"] == result["recall"] == result["coverage"] == 1
    assert result["density"] == (4 + 1) / 4  # each ball holds its centre and k neighbours
    with pytest.raises(ValueError, match="more than 5 points, got 5 real"):
        compared(points(5, 0), points(9, 0))


@pytest.mark.parametrize("d", [7, 1500])
@pytest.mark.parametrize(("n", "m"), [(513, 600), (700, 515)])
def test_copies_of_points_that_stand_many_times_are_in_their_balls_of_no_radius(d: int, n: int, m: int) -> None:
    """In high dimensions and far from 0 squared distances of equal points are rounded, to other numbers by place."""
    different = 10 * points(n // 9, 0, d) + 30
    real = different.repeat(11, 1)[:n]  # each point nine times or more
    rows = torch.randint(len(different), (m,), generator=generator("rows"))
    result = compared(real, different[rows], 5)
    assert result["precision"] == 1
    assert result["coverage"] == float((torch.arange(n)[:, None] % len(different) == rows).any(1).double().mean())
    almost = compared(real, different[rows] * (1 + 1e-5), 5)  # a ball of no radius holds nothing else
    assert almost["precision"] == almost["coverage"] == 0


def work() -> Work:
    set_default_generator(0, "weights")
    module = Classifier(Linear((1, 8, 8), 10), lr=0.1, mean=(0.3,), std=(0.3,))
    return Work(module, torch.device("cpu"), LocalSGD(5, 10))


@pytest.mark.parametrize("seed", range(2))
def test_wrong_labels_show_in_fidelity_and_accuracy_and_noise_in_coverage(seed: int) -> None:
    pool = DATA.validation
    good = pool_quality(work(), DATA.train, pool, DATA.test, seed)
    wrong = pool_quality(work(), DATA.train, Examples(pool.x, (pool.y + 1) % 10), DATA.test, seed)
    noise = torch.randint(0, 256, pool.x.shape, dtype=torch.uint8, generator=generator(seed))
    noisy = pool_quality(work(), DATA.train, Examples(noise, pool.y), DATA.test, seed)
    assert good.trained == good.points == len(pool)
    assert good.pool["fidelity"] > 0.7 > 0.2 > wrong.pool["fidelity"]
    assert good.accuracy > 0.7 > 0.2 > wrong.accuracy
    assert {**wrong.pool, "fidelity": 0} == {**good.pool, "fidelity": 0}  # labels show nowhere else
    assert good.pool["coverage"] > 0.8 > 0.2 > noisy.pool["coverage"]
    if seed:
        assert good == pool_quality(work(), DATA.train, pool, DATA.test, seed)
        with pytest.raises(UserError, match=r"more than 5 images .* 4 synthetic"):
            pool_quality(work(), DATA.train, pool[:4], DATA.test, 0)


@pytest.mark.usefixtures("untimed")
@pytest.mark.long
def test_pools_of_generators_sizes_and_epochs_stand_in_one_table(
    tmp_path: Path, sweeps: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(name: str) -> list[dict[str, str]]:
        with (tmp_path / name / "quality.csv").open() as file:
            return list(csv.DictReader(file))

    monkeypatch.chdir(tmp_path)
    few, script = ["--preset", "smoke", "--partition.n_clients", "2", "--epochs", "2"], sweeps("quality")
    argv = [*few, "--generators", "gan", "--rhos", "1", "--checkpoints", "0.1,1", "--seeds", "0,1"]
    assert script.quality([*argv, "--out", "many", "--artifacts", "store"]) == 0
    assert (tmp_path / "many" / "quality.png").exists()
    result = lines("many")
    assert sorted((row["generator"], row["epochs"]) for row in result) == sorted(2 * [("gan", "1"), ("gan", "5")])
    assert (tmp_path / "many" / "quality.md").read_text().count("±") >= 2 * 7
    single_run = ["--generator", "gan", "--rho", "1", "--seed", "1", "--out", "one", "--artifacts", "other"]
    assert script.quality([*few, *single_run]) == 0
    (alone,) = lines("one")
    assert alone in result  # a pool is judged alike beside others, and trained alike without checkpoints
