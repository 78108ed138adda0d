"""The batched repetitions of gradient coding: equal to a plain loop, to enumeration and to gradient descent."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, float32, float64, nn
from torch.nn import functional as F

from fedcommons.config.sections import Data
from fedcommons.core.torch_settings import without_denormals
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError
from fedcommons.runs.inputs import load
from papers.agc import gradient_coding as study
from papers.agc.gradient_coding import Draws, Played, Problem, Setting, draw, play, play_block


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load(Data(validation=0))


def problem_of(digits: Dataset, white: float = 1.0) -> Problem:
    """6 images of each digit."""
    return Problem.of(
        study.chosen(digits, 6, first=False, seed=0), digits.test[slice(0, 40)], 10, white, measured=float64
    )


@pytest.fixture(scope="module")
def small(digits: Dataset) -> Problem:
    return problem_of(digits)


def linear(problem: Problem, drawn: Draws) -> nn.Linear:
    layer = nn.Linear(problem.x.shape[1] - 1, problem.n_classes, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(drawn.start[:-1].T)
        layer.bias.copy_(drawn.start[-1])
    return layer


def gradient_of(loss: Tensor, layer: nn.Linear) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)])


def coded(layer: nn.Linear, problem: Problem, setting: Setting, held: Tensor, z: Tensor) -> Tensor:
    """The gradient that arrives if clients z (N,) answer, by autograd, flat."""
    losses = F.cross_entropy(layer(problem.x[:, :-1]), problem.y, reduction="none")
    return gradient_of((z.double() @ (held / held.sum(0)) * losses).sum() / ((1 - setting.q) * len(problem.y)), layer)


def plain(problem: Problem, setting: Setting, drawn: Draws) -> list[list[float]]:
    """One repetition as a plain PyTorch loop; for each round what ``Played`` has."""
    layer, result = linear(problem, drawn), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, setting.decay)
    held = torch.from_numpy(drawn.held).double()
    same = problem.y[:, None] == problem.y
    for answers, sampled in zip(torch.from_numpy(drawn.answers), torch.from_numpy(drawn.sampled), strict=True):
        predicted = layer(problem.test_x[:, :-1]).argmax(1)
        moments = [coded(layer, problem, setting, held, z).square().sum() for z in sampled]
        losses = F.cross_entropy(layer(problem.x[:, :-1]), problem.y, reduction="none")
        each = torch.stack([gradient_of(loss, layer) for loss in losses])
        products = each @ each.T
        accuracy = (predicted == problem.test_y).double().mean()
        values = accuracy, torch.stack(moments).mean(), products[same].sum(), products[~same].sum()
        result.append([float(value) for value in values])
        if answers.any():
            gradient = coded(layer, problem, setting, held, answers)
            layer.weight.grad = gradient[: layer.weight.numel()].view_as(layer.weight)
            layer.bias.grad = gradient[layer.weight.numel() :]
            optimizer.step()
            schedule.step()
    return result


MEASURED = ("accuracy", "second_moment", "same_class", "cross_class")


def assert_equal(result: Played, expected: Played, rtol: float = 1e-9) -> None:
    for name in MEASURED:
        value = getattr(expected, name)
        np.testing.assert_allclose(getattr(result, name), value, rtol=rtol, atol=1e-12 * (1 + abs(value).max()))


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
    drawn = [draw(problem, setting, r, seed=1) for r in range(3)]
    result = play_block(problem, setting, drawn)
    expected = np.array([plain(problem, setting, one) for one in drawn])  # (repetitions, rounds, 4)
    assert_equal(result, Played(*np.moveaxis(expected, 2, 0)), 1e-9 if white == 1 else 1e-7)
    if q == 0.9:
        assert not all(one.answers.any(1).all() for one in drawn)  # a round that no client answers is among them
    if partition == "dirichlet_plain":
        assert len({len(draw(problem, setting, r, seed=1).held) for r in range(20)}) > 1  # clients were dropped
    some = play(problem, setting, range(1, 3), seed=1)
    np.testing.assert_allclose(some.second_moment, result.second_moment[1:], rtol=1e-9)


def test_what_is_measured_in_float32_moves_nothing(digits: Dataset) -> None:
    images, setting = (
        (study.chosen(digits, 30, first=True, seed=0), digits.test),
        Setting("iid", 0.5, 3, 0.2, rounds=10),
    )
    for white in (1.0, 255.0):
        single, double = (
            play(Problem.of(*images, 10, white, measured), setting, range(2), 0) for measured in (float32, float64)
        )
        np.testing.assert_allclose(single.accuracy, double.accuracy, atol=1 / 359)
        for name in MEASURED[1:]:
            np.testing.assert_allclose(getattr(single, name), getattr(double, name), rtol=1e-4)


def test_blocks_change_rounding_only(small: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("dirichlet_plain", 0.5, 3, 0.2, rounds=5)
    whole = play(small, setting, range(7), seed=0)
    monkeypatch.setattr(study, "BLOCK", 3)
    assert whole.accuracy.shape == (7, 5)
    assert_equal(study.joined([play(small, setting, range(4), 0), play(small, setting, range(4, 7), 0)]), whole)


def test_draws_are_keyed_and_common_to_all_curves(small: Problem) -> None:
    base, before = Setting("iid", 0.5, 2, 0.2), torch.get_rng_state()
    one = draw(small, base, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for repetition, seed in ((1, 0), (0, 1)):
        other = draw(small, base, repetition, seed)
        for name in ("start", "held", "answers", "sampled"):
            assert not np.array_equal(getattr(one, name), getattr(other, name))
    for changes in ({"c": 0.5}, {"d": 4}, {"q": 0.3}, {"partition": "single_class"}):
        other = draw(small, setting := replace(base, **changes), 0, 0)
        assert torch.equal(other.start, one.start)
        if setting.partition == "iid":
            assert (other.held | ~one.held).all()  # a larger c or d copies all that a smaller one copies
        assert (other.answers | ~one.answers).all()  # with a smaller q more clients answer
    assert (one.answers.shape, one.sampled.shape) == ((50, 10), (50, 15, 10))
    many = [draw(small, replace(base, q=0.7), r, 0) for r in range(100)]
    assert abs(np.mean([each.sampled.mean() for each in many]) - 0.3) < 0.003
    starts = torch.stack([each.start for each in many])  # PyTorch's: uniform up to 1/sqrt(64)
    assert 0.999 / 8 < float(starts.abs().max()) <= 1 / 8
    assert float(starts.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.01)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("partition", ["iid", "dirichlet_plain", "single_class"])
def test_who_holds_what(small: Problem, partition: str, per_class: bool) -> None:
    setting, of_class, often = Setting(partition, 0.5, 3, 0.35, per_class=per_class), F.one_hot(small.y).numpy(), []
    for r in range(20):
        held, before = (draw(small, replace(setting, c=c), r, 0).held for c in (0.35, 0.0))
        copied = held.sum(0) > 1
        often.append(copied)
        assert set(held.sum(0)) == {1, min(3, len(held) - 1) + 1}
        assert copied.sum() == (10 * int(0.35 * 6) if per_class else int(0.35 * 60))
        assert (before.sum(0) == 1).all()
        assert (before.sum(1) > 0).all()
        assert (held | ~before).all()
        assert partition != "single_class" or (before == of_class.T).all()
    spread = np.array(often) @ of_class
    assert (spread == 2).all() == per_class
    assert 0 < np.mean(often, 0).min() <= np.mean(often, 0).max() < 1  # everything is copied some time


def test_copies_go_to_all_others_alike() -> None:
    rng = np.random.default_rng(0)
    owner, shared = np.arange(4000) % 5, np.arange(4000) < 3000
    for variant in study.VARIANTS:
        held = study.copies(owner, shared, 2, rng.random((4000, 5)), variant)
        assert held[owner, np.arange(4000)].all()
        assert (held[:, 3000:].sum(0) == 1).all()
        for i, j in product(range(5), range(5)):
            if i != j:  # 600 examples of owner j: 0.02 is one standard error
                assert held[i, :3000][owner[:3000] == j].mean() == pytest.approx(2 / 4, abs=0.09)
        assert (set(held[:, :3000].sum(0)) == {3}) == (variant == "exact")
    few = study.copies(np.array([0, 1]), np.array([True, True]), 4, rng.random((2, 3)), "exact")
    assert few.all()  # three clients cannot have four copies more


def test_first_and_random_images_of_every_class(digits: Dataset) -> None:
    first = study.chosen(digits, 30, first=True, seed=0)
    assert torch.equal(first.y.bincount(), torch.full((10,), 30))
    of_3 = digits.train.x[digits.train.y == 3][:30]
    assert torch.equal(first.x[first.y == 3], of_3)
    some = [study.chosen(digits, 30, first=False, seed=seed).x for seed in (0, 0, 1)]
    assert torch.equal(some[0], some[1])
    assert not torch.equal(some[0], some[2])
    lacking = digits.train[digits.train.y != 7]
    with pytest.raises(UserError, match="takes 30 training images of every class, and digits has 0 of class 7"):
        study.chosen(replace(digits, train=lacking), 30, first=True, seed=0)


BAD: list[tuple[dict, str]] = [
    ({"q": 1.0}, r"q, .* \[0, 1\), got 1"), ({"q": -0.1}, "got -0.1"), ({"q": float("nan")}, "got nan"),
    ({"c": 1.5}, r"c, .* \[0, 1\], got 1.5"), ({"d": 10}, r"\[1, 9\] for 10 clients"), ({"d": 0}, r"d, .* \[1, 9\]"),
    ({"c": 0.003}, "c = 0.003 of all examples, 300"), ({"c": 0.03, "per_class": True}, "c = 0.03 of a class, 30"),
    ({"partition": "single"}, "did you mean 'single_class'"), ({"sharing": "optimal"}, "Known: binomial, exact"),
    ({"lr": 0.0}, "lr must be .* above 0"), ({"decay": 1.1}, r"decay must be in \(0, 1\]"), ({"decay": 0.0}, "decay"),
    ({"rounds": 0}, "rounds must be at least 1"),
]  # fmt: skip


def test_what_cannot_be_run_is_refused_and_limits_are_allowed() -> None:
    right = Setting("iid", 0.5, 3, 0.1)
    for changes, said in BAD:
        with pytest.raises(UserError, match=said):
            study.check(replace(right, **changes), 10, [30] * 10)
    for changes in ({"q": 0.0}, {"c": 0.0}, {"c": 1.0}, {"d": 1}, {"d": 9}, {"decay": 1.0}, {"rounds": 1}):
        study.check(replace(right, **changes), 10, [30] * 10)
    with pytest.raises(UserError, match="at least 2 clients, got 1"):
        study.check(replace(right, d=1), 1, [30])


def test_subnormal_numbers_are_flushed_and_leave_the_results_as_they_are(digits: Dataset) -> None:
    """Raw pixels saturate the softmax, whose tails fall below 1e-308 within some rounds."""
    problem = Problem.of(study.chosen(digits, 6, first=True, seed=0), digits.test[slice(0, 40)], 10, 4000.0)
    setting, smallest = Setting("single_class", 0.5, 3, 0.2, rounds=20), torch.finfo(float64).tiny
    result = play(problem, setting, range(3), 0)
    assert torch.tensor(smallest, dtype=float64) / 2 > 0  # this thread is as it was
    assert_equal(result, play_block(problem, setting, [draw(problem, setting, r, 0) for r in range(3)]), 1e-12)
    with without_denormals():
        assert torch.tensor(smallest, dtype=float64) / 2 == 0
