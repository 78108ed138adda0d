"""The batched repetitions of gradient coding: equal to a plain loop, to enumeration and to gradient descent."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, float64, nn
from torch.nn import functional as F

from fedcommons.config.schema import Data
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError
from fedcommons.runs.build import load
from papers.agc import gradient_coding as study
from papers.agc.gradient_coding import Draws, Problem, Setting, draw, play, play_block


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load(Data(validation=0))


def problem_of(digits: Dataset, white: float = 1.0) -> Problem:
    """6 images of each digit."""
    return Problem.build(
        study.select_examples(digits, 6, first=False, seed=0), digits.test[slice(0, 40)], 10, white, measured=float64
    )


@pytest.fixture(scope="module")
def small(digits: Dataset) -> Problem:
    return problem_of(digits)


def linear(problem: Problem, draws: Draws) -> nn.Linear:
    layer = nn.Linear(problem.x.shape[1] - 1, problem.n_classes, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(draws.start[:-1].T)
        layer.bias.copy_(draws.start[-1])
    return layer


def gradient_of(loss: Tensor, layer: nn.Linear) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)])


def coded(layer: nn.Linear, problem: Problem, setting: Setting, holds: Tensor, z: Tensor) -> Tensor:
    """Return the flat gradient that arrives if clients z (N,) answer, by autograd."""
    losses = F.cross_entropy(layer(problem.x[:, :-1]), problem.y, reduction="none")
    return gradient_of((z.double() @ (holds / holds.sum(0)) * losses).sum() / ((1 - setting.q) * len(problem.y)), layer)


def plain(problem: Problem, setting: Setting, draws: Draws) -> list[list[float]]:
    """Run one repetition as a plain PyTorch loop; return the values ``MEASURED`` of each round."""
    layer, result = linear(problem, draws), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, setting.decay)
    holds = torch.from_numpy(draws.holds).double()
    same = problem.y[:, None] == problem.y
    for answers, sampled in zip(torch.from_numpy(draws.answers), torch.from_numpy(draws.sampled), strict=True):
        predicted = layer(problem.test_x[:, :-1]).argmax(1)
        moments = [coded(layer, problem, setting, holds, z).square().sum() for z in sampled]
        losses = F.cross_entropy(layer(problem.x[:, :-1]), problem.y, reduction="none")
        each = torch.stack([gradient_of(loss, layer) for loss in losses])
        products = each @ each.T
        accuracy = (predicted == problem.test_y).double().mean()
        values = accuracy, torch.stack(moments).mean(), products[same].sum(), products[~same].sum()
        result.append([float(value) for value in values])
        if answers.any():
            gradient = coded(layer, problem, setting, holds, answers)
            layer.weight.grad = gradient[: layer.weight.numel()].view_as(layer.weight)
            layer.bias.grad = gradient[layer.weight.numel() :]
            optimizer.step()
            schedule.step()
    return result


MEASURED = ("accuracy", "second_moment", "same_class", "cross_class")
GRID = [
    ("iid", 0.0, 0.0, "exact", False, 1.0), ("iid", 0.5, 0.3, "exact", True, 1.0),
    ("dirichlet_plain", 0.7, 0.0, "exact", False, 1.0), ("dirichlet_plain", 0.7, 0.4, "binomial", False, 1.0),
    ("single_class", 0.5, 0.3, "exact", False, 255.0), ("single_class", 0.9, 0.5, "exact", True, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("partition", "q", "c", "sharing", "per_class", "white"), GRID)
def test_it_is_the_plain_loop(
    digits: Dataset, partition: str, q: float, c: float, sharing: str, per_class: bool, white: float
) -> None:
    problem = problem_of(digits, white)
    assert problem.x.max() == white
    setting = Setting(partition, q, 3, c, sharing, per_class, rounds=5)
    draws = [draw(problem, setting, r, seed=1) for r in range(3)]
    result = play_block(problem, setting, draws)
    expected = np.array([plain(problem, setting, each) for each in draws])  # (repetitions, rounds, 4)
    for name, values in zip(MEASURED, np.moveaxis(expected, 2, 0), strict=True):
        atol = 1e-12 * (1 + abs(values).max())
        np.testing.assert_allclose(getattr(result, name), values, rtol=1e-9 if white == 1 else 1e-7, atol=atol)
    if q == 0.9:
        assert not all(each.answers.any(1).all() for each in draws)  # a round that no client answers is among them
    if partition == "dirichlet_plain":
        assert len({len(draw(problem, setting, r, seed=1).holds) for r in range(20)}) > 1  # clients were dropped
    some = play(problem, setting, range(1, 3), seed=1)
    np.testing.assert_allclose(some.second_moment, result.second_moment[1:], rtol=1e-9)


def test_draws_are_keyed_and_common_to_all_curves(small: Problem) -> None:
    base, before = Setting("iid", 0.5, 2, 0.2), torch.get_rng_state()
    first = draw(small, base, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for repetition, seed in ((1, 0), (0, 1)):
        other = draw(small, base, repetition, seed)
        for name in ("start", "holds", "answers", "sampled"):
            assert not np.array_equal(getattr(first, name), getattr(other, name))
    for changes in ({"c": 0.5}, {"d": 4}, {"q": 0.3}, {"partition": "single_class"}):
        other = draw(small, setting := replace(base, **changes), 0, 0)
        assert torch.equal(other.start, first.start)
        if setting.partition == "iid":
            assert (other.holds | ~first.holds).all()  # a larger c or d copies all that a smaller one copies
        assert (other.answers | ~first.answers).all()  # with a smaller q more clients answer
    assert (first.answers.shape, first.sampled.shape) == ((50, 10), (50, 15, 10))
    many = [draw(small, replace(base, q=0.7), r, 0) for r in range(100)]
    assert abs(np.mean([each.sampled.mean() for each in many]) - 0.3) < 0.003
    starts = torch.stack([each.start for each in many])  # PyTorch's: uniform up to 1/sqrt(64)
    assert float(starts.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.01)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("partition", ["iid", "dirichlet_plain", "single_class"])
def test_who_holds_what(small: Problem, partition: str, per_class: bool) -> None:
    setting, of_class, often = Setting(partition, 0.5, 3, 0.35, per_class=per_class), F.one_hot(small.y).numpy(), []
    for r in range(20):
        holds, before = (draw(small, replace(setting, c=c), r, 0).holds for c in (0.35, 0.0))
        copied = holds.sum(0) > 1
        often.append(copied)
        assert set(holds.sum(0)) == {1, min(3, len(holds) - 1) + 1}
        assert copied.sum() == (10 * int(0.35 * 6) if per_class else int(0.35 * 60))
        assert (before.sum(0) == 1).all()
        assert (before.sum(1) > 0).all()
        assert (holds | ~before).all()
        assert partition != "single_class" or (before == of_class.T).all()
    spread = np.array(often) @ of_class
    assert (spread == 2).all() == per_class
    assert 0 < np.mean(often, 0).min() <= np.mean(often, 0).max() < 1  # everything is copied some time


def test_first_and_random_images_of_every_class(digits: Dataset) -> None:
    first = study.select_examples(digits, 30, first=True, seed=0)
    assert torch.equal(first.y.bincount(), torch.full((10,), 30))
    assert torch.equal(first.x[first.y == 3], digits.train.x[digits.train.y == 3][:30])
    lacking = digits.train[digits.train.y != 7]
    with pytest.raises(UserError, match="takes 30 training images of every class, and digits has 0 of class 7"):
        study.select_examples(replace(digits, train=lacking), 30, first=True, seed=0)


def test_what_cannot_be_run_is_refused_and_limits_are_allowed() -> None:
    right = Setting("iid", 0.5, 3, 0.1)
    for changes, words in (
        ({"d": 10}, "for 10 clients"), ({"d": 0}, "d, "), ({"c": 0.003}, "of all examples"),
        ({"c": 0.03, "per_class": True}, "of a class, 30"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            study.check(replace(right, **changes), 10, [30] * 10)
    for changes in ({"c": 0.0}, {"c": 1.0}, {"d": 1}, {"d": 9}):
        study.check(replace(right, **changes), 10, [30] * 10)
