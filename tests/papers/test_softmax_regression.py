"""Softmax regression in a federation: identities, closed forms, the swap of images, keyed draws, and its sweep."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.config.schema import Data
from fedcommons.data.examples import Dataset
from fedcommons.runs.build import load
from papers.fedssyn.softmax_regression import Labelled, balanced, clients, train, zeta_sq

KINDS = [(name, p) for name in ("iid", "single_class") for p in (0.0, 0.3, 1.0)]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    """30 images of each digit."""
    return balanced(load(Data(validation=0)), 30, seed=0)


def of_test(dataset: Dataset) -> Labelled:
    return Labelled.from_examples(dataset.test, dataset.classes)


def by_autograd(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The gradient of PyTorch's own loss, for a model (d, K) and data (n, d), (n, K)."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(a @ x, b.argmax(1)) / b.shape[1], x)[0]


def central(data: Labelled, lr: float, steps: int) -> Tensor:
    """Gradient descent on all the data in one place."""
    a, b = data.a.flatten(0, 1), data.b.flatten(0, 1)
    x = a.new_zeros(a.shape[1], b.shape[1])
    for _ in range(steps):
        x = x - lr * by_autograd(x, a, b)
    return x


@pytest.mark.parametrize(("name", "p"), KINDS)
def test_one_local_step_is_centralised_gradient_descent(digits: Dataset, name: str, p: float) -> None:
    data, reference = clients(digits, name, p, seed=0), clients(digits, "iid", 0.0, seed=3)
    options = {"lr": 2.0, "rounds": 4, "noises": (0.0, 0.5), "seed": 0}
    x, losses = train(data, of_test(digits), steps=1, **options)
    torch.testing.assert_close(x[:, 0], central(data, 2.0, 4), rtol=0, atol=1e-13)
    a, b = of_test(digits).a, of_test(digits).b
    by_torch = torch.stack([F.cross_entropy(a @ x[:, s], b.argmax(1)) / 10 for s in (0, 1)])
    torch.testing.assert_close(losses[-1], by_torch)
    assert losses[0].tolist() == pytest.approx([math.log(10) / 10] * 2)
    torch.testing.assert_close(x, train(reference, of_test(digits), steps=1, **options)[0], rtol=0, atol=1e-13)
    single = Labelled(data.a.flatten(0, 1)[None], data.b.flatten(0, 1)[None])  # it continues where it stopped
    x, _ = train(single, of_test(digits), lr=1.0, steps=3, rounds=2, noises=(0.0,), seed=0)
    torch.testing.assert_close(x[:, 0], central(data, 1.0, 6), rtol=0, atol=1e-13)


def test_noise_has_its_variance() -> None:
    """Black images have no gradient: what is left is minus lr times the mean over clients of the sum over steps."""
    n_clients, d, k, steps, rounds, lr = 4, 3000, 5, 3, 2, 0.7
    black = Labelled(torch.zeros(n_clients, 1, d).double(), F.one_hot(torch.zeros(n_clients, 1).long(), k).double())
    test = Labelled(black.a[0], black.b[0])
    x, _ = train(black, test, lr=lr, steps=steps, rounds=rounds, noises=(0.0, 1.0, 3.0), seed=0)
    assert not x[:, 0].any()
    torch.testing.assert_close(x[:, 2], 3 * x[:, 1])
    variance = lr**2 * steps * rounds / (d * n_clients)
    assert float(x[:, 1].square().mean()) == pytest.approx(variance, rel=0.05)  # 15,000 draws: 0.012 is one sigma
    assert abs(float(x[:, 1].mean())) < 4 * (variance / (d * k)) ** 0.5


def test_draws_are_keyed(digits: Dataset) -> None:
    data = clients(digits, "single_class", 0.3, seed=0)

    def final(seed: int) -> Tensor:
        return train(data, of_test(digits), lr=2.0, steps=2, rounds=2, noises=(0.0, 0.5), seed=seed)[0]

    assert torch.equal(final(0), final(0))
    assert torch.equal(final(0)[:, 0], final(1)[:, 0])
    assert not torch.isclose(final(0)[:, 1], final(1)[:, 1], rtol=0, atol=1e-9).any()
    assert not torch.equal(data.a, clients(digits, "single_class", 0.3, seed=1).a)


def sorted_examples(data: Labelled) -> np.ndarray:
    rows = torch.cat([data.a, data.b], -1).flatten(0, -2).numpy()
    return rows[np.lexsort(rows.T)]


@pytest.mark.parametrize(("name", "p"), KINDS)
def test_the_swap_keeps_all_images_and_sizes(digits: Dataset, name: str, p: float) -> None:
    """The platform's shuffled_real: int(p n) images of every client go through the pool, the others stay."""
    assert digits.train.y.bincount().tolist() == [30] * 10
    before, after = clients(digits, name, 0.0, seed=0), clients(digits, name, p, seed=0)
    assert after.a.shape == before.a.shape == (10, 30, 64)
    assert np.array_equal(sorted_examples(after), sorted_examples(Labelled.from_examples(digits.train, 10)))
    stayed = sum(int((after.a[i][:, None] == before.a[i]).all(-1).any(1).sum()) for i in range(10))
    least = 10 * (30 - int(p * 30))
    assert least <= stayed <= least + 10 * int(p * 30) * 0.2  # a tenth of the swapped images comes back on average


def test_zeta_is_the_spread_of_gradients_and_falls_with_the_square_of_what_stays(digits: Dataset) -> None:
    """Lemma 1 of Fedssyn, (1 - p)^2, but for what a finite part of the pool leaves: less than zeta^2 at p = 1."""
    data = clients(digits, "single_class", 0.3, seed=0)
    zero = data.a.new_zeros(64, 10)
    g = torch.stack([by_autograd(zero, a, b) for a, b in zip(data.a, data.b, strict=True)])
    assert zeta_sq(data) == pytest.approx(float((g - g.mean(0)).square().sum() / 10), rel=1e-12)
    more = balanced(load(Data(validation=0)), 100, seed=0)
    at = {p: np.mean([zeta_sq(clients(more, "single_class", p, s)) for s in range(8)]) for p in (0, 0.1, 0.5, 1)}
    for p in (0.1, 0.5):
        assert -0.002 < at[p] / at[0] - (1 - p) ** 2 < at[1] / at[0] < 0.02


@pytest.mark.long
@pytest.mark.parametrize(("name", "words"), [("mnist_softmax", ["--p=0,0.5", "--noise=0"]), ("quadratics", [])])
def test_a_sweep_has_files(name: str, words: list[str], sweeps: Callable[[str], ModuleType], tmp_path: Path) -> None:
    assert vars(sweeps(name))[name](["--preset=smoke", "--seeds=0", *words, f"--out={tmp_path}"]) == 0
    assert (tmp_path / f"{name}.md").read_text(encoding="utf-8").count("|") > 20
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in [*tmp_path.glob("*.png")] or [tmp_path / "none"])
    assert json.loads((tmp_path / "summary.json").read_text())["cells"]
