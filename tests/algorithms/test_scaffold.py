"""SCAFFOLD, FedPVR and FedDyn line by line: what the controls are, FedDyn's objective and clipping."""

import numpy as np
import pytest
import torch
from closed_forms import FULL, Digits, Problem, play, reply_of, smooth_module, weights_of
from torch.nn import functional as F

from fedcommons import ClientData, Facts, Flat, LocalSGD, Work, flat, generator, seed_for
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.federation.client_sampling import participants
from fedcommons.federation.rounds import Standing

SIZES = (2, 9, 4, 17)
both_weightings = pytest.mark.parametrize("weighting", ["uniform", "samples"])
all_or_half = pytest.mark.parametrize("participation", [1.0, 0.5])


def state(now: Standing, name: str) -> np.ndarray:
    return flat(now.state, name).buffer.numpy()


def memories(now: Standing, name: str = "control") -> np.ndarray:
    """Of all four clients: zero for a client that was never drawn."""
    return np.array([flat(now.memory[i], name).buffer.numpy() if i in now.memory else np.zeros(3) for i in range(4)])


@pytest.mark.parametrize("option", [1, 2])
@both_weightings
@all_or_half
def test_scaffold_follows_the_paper(option: int, weighting: str, participation: float, least_squares: Problem) -> None:
    """Algorithm 1 written out. With 2 of 4 clients: the model divides by their weight, c by that of all four."""
    problem, lr, steps, w = least_squares(sizes=SIZES), 0.1, 3, weights_of(weighting, SIZES)
    x, c, c_i = np.zeros(3), np.zeros(3), np.zeros((4, 3))
    for now in play(problem, SCAFFOLD(option), LocalSGD(steps, FULL), 6, lr, participation, weighting):
        clients = participants(4, participation, 0, now.round)
        dy, dc = np.zeros((4, 3)), np.zeros((4, 3))
        for i in clients:
            y = x
            for _ in range(steps):
                y = y - lr * (problem.gradients(y)[i] - c_i[i] + c)
            new = problem.gradients(x)[i] if option == 1 else c_i[i] - c + (x - y) / (steps * lr)
            dy[i], dc[i] = y - x, new - c_i[i]
        x, c, c_i = x + w @ dy / w[clients].sum(), c + w @ dc / w.sum(), c_i + dc
        assert len(clients) == 4 * participation
        assert np.allclose(now.model.buffer.numpy(), x, rtol=0, atol=1e-13)
        assert np.allclose(state(now, "control"), c, rtol=0, atol=1e-12)
        assert np.allclose(memories(now), c_i, rtol=0, atol=1e-12)


@both_weightings
@all_or_half
def test_feddyn_follows_the_paper_line_by_line(weighting: str, participation: float, least_squares: Problem) -> None:
    """Algorithm 1 written out. The mean over the selected clients is plain; h divides by the weight of all four."""
    problem, lr, steps, alpha, w = least_squares(sizes=SIZES), 0.1, 3, 0.7, weights_of(weighting, SIZES)
    x, h, g = np.zeros(3), np.zeros(3), np.zeros((4, 3))
    for now in play(problem, FedDyn(alpha, clip=None), LocalSGD(steps, FULL), 6, lr, participation, weighting):
        clients = participants(4, participation, 0, now.round)
        dy = np.zeros((4, 3))
        for i in clients:
            y = x
            for _ in range(steps):
                y = y - lr * (problem.gradients(y)[i] - g[i] + alpha * (y - x))
            dy[i] = y - x
        mean, h, g = x + w @ dy / w[clients].sum(), h - alpha * w @ dy / w.sum(), g - alpha * dy
        x = mean - h / alpha
        for name, expected in (("model/mean", mean), ("h", h), ("model", x)):
            assert np.allclose(state(now, name), expected, rtol=0, atol=1e-12)
        assert np.allclose(memories(now, "gradient"), g, rtol=0, atol=1e-12)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1, 1e3])
def test_local_steps_of_feddyn_go_down_its_objective(squared: bool, clip: float | None) -> None:
    """f_i(y) - <g_i, y> + (alpha/2) ||y - x||^2, or ||y - x||, of all layers together; g_i <- g_i - alpha (y_i - x)."""
    module, draws, alpha = smooth_module(0.5), torch.Generator().manual_seed(0), 2.0
    data = ClientData(torch.randn(6, 4, generator=draws, dtype=torch.float64), torch.arange(6) % 3)
    work = Work(module, torch.device("cpu"))
    x = work.initial
    y, g = x.buffer.clone(), 0.1 * torch.randn(x.layout.size, generator=draws, dtype=torch.float64)
    for steps in (1, 2, 3):
        work.load(Flat(x.layout, y))
        loss = module.training_step((data.x, data.y), 0)
        gradient = torch.cat([t.reshape(-1) for t in torch.autograd.grad(loss, list(module.parameters()))])
        pull = alpha * (y - x.buffer) if squared else alpha / 2 * F.normalize(y - x.buffer, dim=0)
        whole = gradient - g + pull
        factor = 1.0 if clip is None else min(1.0, clip / float(whole.norm()))
        memory = {"gradient": Flat(x.layout, g.clone())}
        reply = reply_of(FedDyn(alpha, clip, squared), smooth_module(0.5), data, LocalSGD(steps, FULL), memory)
        moved = flat(reply.sums, "delta").buffer
        assert torch.allclose(flat(reply.memory or {}, "gradient").buffer, g - alpha * moved, rtol=0, atol=1e-14)
        assert torch.allclose((y - x.buffer - moved) / 0.5, factor * whole, rtol=1e-4, atol=1e-9)
        assert (factor < 0.9) == (clip == 0.1)
        y = x.buffer + moved


def test_the_control_of_option_2_is_the_mean_of_the_gradients_on_the_way(least_squares: Problem) -> None:
    """K counts steps, not examples or epochs: the last minibatch is smaller."""
    problem, lr = least_squares(), 0.1
    before, now = play(problem, SCAFFOLD(), LocalSGD(2, 3), 2, lr)
    correction = memories(before) - state(before, "control")
    for i in range(4):
        y, seen = before.model.buffer.numpy(), []
        for epoch in range(2):
            order = torch.randperm(8, generator=generator(seed_for(0, "client", 2, i), "order", epoch)).numpy()
            for rows in (order[:3], order[3:6], order[6:]):
                a, b = problem.a[i][rows], problem.b[i][rows]
                seen.append(a.T @ (a @ y - b) / len(b))
                y = y - lr * (seen[-1] - correction[i])
        assert np.allclose(memories(now)[i], np.mean(seen, axis=0), rtol=0, atol=1e-12)
        assert np.abs(correction[i]).max() > 1e-2


def test_fedpvr_corrects_the_chosen_layers_and_no_others(digits: Digits) -> None:
    """In one full-batch step from the same x the local model differs from FedAvg's by -eta (c - c_i), there only."""
    default = flat(FedPVR().start(digits().model, Facts(1, (1,), 1), 0), "control")  # the linear layers
    assert {name.rpartition(".")[0] for name in default} == {"network.hidden.0", "network.last"}
    federation = digits(lr=0.1).training(LocalSGD(1, FULL))
    algorithm = FedPVR(layers="network.last, *conv1")
    now = federation.run(algorithm, federation.plan(1))[0][0]
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
