"""FedLAP against its formulas on softmax regression, whose gradients are closed forms; its epsilon."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from closed_forms import FULL, reply_of
from opacus.accountants import RDPAccountant
from torch import Tensor, nn
from torchmetrics import CatMetric

from fedcommons import ClientData, Clients, Examples, LocalSGD, RunData, UserError, experiment
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedlap import FedLAP
from fedcommons.flat_tensors import Flat, data
from fedcommons.privacy import gaussian
from fedcommons.privacy.dp_sgd import DPSGD, Target
from fedcommons.privacy.noise import SEED_ALONE, Noise
from fedcommons.runs.build import build
from fedcommons.runs.checks import require_target
from fedcommons.seeding import generator, set_default_generator
from fedcommons.testing.federations import Federation
from lightning_modules import Classifier

SMALL = FedLAP(radius=0.7, ipc=2, trajectories=2, steps=3, image_steps=3, local_steps=2, match_batch=6, image_lr=0.5,
               mse=0.3, model_lr=0.4, server_steps=8)  # fmt: skip
SIZES, CLASSES = (9, 7), 3
DP = DPSGD(noise_multiplier=0.4, clip=0.5)


def _module() -> Classifier:
    set_default_generator("softmax regression")
    return Classifier(nn.Sequential(nn.Linear(4, CLASSES)), lr=0.1).double()


class Users(Classifier):
    """A user-defined model that calls a function at each training step, on the images."""

    def __init__(self, act: Callable[["Users", Tensor], Tensor]) -> None:
        super().__init__(_module().network, lr=0.1)
        self.act, self.metric = act, CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.act(self, batch[0]), *batch[1:]), batch_idx)


def _federation(loop: LocalSGD) -> Federation:
    """Two clients; the second one lacks a class."""
    draws = np.random.default_rng(0)
    y = np.concatenate([draws.integers(0, CLASSES, SIZES[0]), draws.integers(1, CLASSES, SIZES[1])])
    store = Examples(torch.from_numpy(draws.normal(size=(sum(SIZES), 4))), torch.from_numpy(y))
    clients = Clients(store, [np.arange(SIZES[0]), np.arange(SIZES[0], sum(SIZES))])
    return Federation(RunData(clients, clients, {}, n_classes=CLASSES), _module, loop, "samples")


# An independent reference: W (3, 4) and b (3,) as numbers, gradients by hand; autograd only for the pixels of S


def _gradient(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the mean cross entropy:  (P - Y)^T X / n  and the mean of P - Y."""
    gap = torch.softmax(x @ w.T + b, 1) - torch.eye(CLASSES, dtype=x.dtype)[y]
    return gap.T @ x / len(x), gap.mean(0)


def _distance(s: tuple[Tensor, Tensor], g: tuple[Tensor, Tensor]) -> Tensor:
    cosines = [a @ b / a.norm() / b.norm() for a, b in zip(s[0], g[0], strict=True)]
    squares = sum(((a - b) ** 2).sum() for a, b in zip(s, g, strict=True))
    return 1 - torch.stack(cosines).mean() + 1 - s[1] @ g[1] / s[1].norm() / g[1].norm() + SMALL.mse * squares


def _images(x0: tuple[Tensor, Tensor], rows: ClientData, labels: Tensor, seed: int, dp: DPSGD | None) -> Tensor:
    images = torch.randn((len(labels), 4), generator=generator(seed, "first images")).double()
    plain, noise = generator(seed, "real images"), Noise(SEED_ALONE).call("gradients for images", rows.x, rows.y)
    speed, n = torch.zeros_like(images), len(rows)
    for number in range(SMALL.trajectories * SMALL.steps):
        if number % SMALL.steps == 0:
            w, b = x0
        if dp is None:
            batch = torch.randperm(n, generator=plain)[: SMALL.match_batch]
            g = _gradient(w, b, rows.x[batch], rows.y[batch])
        else:
            batch = np.flatnonzero(noise.stream("batch", number).random(n) < SMALL.match_batch / n)
            total = np.zeros(CLASSES * 5)
            for j in batch:
                g_j = torch.cat([t.reshape(-1) for t in _gradient(w, b, rows.x[j : j + 1], rows.y[j : j + 1])]).numpy()
                total += g_j * min(1, dp.clip / np.linalg.norm(g_j))
            total += dp.noise_multiplier * dp.clip * noise.stream("noise", number).standard_normal(len(total))
            mean = torch.from_numpy(total / SMALL.match_batch)
            g = mean[: CLASSES * 4].view(CLASSES, 4), mean[CLASSES * 4 :]
        for _ in range(SMALL.image_steps):
            images.requires_grad_()
            (slope,) = torch.autograd.grad(_distance(_gradient(w, b, images, labels), g), images)
            speed = 0.5 * speed + slope
            images = images.detach() - SMALL.image_lr * speed
        for _ in range(SMALL.local_steps):
            of_w, of_b = _gradient(w, b, images, labels)
            w, b = w - SMALL.model_lr * of_w, b - SMALL.model_lr * of_b
        far = float(((w - x0[0]) ** 2).sum() + ((b - x0[1]) ** 2).sum()) ** 0.5 / SMALL.radius
        w, b = ((at + (end - at) / max(far, 1)) for end, at in ((w, x0[0]), (b, x0[1])))
    return images


@pytest.mark.parametrize("dp", [None, DP])
@pytest.mark.parametrize("classes", ["own", "all"])
def test_a_round_is_that_of_the_formulas(classes: str, dp: DPSGD | None) -> None:
    method, federation = replace(SMALL, classes=classes), _federation(LocalSGD(1, FULL, dp=dp))
    state = method.start(federation.model, federation.plan(1).facts, 0)
    x0 = federation.model["network.0.weight"].clone(), federation.model["network.0.bias"].clone()
    replies, fitted = {}, []
    for i, rows in enumerate(federation.data.clients):
        work = federation.work()
        replies[i] = method.client(work, method.down(state, 1, i), {}, rows, 1, seed := 7 + i)
        labels = (rows.y.unique() if classes == "own" else torch.arange(CLASSES)).repeat_interleave(2)
        fitted.append((_images(x0, rows, labels, seed, dp), labels))
        assert torch.allclose(data(replies[i].each["images"]).flatten(0, 1), fitted[i][0], rtol=0, atol=1e-6)
        assert ("labels" in replies[i].each) == (classes == "own")
    after = method.merge(federation.serial(method), state, {}, replies, 1, 0)["model"]
    w, b = x0
    for _ in range(method.server_steps):
        steps = [_gradient(w, b, *client) for client in fitted]
        w = w - 0.4 * (9 / 16 * steps[0][0] + 7 / 16 * steps[1][0])
        b = b - 0.4 * (9 / 16 * steps[0][1] + 7 / 16 * steps[1][1])
        moved = torch.cat([(w - x0[0]).flatten(), b - x0[1]])
        if moved.norm() >= 0.7:
            moved *= 0.7 / moved.norm()
            break
    assert isinstance(after, Flat)
    assert torch.allclose(after.buffer - federation.model.buffer, moved, rtol=0, atol=1e-6)
    assert moved.norm() > 0.1


def test_no_point_follows_the_last_one_of_a_trajectory() -> None:
    seen: list[int] = []
    reply_of(SMALL, Users(lambda _, x: seen.append(len(x)) or x), _federation(LocalSGD(1, FULL)).data.clients[0])
    assert seen.count(6) == 2 * 3 * (1 + 3) + 2 * (3 - 1) * 2  # real batches and synthetic images are six each


@pytest.mark.parametrize("dp", [None, DP])
def test_a_straggler_visits_fewer_points(dp: DPSGD | None) -> None:
    images = []
    for steps, share in ((4, 0.5), (2, 1.0), (4, 1.0)):
        federation, method = _federation(LocalSGD(1, FULL, dp=dp)), replace(SMALL, steps=steps)
        work, state = federation.work(), {"model": federation.model}
        work.share = share
        reply = method.client(work, method.down(state, 1, 0), {}, federation.data.clients[0], 1, 0)
        images.append(data(reply.each["images"]))
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


@pytest.mark.parametrize("draw", [np.random.random, random.random])
def test_draws_of_a_users_model_follow_from_the_seed(draw: Callable[[], float]) -> None:
    ends = []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002  (users' models use this generator)
        random.seed(seed)
        federation = replace(_federation(LocalSGD(1, FULL)), module=lambda: Users(lambda _, x: x + draw()))
        ends.append(federation.run(SMALL, federation.plan(1))[-1][0].state)
    assert all(torch.equal(*(data(end[name]) for end in ends)) for name in ("images", "model"))


# Privacy

DELTA = 1e-5


def test_epsilon_is_that_of_all_noisy_gradients_and_covers_all_that_is_sent_only_without_own_classes() -> None:
    federation, method = _federation(LocalSGD(1, FULL, dp=DP)), replace(SMALL, classes="all")
    ledger = federation.run(method, federation.plan(2))[-1][0].ledger
    assert (dict(ledger.uncovered), dict(ledger.n_disclosed)) == ({}, {})
    for i, n in enumerate(SIZES):
        accountant = RDPAccountant()
        accountant.history = [(DP.noise_multiplier, 6 / n, 2 * 2 * 3)]
        assert ledger.commons.epsilon(i, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)
    whole = federation.run(replace(method, match_batch=100), federation.plan(1))[-1][0].ledger  # q = 1
    exact = gaussian.delta(whole.commons.epsilon(0, DELTA), (2 * 3) ** 0.5 / DP.noise_multiplier)
    assert exact == pytest.approx(DELTA, rel=1e-6)
    ledger = federation.run(SMALL, federation.plan(2))[-1][0].ledger  # number and labels of images show their classes
    counts = sorted((name.split()[0], times) for name, times in ledger.commons.uncovered.items())
    assert counts == [("images", 4), ("labels", 4)]
    assert (dict(ledger.commons.covered), ledger.n_disclosed) == ({}, dict(enumerate(SIZES)))


def _keeps(module: Users, x: Tensor) -> Tensor:
    """Store a real example, and put it in place of the synthetic images of the next call."""
    if len(x) == 1:
        module.metric.update(x)
    elif module.metric.update_count:
        x = torch.as_tensor(module.metric.compute())[-1:] + 0 * x
    return x


def _writes(module: Users, x: Tensor) -> Tensor:
    module.network[0].bias.data.add_(float(x.detach()[0, 0]))  # pyright: ignore
    return x


def _moves(module: Users, x: Tensor) -> Tensor:
    module.network[0].bias.data = module.network[0].bias.data + float(x.detach()[0, 0])  # pyright: ignore
    return x


@pytest.mark.parametrize(
    ("act", "reason"), [(_keeps, "user-defined"), (_writes, "writes the weights"), (_moves, "writes the weights")]
)
def test_images_of_a_users_model_are_uncovered(act: Callable[[Users, Tensor], Tensor], reason: str) -> None:
    federation = replace(_federation(LocalSGD(1, FULL, dp=DP)), module=lambda: Users(act))
    ledger = federation.run(replace(SMALL, classes="all"), federation.plan(1))[-1][0].ledger
    names = [name for name in ledger.uncovered if name.startswith("images ")]
    assert len(names) == 1
    assert reason in names[0]
    assert (dict(ledger.commons.covered), ledger.n_disclosed) == ({}, dict(enumerate(SIZES)))


def test_without_noise_nothing_is_covered() -> None:
    for dp in (None, replace(DP, noise_multiplier=0.0)):
        federation = _federation(LocalSGD(1, FULL, dp=dp))
        ledger = federation.run(replace(SMALL, classes="all"), federation.plan(1))[-1][0].ledger
        assert (dict(ledger.uncovered), dict(ledger.commons.covered)) == ({"images": 2}, {})
        assert ledger.n_disclosed == dict(enumerate(SIZES))


def test_a_target_epsilon_is_met_by_every_client() -> None:
    federation = _federation(LocalSGD(1, FULL, dp=replace(DP, target=Target(4.0, DELTA, 2))))
    ledger = federation.run(replace(SMALL, classes="all"), federation.plan(2))[-1][0].ledger
    assert all(3.9 <= ledger.commons.epsilon(i, DELTA) <= 4.0 for i in (0, 1))


def test_a_target_epsilon_that_so_many_steps_cannot_meet_is_refused() -> None:
    values = {"algorithm": "fedlap", "fedlap.classes": "all", "dp.local": True, "dp.target_epsilon": 1.0}
    with pytest.raises(UserError, match="q = 1, 15000000 steps"):
        build(experiment("smoke", values={**values, "fedlap.trajectories": 10**6, "fedlap.match_batch": 10**6}))


def test_a_method_with_local_training_states_no_noisy_steps() -> None:
    class Both(FedAvg):
        def noisy_steps(self) -> tuple[int, int]:
            return 1, 1

    with pytest.raises(UserError, match="trains_locally"):
        require_target(Both(), LocalSGD(1, 5, dp=replace(DP, target=Target(4.0, DELTA, 1))), [9])
