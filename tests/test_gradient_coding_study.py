"""The batched repetitions of gradient coding: equal to a plain loop, to enumeration and to gradient descent."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, float64, nn
from torch.nn import functional as F

from fedcommons.config.sections import Data
from fedcommons.core.torch_settings import without_denormals
from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError
from fedcommons.runs.inputs import load
from papers.agc import gradient_coding as study
from papers.agc.gradient_coding import Draws, Problem, Setting, check, chosen, copies, draw, joined, play, play_block


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load(Data(validation=0))


def problem_of(digits: Dataset, white: float = 1.0) -> Problem:
    """6 images of each digit."""
    return Problem.of(chosen(digits, 6, first=False, seed=0), digits.test[slice(0, 40)], 10, white, measured=float64)


@pytest.fixture(scope="module")
def small(digits: Dataset) -> Problem:
    return problem_of(digits)


@pytest.fixture(scope="module")
def tiny() -> Problem:
    """4 classes, so 4 clients, whose straggler sets can be enumerated."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(256, (20, 1, 3, 3), generator=draws, dtype=torch.uint8)
    data = Examples(x, torch.arange(20) % 4)
    return Problem.of(data, data, 4, 3.0, measured=float64)


def linear(problem: Problem, drawn: Draws) -> nn.Linear:
    layer = nn.Linear(problem.x.shape[1] - 1, problem.n_classes, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(drawn.start[:-1].T)
        layer.bias.copy_(drawn.start[-1])
    return layer


def coded(layer: nn.Linear, problem: Problem, setting: Setting, held: Tensor, z: Tensor) -> Tensor:
    """The gradient that arrives if clients z (N,) answer, by autograd, flat."""
    losses = F.cross_entropy(layer(problem.x[:, :-1]), problem.y, reduction="none")
    loss = (z.double() @ (held / held.sum(0)) * losses).sum() / ((1 - setting.q) * len(problem.y))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(layer.parameters()))])


def plain(problem: Problem, setting: Setting, drawn: Draws) -> list[list[float]]:
    """One repetition as a plain PyTorch loop; for each round what ``Played`` has."""
    layer, result = linear(problem, drawn), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=setting.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, setting.decay)
    held = torch.from_numpy(drawn.held).double()
    same = problem.y[:, None] == problem.y
    for answers, sampled in zip(torch.from_numpy(drawn.answers), torch.from_numpy(drawn.sampled), strict=True):
        said = layer(problem.test_x[:, :-1]).argmax(1)
        moments = [coded(layer, problem, setting, held, z).square().sum() for z in sampled]
        each = torch.stack([_of_one(layer, problem, j) for j in range(len(problem.y))])
        products = each @ each.T
        result.append([
            float((said == problem.test_y).double().mean()), float(torch.stack(moments).mean()),
            float(products[same].sum()), float(products[~same].sum()),
        ])  # fmt: skip
        if answers.any():
            gradient = coded(layer, problem, setting, held, answers)
            layer.weight.grad = gradient[: layer.weight.numel()].view_as(layer.weight)
            layer.bias.grad = gradient[layer.weight.numel() :]
            optimizer.step()
            schedule.step()
    return result


def _of_one(layer: nn.Linear, problem: Problem, j: int) -> Tensor:
    loss = F.cross_entropy(layer(problem.x[j, :-1]), problem.y[j])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(layer.parameters()))])


def assert_equal(result: study.Played, expected: np.ndarray, rtol: float = 1e-9) -> None:
    """expected: (repetitions, rounds, 4)."""
    for k, values in enumerate((result.accuracy, result.second_moment, result.same_class, result.cross_class)):
        np.testing.assert_allclose(values, expected[..., k], rtol=rtol, atol=1e-12 * (1 + abs(expected[..., k]).max()))


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
    assert_equal(result, np.array([plain(problem, setting, one) for one in drawn]), 1e-9 if white == 1 else 1e-7)
    if q == 0.9:
        assert not all(one.answers.any(1).all() for one in drawn)  # a round that no client answers is among them
    if partition == "dirichlet_plain":
        assert len({len(draw(problem, setting, r, seed=1).held) for r in range(20)}) > 1  # clients were dropped
    some = play(problem, setting, range(1, 3), seed=1)
    np.testing.assert_allclose(some.second_moment, result.second_moment[1:], rtol=1e-9)


def test_what_is_measured_in_float32_moves_nothing(digits: Dataset) -> None:
    images = chosen(digits, 30, first=True, seed=0), digits.test
    for white, partition in product((1.0, 255.0), ("iid", "single_class")):
        single, double = (
            play(Problem.of(*images, 10, white, measured), Setting(partition, 0.5, 3, 0.2, rounds=10), range(2), 0)
            for measured in (torch.float32, float64)
        )
        np.testing.assert_allclose(single.accuracy, double.accuracy, atol=1 / 359)
        for name in ("second_moment", "same_class", "cross_class"):
            np.testing.assert_allclose(getattr(single, name), getattr(double, name), rtol=1e-4)


def test_without_stragglers_every_partition_is_gradient_descent(small: Problem) -> None:
    expected = None
    for partition, c in product(study.PARTITIONS, (0.0, 0.5)):
        setting = Setting(partition, 0.0, 3, c, rounds=8, decay=1.0)
        result = play(small, setting, range(2), seed=0)
        layer, accuracy, norms = linear(small, draw(small, setting, 0, 0)), [], []
        for _ in range(8):
            loss = F.cross_entropy(layer(small.x[:, :-1]), small.y)
            gradients = torch.autograd.grad(loss, list(layer.parameters()))
            accuracy.append(float((layer(small.test_x[:, :-1]).argmax(1) == small.test_y).double().mean()))
            norms.append(sum(float(g.square().sum()) for g in gradients))
            with torch.no_grad():
                for p, g in zip(layer.parameters(), gradients, strict=True):
                    p -= setting.lr * g
        np.testing.assert_allclose(result.accuracy[0], accuracy)
        np.testing.assert_allclose(result.second_moment[0], norms, rtol=1e-10)
        np.testing.assert_allclose(result.same_class + result.cross_class, result.second_moment * 60**2, rtol=1e-10)
        expected = expected or result
        np.testing.assert_allclose(result.second_moment, expected.second_moment, rtol=1e-10)


def patterns(n: int) -> np.ndarray:
    return np.array(list(product((False, True), repeat=n)))


@pytest.mark.parametrize(("partition", "c"), [("single_class", 0.0), ("single_class", 0.6), ("iid", 0.4)])
def test_second_moment_is_its_enumeration_over_straggler_sets(tiny: Problem, partition: str, c: float) -> None:
    """E||g^||^2 = (1-q)^2 ||sum_i f_i||^2 + q (1-q) sum_i ||f_i||^2, and the draws estimate it without bias."""
    setting, differences = Setting(partition, 0.4, 2, c, rounds=3), []
    weight = [0.6 ** z.sum() * 0.4 ** (~z).sum() for z in patterns(4)]
    for r in range(40):
        one = draw(tiny, setting, r, seed=0)
        held = torch.from_numpy(one.held).double()
        each = [replace(one, sampled=np.tile(z, (3, 1, 1))) for z in patterns(4)]
        exact = np.array(weight) @ play_block(tiny, setting, each).second_moment  # (rounds,)
        f = torch.stack([coded(linear(tiny, one), tiny, setting, held, z) for z in torch.eye(4)])
        closed = 0.6**2 * f.sum(0).square().sum() + 0.4 * 0.6 * f.square().sum()
        assert exact[0] == pytest.approx(float(closed), rel=1e-10)
        drawn = play_block(tiny, setting, [one]).second_moment[0]
        differences.append(drawn - exact)
    mean, error = np.mean(differences, 0), np.std(differences, 0, ddof=1) / 40**0.5
    assert (abs(mean) < 4 * error).all()
    assert (error > 0).all()
    empty = replace(one, sampled=np.zeros((3, 15, 4), dtype=bool))
    assert not play_block(tiny, setting, [empty]).second_moment.any()


def test_a_round_that_nobody_answers_changes_nothing(small: Problem) -> None:
    """Neither the model nor the rate: without the round all is the same."""
    setting = Setting("single_class", 0.5, 3, 0.2, rounds=8)
    one = draw(small, setting, 0, seed=0)
    answers = one.answers | (np.arange(10) == 0)  # a client answers in every round
    silent = np.insert(answers, 3, False, axis=0), np.insert(one.sampled, 3, one.sampled[3], axis=0)
    result = play_block(small, replace(setting, rounds=9), [replace(one, answers=silent[0], sampled=silent[1])])
    expected = play_block(small, setting, [replace(one, answers=answers)])
    for name in ("accuracy", "second_moment", "same_class", "cross_class"):
        with_it = getattr(result, name)
        assert with_it[0, 3] == with_it[0, 4]
        np.testing.assert_array_equal(np.delete(with_it, 3, axis=1), getattr(expected, name))


def test_blocks_change_rounding_only(small: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("dirichlet_plain", 0.5, 3, 0.2, rounds=5)
    whole = play(small, setting, range(7), seed=0)
    monkeypatch.setattr(study, "BLOCK", 3)
    parts = study.joined([play(small, setting, range(4), 0), play(small, setting, range(4, 7), 0)])
    for name in ("accuracy", "second_moment", "same_class", "cross_class"):
        assert getattr(whole, name).shape == (7, 5)
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-9)


def test_draws_are_keyed_and_common_to_all_curves(small: Problem) -> None:
    base = Setting("iid", 0.5, 2, 0.2)
    one = draw(small, base, 0, 0)
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
    assert one.answers.shape == (50, 10)
    assert one.sampled.shape == (50, 15, 10)
    assert abs(np.mean([draw(small, replace(base, q=0.7), r, 0).sampled.mean() for r in range(20)]) - 0.3) < 0.005
    before = torch.get_rng_state()
    draw(small, base, 3, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_start_is_pytorchs(small: Problem) -> None:
    starts = torch.stack([draw(small, Setting("iid", 0.5, 2, 0.2), r, 0).start for r in range(100)])
    assert starts.abs().max() <= 1 / 8  # uniform, 1/sqrt(64)
    assert starts.abs().max() > 0.999 / 8
    assert float(starts.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.01)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("partition", ["iid", "dirichlet_plain", "single_class"])
def test_who_holds_what(small: Problem, partition: str, per_class: bool) -> None:
    setting, spread, often = Setting(partition, 0.5, 3, 0.35, per_class=per_class), [], []
    for r in range(30):
        held = draw(small, setting, r, 0).held
        d = held.sum(0)
        assert set(d) == {1, min(3, len(held) - 1) + 1}
        assert (d > 1).sum() == (10 * int(0.35 * 6) if per_class else int(0.35 * 60))
        if per_class:
            assert ((d > 1) @ F.one_hot(small.y).numpy() == 2).all()
        before = draw(small, replace(setting, c=0.0), r, 0).held
        assert (before.sum(0) == 1).all()
        assert (before.sum(1) > 0).all()
        assert (held | ~before).all()
        spread.append(((d > 1) @ F.one_hot(small.y).numpy()).std())
        often.append(d > 1)
        if partition == "single_class":
            assert (before == F.one_hot(small.y).T.numpy()).all()
    assert (max(spread) > 0) != per_class
    assert 0 < np.mean(often, 0).min() <= np.mean(often, 0).max() < 1  # everything is copied some time


def test_copies_go_to_all_others_alike() -> None:
    rng = np.random.default_rng(0)
    owner, shared = np.arange(4000) % 5, np.arange(4000) < 3000
    for variant in study.VARIANTS:
        held = copies(owner, shared, 2, rng.random((4000, 5)), variant)
        assert held[owner, np.arange(4000)].all()
        assert (held[:, 3000:].sum(0) == 1).all()
        for i, j in product(range(5), range(5)):
            if i != j:  # 600 examples of owner j: 0.02 is one standard error
                assert held[i, :3000][owner[:3000] == j].mean() == pytest.approx(2 / 4, abs=0.09)
        assert (set(held[:, :3000].sum(0)) == {3}) == (variant == "exact")
    few = copies(np.array([0, 1]), np.array([True, True]), 4, rng.random((2, 3)), "exact")
    assert few.all()  # three clients cannot have four copies more


def test_first_and_random_images_of_every_class(digits: Dataset) -> None:
    first = chosen(digits, 30, first=True, seed=0)
    assert torch.equal(first.y.bincount(), torch.full((10,), 30))
    of_3 = digits.train.x[digits.train.y == 3][:30]
    assert torch.equal(first.x[first.y == 3], of_3)
    some = [chosen(digits, 30, first=False, seed=seed).x for seed in (0, 0, 1)]
    assert torch.equal(some[0], some[1])
    assert not torch.equal(some[0], some[2])
    lacking = digits.train[digits.train.y != 7]
    with pytest.raises(UserError, match="takes 30 training images of every class, and digits has 0 of class 7"):
        chosen(replace(digits, train=lacking), 30, first=True, seed=0)


BAD: list[tuple[dict, str]] = [
    ({"q": 1.0}, r"q, .* \[0, 1\), got 1"), ({"q": -0.1}, "got -0.1"), ({"q": float("nan")}, "got nan"),
    ({"c": 1.5}, r"c, .* \[0, 1\], got 1.5"), ({"d": 10}, r"\[1, 9\] for 10 clients"), ({"d": 0}, r"d, .* \[1, 9\]"),
    ({"c": 0.003}, "c = 0.003 of all examples, 300"), ({"c": 0.03, "per_class": True}, "c = 0.03 of a class, 30"),
    ({"partition": "single"}, "did you mean 'single_class'"), ({"sharing": "optimal"}, "Known: binomial, exact"),
    ({"lr": 0.0}, "lr must be .* above 0"), ({"decay": 1.1}, r"decay must be in \(0, 1\]"), ({"decay": 0.0}, "decay"),
    ({"rounds": 0}, "rounds must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_what_cannot_be_run_is_refused(changes: dict, said: str) -> None:
    right = Setting("iid", 0.5, 3, 0.1)
    with pytest.raises(UserError, match=said):
        check(replace(right, **changes), 10, [30] * 10)


def test_the_limits_of_settings_are_allowed() -> None:
    for changes in ({"q": 0.0}, {"c": 0.0}, {"c": 1.0}, {"d": 1}, {"d": 9}, {"decay": 1.0}, {"rounds": 1}):
        check(replace(Setting("iid", 0.5, 3, 0.1), **changes), 10, [30] * 10)
    with pytest.raises(UserError, match="at least 2 clients, got 1"):
        check(Setting("iid", 0.5, 1, 0.1), 1, [30])


def test_subnormal_numbers_are_flushed_and_leave_the_results_as_they_are(digits: Dataset) -> None:
    """Raw pixels saturate the softmax, whose tails fall below 1e-308 within some rounds."""
    problem = Problem.of(chosen(digits, 6, first=True, seed=0), digits.test[slice(0, 40)], 10, 4000.0)
    setting, smallest = Setting("single_class", 0.5, 3, 0.2, rounds=20), torch.finfo(float64).tiny
    result = play(problem, setting, range(3), 0)
    assert torch.tensor(smallest, dtype=float64) / 2 > 0  # this thread is as it was
    kept = joined([play_block(problem, setting, [draw(problem, setting, r, 0) for r in range(3)])])
    for name in ("accuracy", "second_moment", "same_class", "cross_class"):
        np.testing.assert_allclose(getattr(result, name), getattr(kept, name), rtol=1e-12)
    with without_denormals():
        assert torch.tensor(smallest, dtype=float64) / 2 == 0
