"""FedLAP's client: it fits gradients on synthetic images to (private) gradients on real images, along trajectories.

x: server model;  w: weights on a trajectory from x, those of the module;  g: gradient on a batch of real images.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.algorithms.ball import project
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import NO_CONTEXT, onednn
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat
from fedcommons.privacy.dp_sgd import PrivateStep
from fedcommons.privacy.release import UNCOVERED, Release
from fedcommons.privacy.weight_guard import Written
from fedcommons.seeding import generator, keyed_besides_torch, set_default_generator

if TYPE_CHECKING:
    from fedcommons.algorithms.fedlap import FedLAP

USER_CODE = Release(reason="a user-defined model may store real examples and read them in steps on the images")
"""The privacy ledger entry of gradients of a user-defined model, as no noise follows on steps on the images."""

MOMENTUM = 0.5
"""Momentum of SGD on the pixels, as in the authors' code."""


def synthesise(
    work: Work, x: Flat, data: ClientData, labels: Tensor, how: "FedLAP", seed: int
) -> tuple[Tensor, Tensor, Release]:
    """Fit synthetic images to a client's data; return (images, mean matching loss, the privacy ledger's entry).

    labels: labels of the synthetic images, (n,). A straggler takes fewer steps on each trajectory.
    """
    work.module.eval()
    params = list(work.named.values())
    noise = torch.randn((len(labels), *data.x.shape[1:]), generator=generator(seed, "first images"))
    images = noise.to(x.buffer.device, x.buffer.dtype).requires_grad_()
    optimizer = torch.optim.SGD([images], how.image_lr, MOMENTUM)
    steps = ceil(how.steps * work.share - 1e-9)
    real_gradient, release = (private_gradients if work.loop.dp else plain_gradients)(work, data, how, seed)
    losses: list[Tensor] = []

    def gradient(number: int, *, graph: bool) -> Sequence[Tensor]:
        loss = work.loss((images, labels), number)
        return torch.autograd.grad(loss, params, create_graph=graph, materialize_grads=True)

    with work.logged, onednn(work.loop.onednn), keyed_besides_torch(seed) if work.has_user_code else NO_CONTEXT:
        for number in range(how.trajectories * steps):
            if number % steps == 0:
                work.load(x)
            g = real_gradient(number)
            set_default_generator(seed, "random layers", number)  # private draws must not decide the draws below
            for _ in range(how.image_steps):
                loss = distance(gradient(number, graph=True), g, how.mse)
                losses.append(loss.detach())
                (images.grad,) = torch.autograd.grad(loss, images)
                optimizer.step()
            for _ in range(how.local_steps if (number + 1) % steps else 0):  # the last point needs no next one
                changes = gradient(number, graph=False)
                with torch.no_grad():
                    for p, change in zip(params, changes, strict=True):
                        p -= how.model_lr * change
            project(work.params.buffer, x.buffer, how.radius)
    return images.detach(), torch.stack(losses).mean(), release(how.trajectories * steps)


def distance(synthetic: Sequence[Tensor], real: Sequence[Tensor], mse: float) -> Tensor:
    """Return L_dis: the sum over parameters of mean_o (1 - cos(s_o, g_o)) + lambda ||s - g||^2.

    synthetic, real: gradients s and g, one tensor for each parameter. o: output unit, a row of the parameter; a vector,
    such as a bias, is one row. mse: lambda.
    """
    total = real[0].new_zeros(())
    for s, g in zip(synthetic, real, strict=True):
        rows = [t.flatten(1) if t.dim() > 1 else t.reshape(1, -1) for t in (s, g)]
        total = total + (1 - F.cosine_similarity(*rows, dim=1)).mean() + mse * (s - g).square().sum()
    return total


RealGradients = tuple[Callable[[int], Sequence[Tensor]], Callable[[int], Release]]
"""Function (number of the batch) -> gradient at the module's weights; function (number of batches) -> ledger entry."""


def plain_gradients(work: Work, data: ClientData, how: "FedLAP", seed: int) -> RealGradients:
    """Return the functions for gradients of random batches, which nothing protects."""
    draws, params = generator(seed, "real images"), list(work.named.values())
    batches = [torch.randperm(len(data), generator=draws)[: how.match_batch] for _ in range(how.noisy_steps()[1])]
    rows = torch.stack(batches).to(data.y.device)  # copied once, as a GPU would wait for each copy

    def gradient(number: int) -> Sequence[Tensor]:
        set_default_generator(seed, "random layers of real images", number)
        loss = work.loss(tuple(column[rows[number]] for column in data.columns), number)
        return torch.autograd.grad(loss, params, materialize_grads=True)

    return gradient, lambda _: UNCOVERED


def private_gradients(work: Work, data: ClientData, how: "FedLAP", seed: int) -> RealGradients:
    """Return the functions for noisy means of clipped gradients of Poisson batches, by the steps of DP-SGD."""
    assert work.loop.dp
    params, draws = list(work.named.values()), work.noise.call("gradients for images", *data.columns)
    dp = work.loop.dp.of_client(len(data), *how.noisy_steps())
    guard = Written(work.params.buffer, work.optimizer)
    gradients = partial(dp.gradients, params, work.module.training_step)  # pyright: ignore[reportArgumentType]
    step = PrivateStep(dp, draws, len(data), how.match_batch, gradients, [guard.look], guard)
    samples = chain.from_iterable(step.samples(data.columns, None, epoch) for epoch in count())

    def gradient(number: int) -> Sequence[Tensor]:
        guard.keep()
        set_default_generator(seed, "random layers of real images", number)
        step(next(samples), number)
        return [p.grad for p in params if p.grad is not None]

    def release(steps: int) -> Release:
        spent = step.release(steps, work.times_listed(data), is_moved=work.has_user_code and work.gather())
        return USER_CODE if spent.covered and work.has_user_code else spent

    return gradient, release
