"""SCAFFOLD and FedPVR: what the controls are, what they sum to and what they bring about, on least squares."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.local import LocalSGD
from fedcommons.errors import UserError
from fedcommons.federation.participation import participants
from fedcommons.federation.rounds import Standing
from fedcommons.seeds import generator, seed_for
from fedcommons.tensors import flat, flatten
from lightning_modules import Classifier
from lightning_modules.networks import VGG11

if TYPE_CHECKING:
    from fedcommons.testing.federations import Federation, LeastSquares

    Digits = Callable[..., Federation]
    Problem = Callable[..., LeastSquares]

FULL = 1000  # a batch size above every client's number of examples: full-batch steps, in which the order only rounds
SIZES = (2, 9, 4, 17)
both_options = pytest.mark.parametrize("option", [1, 2])
both_weightings = pytest.mark.parametrize("weighting", ["uniform", "samples"])


def _weights(weighting: str, sizes: Sequence[int] = SIZES) -> np.ndarray:
    return np.array(sizes, float) if weighting == "samples" else np.ones(len(sizes))


def _optimum(problem: "LeastSquares", weights: np.ndarray) -> np.ndarray:
    """Where sum_i weights_i f_i is least."""
    parts = list(zip(weights, problem.a, problem.b, strict=True))
    hessian = np.sum([w * a.T @ a / len(b) for w, a, b in parts], axis=0)
    return np.linalg.solve(hessian, np.sum([w * a.T @ b / len(b) for w, a, b in parts], axis=0))


def _play(
    problem: "LeastSquares",
    algorithm: Algorithm,
    local: LocalSGD,
    rounds: int,
    lr: float,
    participation: float = 1.0,
    weighting: str = "uniform",
) -> list[Standing]:
    federation = problem.federation(lr).training(local, weighting)
    return [now for now, _ in federation.play(algorithm, federation.plan(rounds, participation))]


def _control(now: Standing, client: int | None = None) -> np.ndarray:
    """c, or c_i: zero for a client that was never drawn."""
    if client is None:
        return flat(now.state, "control").buffer.numpy()
    return flat(now.memory[client], "control").buffer.numpy() if client in now.memory else np.zeros(3)


@both_options
@both_weightings
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_follows_the_paper_line_by_line(
    option: int, weighting: str, participation: float, least_squares: "Problem"
) -> None:
    """Algorithm 1 written out. With 2 of 4 clients: the model divides by their weight, c by that of all four."""
    problem, lr, steps, w = least_squares(sizes=SIZES), 0.1, 3, _weights(weighting)
    x, c, c_i = np.zeros(3), np.zeros(3), np.zeros((4, 3))
    for now in _play(problem, SCAFFOLD(option), LocalSGD(steps, FULL), 6, lr, participation, weighting):
        drawn = participants(4, participation, 0, now.round)
        dy, dc = np.zeros((4, 3)), np.zeros((4, 3))
        for i in drawn:
            y = x
            for _ in range(steps):
                y = y - lr * (problem.gradients(y)[i] - c_i[i] + c)
            new = problem.gradients(x)[i] if option == 1 else c_i[i] - c + (x - y) / (steps * lr)
            dy[i], dc[i] = y - x, new - c_i[i]
        x, c, c_i = x + w @ dy / w[drawn].sum(), c + w @ dc / w.sum(), c_i + dc
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-13)
        assert np.allclose(_control(now), c, rtol=0, atol=1e-12)
        assert np.allclose([_control(now, i) for i in range(4)], c_i, rtol=0, atol=1e-12)


def test_first_round_of_two_of_four_by_hand(least_squares: "Problem") -> None:
    """One step of rate 1/8 from zero: y_i = -g_i/8, c_i = g_i, x = -(g_a + g_b)/16, c = (g_a + g_b)/4."""
    problem = least_squares()
    (now,) = _play(problem, SCAFFOLD(), LocalSGD(1, FULL), 1, 0.125, 0.5)
    drawn = participants(4, 0.5, 0, 1)
    both = problem.gradients(np.zeros(3))[drawn].sum(0)
    assert len(drawn) == 2
    assert np.allclose(now.model.buffer.numpy(), -both / 16, rtol=0, atol=1e-14)
    assert np.allclose(_control(now), both / 4, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", [SCAFFOLD, FedPVR])
def test_the_control_of_option_2_is_the_mean_of_the_gradients_on_the_way(
    method: type[SCAFFOLD] | type[FedPVR], least_squares: "Problem"
) -> None:
    """c_i+ = c_i - c + (x - y_i)/(K eta), and y_i took K steps of g - c_i + c: only the mean of g is left.

    With minibatches, of which the last is smaller: K counts steps, not examples or epochs.
    """
    problem, lr, local = least_squares(), 0.1, LocalSGD(2, 3)
    algorithm = FedPVR(layers="*") if method is FedPVR else SCAFFOLD()
    before, now = _play(problem, algorithm, local, 2, lr)
    for i in range(4):
        y, seen = before.model.buffer.numpy(), []
        for epoch in range(2):
            order = torch.randperm(8, generator=generator(seed_for(0, "client", 2, i), "order", epoch)).numpy()
            for rows in (order[:3], order[3:6], order[6:]):
                a, b = problem.a[i][rows], problem.b[i][rows]
                seen.append(a.T @ (a @ y - b) / len(b))
                y = y - lr * (seen[-1] - _control(before, i) + _control(before))
        assert np.allclose(_control(now, i), np.mean(seen, axis=0), rtol=0, atol=1e-12)
        assert np.abs(_control(before, i) - _control(before)).max() > 1e-2  # a correction was at work


def test_the_control_of_option_1_is_the_full_gradient_at_x_in_evaluation_mode(digits: "Digits") -> None:
    """Whatever dropout, augmentation and the batches do in the local steps; 20 examples in batches of 6."""
    federation, x = digits(dropout=0.5).training(LocalSGD(2, 6, augment=True)), digits().model
    rows, module = federation.data.clients[3], federation.module().eval()
    module.training_step((rows.x, rows.y), 0).backward()  # pyright: ignore
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    algorithm = SCAFFOLD(option=1)
    plan = federation.plan(1)
    message = algorithm.down(algorithm.start(x, plan.facts, 0), 1, 3)
    reply = algorithm.client(federation.work(), message, {}, rows, 1, 0)
    assert reply.memory is not None
    assert torch.allclose(flat(reply.memory, "control").buffer, expected, rtol=0, atol=1e-6)


@both_weightings
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("option", [1, 2, None], ids=["option 1", "option 2", "FedPVR"])
def test_the_mean_of_all_clients_controls_is_the_servers(
    option: int | None, participation: float, weighting: str, least_squares: "Problem"
) -> None:
    """After every round, over all N clients, those never drawn counted with zero."""
    problem, local, w = least_squares(sizes=SIZES), LocalSGD(2, 3), _weights(weighting)
    algorithm = FedPVR("*") if option is None else SCAFFOLD(option)
    played = _play(problem, algorithm, local, 5, 0.05, participation, weighting)
    for now in played:
        mean = w @ np.array([_control(now, i) for i in range(4)]) / w.sum()
        assert np.allclose(mean, _control(now), rtol=0, atol=1e-12)
        assert np.abs(_control(now)).max() > 1e-3
    assert participation == 1 or len(played[0].memory) == 2


@both_options
@both_weightings
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_reaches_the_joint_optimum_of_different_clients(
    option: int, weighting: str, participation: float, least_squares: "Problem"
) -> None:
    """That of sum_i f_i, or of sum_i n_i f_i; FedAvg with the same steps stops elsewhere."""
    problem, w = least_squares(sizes=(6, 9, 7, 17)), _weights(weighting, (6, 9, 7, 17))
    local, rounds = LocalSGD(3, FULL), 60 if participation == 1 else 90
    found = _play(problem, SCAFFOLD(option), local, rounds, 0.2, participation, weighting)[-1]
    assert np.linalg.norm(found.model.buffer.numpy() - _optimum(problem, w)) < 1e-8
    for i in range(4):  # and there the controls are the clients' gradients
        assert np.allclose(_control(found, i), problem.gradients(_optimum(problem, w))[i], rtol=0, atol=1e-7)
    stuck = _play(problem, FedAvg(), local, 20, 0.2, weighting=weighting)[-1].model.buffer.numpy()
    assert np.linalg.norm(stuck - _optimum(problem, w)) > 1e-2
    assert np.linalg.norm(_optimum(problem, np.ones(4)) - _optimum(problem, np.array([6, 9, 7, 17]))) > 1e-2


def test_option_1_and_2_differ_only_after_the_first_round(least_squares: "Problem") -> None:
    problem, local = least_squares(), LocalSGD(3, FULL)
    one, two = (_play(problem, SCAFFOLD(o), local, 2, 0.1) for o in (1, 2))
    assert np.array_equal(one[0].model.buffer.numpy(), two[0].model.buffer.numpy())
    assert np.abs(one[1].model.buffer.numpy() - two[1].model.buffer.numpy()).max() > 1e-4


@both_options
def test_identical_clients_need_no_correction(option: int, least_squares: "Problem") -> None:
    one = least_squares(sizes=(8,))
    many = type(one)(list(one.a) * 5, list(one.b) * 5)
    local = LocalSGD(3, FULL)
    for algorithm in (SCAFFOLD(option), FedPVR(layers="*")):
        ours, theirs = (_play(many, a, local, 10, 0.1)[-1].model.buffer.numpy() for a in (algorithm, FedAvg()))
        assert np.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_fedpvr_corrects_the_chosen_layers_and_no_others(digits: "Digits") -> None:
    """In one full-batch step from the same x the local model differs from FedAvg's by -eta (c - c_i), there only."""
    federation = digits(lr=0.1).training(LocalSGD(1, FULL))
    algorithm = FedPVR(layers="network.last, *conv1")
    now = federation.play(algorithm, federation.plan(1))[0][0]
    rows, seed, message = federation.data.clients[2], 7, algorithm.down(now.state, 2, 2)
    ours = flat(algorithm.client(federation.work(), message, now.memory[2], rows, 2, seed).sums, "delta")
    theirs = flat(FedAvg().client(federation.work(), message, {}, rows, 2, seed).sums, "delta")
    c, c_i = flat(message.common, "control"), flat(now.memory[2], "control")
    chosen = ["network.conv1.weight", "network.conv1.bias", "network.last.weight", "network.last.bias"]
    assert list(c) == list(c_i) == chosen
    for name in ours:
        if name in chosen:
            assert torch.allclose(ours[name] - theirs[name], -0.1 * (c[name] - c_i[name]), rtol=0, atol=1e-6)
            assert (c[name] - c_i[name]).abs().max() > 1e-3
        else:
            assert torch.equal(ours[name], theirs[name])


def test_fedpvr_sends_only_the_chosen_parts_of_the_controls(digits: "Digits") -> None:
    federation = digits()
    model = federation.model.buffer.nbytes
    for layers, numbers in (("", 0), ("network.last", 170), ("*", federation.model.buffer.numel())):
        traffic = federation.play(FedPVR(layers), federation.plan(1))[0][0].traffic
        assert (traffic.down, traffic.up) == (5 * (model + 4 * numbers),) * 2


def test_fedpvr_corrects_the_linear_layers_unless_told_otherwise(digits: "Digits") -> None:
    """The three of VGG-11, as the authors do, of which two stand in the head."""
    facts, algorithm = Facts(1, (1,), 1), FedPVR()
    cnn = flat(algorithm.start(digits().model, facts, 0), "control")
    assert {name.rpartition(".")[0] for name in cnn} == {"network.hidden.0", "network.last"}
    with torch.device("meta"):  # names and shapes are enough
        vgg = flatten(dict(Classifier(VGG11((3, 32, 32), 10), lr=0.1).named_parameters()))
    control = flat(algorithm.start(vgg, facts, 0), "control")
    assert list(control) == [
        f"network.{layer}.{kind}" for layer in ("head.1", "head.4", "last") for kind in ("weight", "bias")
    ]
    assert control.layout.size == 2 * (512 * 512 + 512) + 5130


def test_fedpvr_names_the_layers_where_a_pattern_matches_none(digits: "Digits") -> None:
    federation = digits()
    plan = federation.plan(1)
    names = "network.conv1, network.conv2, network.hidden.0, network.last"
    with pytest.raises(UserError, match=rf"'head\*' matches no layer; the layers are {names}"):
        FedPVR(layers="network.last,head*").start(federation.model, plan.facts, 0)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [(SCAFFOLD(), "SCAFFOLD with option 2 .* without momentum"), (FedPVR(), "FedPVR")],
)
def test_momentum_is_refused_where_the_control_would_not_be_a_mean_of_gradients(
    algorithm: SCAFFOLD | FedPVR, reason: str, digits: "Digits"
) -> None:
    federation = digits(momentum=0.9)
    message = algorithm.down(algorithm.start(federation.model, federation.plan(1).facts, 0), 1, 0)
    with pytest.raises(ValueError, match=rf"{reason}.*momentum is 0\.9"):
        algorithm.client(federation.work(), message, {}, federation.data.clients[0], 1, 0)


def test_option_1_is_defined_with_momentum(least_squares: "Problem") -> None:
    """Its control is a gradient at x, however the local steps are taken: still one central step for K = 1."""
    problem = least_squares()
    federation = problem.federation(0.1, 0.9).training(LocalSGD(1, FULL))
    played = federation.play(SCAFFOLD(option=1), federation.plan(2))
    x = np.zeros(3)
    for _ in range(2):
        x = x - 0.1 * problem.gradients(x).mean(0)
    assert np.allclose(played[-1][0].model.buffer.numpy(), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("algorithm", "fields", "said"),
    [
        (SCAFFOLD(), {"client.optimizer": "adam"}, "client.optimizer must be sgd for scaffold, whose"),
        (FedPVR(), {"client.optimizer": "adam"}, "client.optimizer must be sgd for fedpvr, whose"),
        (SCAFFOLD(), {"client.momentum": 0.9}, "client.momentum must be 0 for scaffold, .* or scaffold.option 1"),
        (FedPVR(), {"client.momentum": 0.9}, r"client.momentum must be 0 for fedpvr, .* got 0.9; use momentum 0\.$"),
        (SCAFFOLD(1), {"dp.local": True}, "scaffold.option must be 2 with dp.local"),
        (SCAFFOLD(1), {"client.momentum": 0.9}, None),
        (SCAFFOLD(), {"dp.local": True}, None),
        (FedPVR(), {"dp.local": True}, None),
    ],
)
def test_experiments_for_which_it_is_not_defined_are_refused(
    algorithm: SCAFFOLD | FedPVR, fields: dict[str, Any], said: str | None
) -> None:
    flat = {"client.optimizer": "sgd", "client.momentum": 0.0, "dp.local": False} | fields
    if said is None:
        algorithm.check(flat)
    else:
        with pytest.raises(UserError, match=f"^{said}"):
            algorithm.check(flat)


@pytest.mark.parametrize("option", [1, 2, None], ids=["option 1", "option 2", "FedPVR"])
def test_another_optimizer_is_refused(option: int | None, digits: "Digits") -> None:
    federation = digits()

    def module() -> Classifier:
        made = federation.module()
        assert isinstance(made, Classifier)
        made.optimizer = "adam"
        return made

    algorithm = FedPVR() if option is None else SCAFFOLD(option)
    message = algorithm.down(algorithm.start(federation.model, federation.plan(1).facts, 0), 1, 0)
    with pytest.raises(ValueError, match=r"defined for SGD with one learning rate, and .* is Adam"):
        algorithm.client(replace(federation, module=module).work(), message, {}, federation.data.clients[0], 1, 0)
