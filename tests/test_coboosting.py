"""Co-Boosting against its equations: an independent slow loop, a step of the weights by hand, DENSE without them."""

from dataclasses import replace
from math import cos, pi
from typing import Any

import pytest
import torch
from closed_forms import Digits
from torch import Tensor
from torch.nn import functional as F

from fedcommons.algorithms.coboosting import CoBoosting, mixed
from fedcommons.algorithms.dense import DENSE
from fedcommons.algorithms.ensemble import Ensemble
from fedcommons.algorithms.upsampling import Upsampler
from fedcommons.core.local import LocalSGD
from fedcommons.seeds import generator, seed_for, set_default_generator
from fedcommons.tensors import Flat, data
from fedcommons.testing.federations import Federation
from lightning_modules import Classifier

SMALL = CoBoosting(generator_steps=3, generated=6, width=2, latent=5, server_batch=4, weight_step=0.05)
LOOP = LocalSGD(epochs=1, batch_size=8)


@pytest.fixture
def doubled(digits: Digits) -> Federation:
    """Three clients and a CNN in float64."""
    federation = digits((9, 7, 8)).training(LOOP)
    module = federation.module
    return replace(federation, module=lambda: module().double())


def _filled(federation: Federation, model: Tensor) -> Classifier:
    work = federation.work()
    work.load(Flat(work.params.layout, model))
    assert isinstance(work.module, Classifier)
    return work.module.eval()


def _kl(teacher: Tensor, student: Tensor, t: float) -> Tensor:
    """t^2 KL of each row, by torch."""
    return t**2 * F.kl_div((student / t).log_softmax(1), (teacher / t).softmax(1), reduction="none").sum(1)


def _slow(federation: Federation, sent: Tensor, w: Tensor, method: CoBoosting) -> tuple[Tensor, Tensor, Tensor]:
    """Three rounds of the server from its three steps, in plain torch; the model, the pool, and the weights."""
    clients, student = [_filled(federation, y) for y in sent], _filled(federation, w @ sent)
    before, epochs, t = method.warmup_rounds, 3 * method.server_epochs, method.boundary_temperature
    sgd = torch.optim.SGD(student.parameters(), 0.0, method.server_momentum, weight_decay=method.server_decay)
    pool, labels = torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)

    def ensemble(x: Tensor, w: Tensor) -> Tensor:
        total: Any = sum(a * f(x) for a, f in zip(w, clients, strict=True))
        return total / w.sum()

    for e in range(epochs):
        key, n = seed_for(seed_for(0, "merge", before + 1 + e // method.server_epochs), "epoch", e), len(pool)
        draws = generator(key, "noise and labels")
        set_default_generator(key, "generator")
        network = Upsampler((1, 8, 8), method.latent, method.width).double()
        z = torch.randn(method.generated, method.latent, generator=draws).double().requires_grad_()
        y = torch.randint(10, (method.generated,), generator=draws)
        adam = torch.optim.Adam([*network.parameters(), z], method.generator_lr, betas=(0.5, 0.999))
        best, lowest = torch.zeros(0), float("inf")
        for _ in range(method.generator_steps):
            pixels = network(z)
            x = student.normalise(255 * pixels)
            f = ensemble(x, w)
            hard = 1 - f.softmax(1)[torch.arange(len(y)), y].detach()
            far = method.boundary * _kl(f, student(x), t).mean()
            loss = (hard * F.cross_entropy(f, y, reduction="none")).mean() - far
            if float(loss.detach()) < lowest:
                best, lowest = pixels.detach(), float(loss.detach())
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), method.clip)
            adam.step()
        if n:
            for rows in torch.randperm(n, generator=generator(seed_for(key, "weights"), "order")).split(4):
                v = w.clone().requires_grad_()
                F.cross_entropy(ensemble(student.normalise(pool[rows].double()), v), labels[rows]).backward()
                assert v.grad is not None
                w = (w - method.weight_step * 0.99**e * v.grad.sign()).clip(0, 1)
        pool, labels = torch.cat([pool, (best * 255).round().to(torch.uint8)]), torch.cat([labels, y])
        u = 2 * torch.rand(len(pool), 10, generator=generator(key, "directions")) - 1
        sgd.param_groups[0]["lr"] = method.server_lr * (1 + cos(pi * e / epochs)) / 2
        for rows in torch.randperm(len(pool), generator=generator(key, "order")).split(method.server_batch):
            pixels = (pool[rows].double() / 255).requires_grad_()
            (u[rows] * (ensemble(student.normalise(255 * pixels), w) / method.temperature).softmax(1)).sum().backward()
            assert pixels.grad is not None
            x = student.normalise(255 * (pixels.detach() + method.move / 255 * pixels.grad.sign()))
            sgd.zero_grad()
            _kl(ensemble(x, w).detach(), student(x), method.temperature).mean().backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), method.clip)
            sgd.step()
    return torch.cat([p.detach().reshape(-1) for p in student.parameters()]), pool, w


VARIANTS = {
    "uniform": SMALL,
    "samples": replace(
        SMALL, warmup_rounds=1, server_epochs=2, generator_lr=0.05, boundary=3.0, boundary_temperature=0.5, clip=1e-3
    ),
}


@pytest.mark.parametrize("weighting", VARIANTS)
def test_three_rounds_are_those_of_an_independent_loop(doubled: Federation, weighting: str) -> None:
    """The weights start at the clients' shares, and epochs are counted from the first round after the warm-up."""
    method, sizes = VARIANTS[weighting], torch.tensor([9.0, 7, 8], dtype=torch.float64)
    played = [now for now, _ in doubled.training(LOOP, weighting).play(method, doubled.plan(method.warmup_rounds + 3))]
    sent = data(played[method.warmup_rounds].state["ensemble"])
    shares = sizes / sizes.sum() if weighting == "samples" else torch.full_like(sizes, 1 / 3)
    model, pool, w = _slow(doubled, sent, shares, method)
    last = played[-1]
    assert data(last.state["images"]).equal(pool)
    assert torch.allclose(data(last.state["learned"]), w, rtol=0, atol=1e-9)
    assert not torch.allclose(w, w.mean())
    assert torch.allclose(last.model.buffer, model, rtol=0, atol=1e-6)


def test_a_step_of_the_weights_by_hand() -> None:
    """With two clients of which one knows the label, its weight grows and the other's falls, by the step."""
    logits, labels = torch.tensor([[[3.0, 0.0]], [[0.0, 3.0]]]), torch.tensor([0])
    after = SMALL.reweighed(torch.tensor([0.5, 0.5]), logits, labels, 0.1)
    assert after.tolist() == pytest.approx([0.6, 0.4])
    assert SMALL.reweighed(torch.tensor([0.95, 0.05]), logits, labels, 0.1).tolist() == [1.0, 0.0]


def test_weights_that_would_all_be_zero_stay() -> None:
    """As f does not change with the scale of w, sum_i w_i g_i = 0: only rounding's signs could make all weights 0."""
    draws = torch.Generator().manual_seed(0)
    stayed = 0
    for _ in range(50):
        logits, labels = torch.randn(1, 5, 4, generator=draws), torch.randint(4, (5,), generator=draws)
        w = SMALL.reweighed(torch.tensor([0.05]), logits, labels, 1.0)
        assert w.sum() > 0
        stayed += w.tolist() == pytest.approx([0.05])
    assert stayed


def test_with_equal_weights_and_images_that_stay_it_is_denses_distillation(doubled: Federation) -> None:
    models = torch.stack([doubled.work().initial.buffer * factor for factor in (0.5, 1.1, 1.4)])
    images, batches, result = doubled.data.clients.store.x[:6], torch.arange(6).split(4), []
    for method in (CoBoosting(move=0.0, server_decay=0.0, clip=1e30), DENSE(temperature=4.0, server_lr=0.01)):
        work = doubled.work()
        work.module.eval()
        ensemble, velocity = Ensemble(work, models, torch.zeros(3, 0)), torch.zeros_like(models[0])
        if isinstance(method, DENSE):
            with torch.no_grad():
                targets = ensemble.logits(images).mean(0)
            method.distil(work, images, targets, velocity, batches)
        else:
            u = torch.rand(6, 10, dtype=torch.float64)
            method.distil(work, ensemble, torch.full((3,), 0.7).double(), images, velocity, 0.01, batches, u)
        result.append(work.snapshot().buffer)
    assert torch.allclose(*result, rtol=0, atol=1e-9)
    assert not result[0].equal(doubled.model.buffer)


def test_the_mixture_is_a_mean_whatever_the_sum_of_the_weights() -> None:
    logits = torch.arange(12.0).view(3, 2, 2)
    assert mixed(torch.tensor([0.2, 0.2, 0.4]), logits).equal((logits[0] + logits[1] + 2 * logits[2]) / 4)


def test_a_constant_rate_asks_for_no_number_of_rounds(digits: Digits) -> None:
    federation = digits((9, 7, 8)).training(LOOP)
    method = replace(SMALL, server_schedule="constant")
    few, many = (federation.play(method, federation.plan(rounds))[1][0].model.buffer for rounds in (2, 4))
    assert few.equal(many)
    few, many = (federation.play(SMALL, federation.plan(rounds))[1][0].model.buffer for rounds in (2, 4))
    assert not few.equal(many)
