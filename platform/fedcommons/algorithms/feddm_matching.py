"""FedDM's client: it matches features of synthetic and real images by gradient steps on the synthetic pixels.

u = (h, z): features of an image, its embedding and logits concatenated;  u(S), u(D): means over the synthetic and
the real images of a class;  L_c = ||u(D) - u(S)||^2 = ||h(D) - h(S)||^2 + ||z(D) - z(S)||^2.

One forward pass of real images and one of synthetic images serve all classes. In evaluation mode, the features of an
image do not depend on other images. So the sum of all L_c has the same gradient at a class's pixels as its L_c.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor, nn

from fedcommons.algorithms.ball import around
from fedcommons.core.client_worker import Work
from fedcommons.core.features import Head
from fedcommons.core.local_training import onednn
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat
from fedcommons.privacy.dp_sgd import DPSGD, NoisySum, clipped
from fedcommons.privacy.noise import Draws
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator, set_default_generator


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Constants of the steps on the pixels; see ``FedDM``."""

    iterations: int
    radius: float
    batch_size: int  # largest number of real images per class
    lr: float
    momentum: float
    sigma: float
    clip: float


def match(
    work: Work, x: Flat, data: ClientData, rows: Mapping[int, Tensor], images: Tensor, how: Steps, seed: int
) -> tuple[Tensor, list[Tensor], Release | None]:
    """Minimise the sum of L_c(w) over the images' pixels by SGD, with a new w around x in each step.

    data: examples as network inputs; rows: rows of each class; images: (k ipc, ...), the initial images.
    Returns (images, losses, protection). losses: one per step; empty under DP-SGD. protection: all steps as one
    release, at the smallest class's q; None without DP-SGD, or if the protection differs between steps.
    """
    module, head, dp = work.module, Head(work.module), work.loop.dp
    steps = ceil(how.iterations * work.share - 1e-9)  # A straggler takes fewer steps.
    batch_sizes = [min(how.batch_size, len(r)) for r in rows.values()]
    optimizer = torch.optim.SGD([images.requires_grad_()], how.lr, how.momentum)
    weights, noise = generator(seed, "around the model"), generator(seed, "noise level")
    batch_rows, membership = batches(rows, how.batch_size, steps, seed, data.x.device)
    secret = work.noise.call("images", *data.columns) if dp else None
    history, protections = [], set[Release]()
    with onednn(work.loop.onednn), head.watched():
        update_batch_norm(work, x, data.x, how.batch_size, seed)
        module.eval()
        for step in range(steps):
            work.load(around(x, how.radius, weights))
            u = features(module, head, images)
            if dp is None or secret is None:
                with torch.no_grad():
                    weight = None if data.weight is None else data.weight[batch_rows[step]]
                    target = means(features(module, head, data.x[batch_rows[step]]), membership, weight)
                loss = losses(u, target).sum()
                history.append(loss.detach())
                (gradient,) = torch.autograd.grad(loss, images)
                if how.sigma:
                    gradient = add_noise_level(gradient, batch_sizes, how.sigma, how.clip, noise)
            else:
                sampled = samples(rows, how.batch_size, dp, secret, step)
                with torch.no_grad():
                    real_features = [features(module, head, data.x[r.to(data.x.device)]) for r in sampled]
                gradient, protection = private_gradients(images, u, real_features, batch_sizes, dp, secret, step)
                protections.add(protection)
            images.grad = gradient
            optimizer.step()
    if len(protections) != 1:
        return images.detach(), history, None
    q = max(DPSGD.sampling_rate(len(r), how.batch_size) for r in rows.values())
    return images.detach(), history, replace(protections.pop(), q=q, steps=steps)


def is_owned(counts: Tensor, least: int) -> Tensor:
    """Return (N, classes): a client sends the classes with at least ``least`` images or, without such, all it has."""
    enough = counts >= least
    return torch.where(enough.any(1, keepdim=True), enough, counts > 0)


def rows_by_class(y: Tensor, least: int) -> dict[int, Tensor]:
    """Return, by class, the rows of the classes that a client with labels ``y`` sends."""
    labels = y.cpu()
    classes = is_owned(torch.bincount(labels).unsqueeze(0), least)[0].nonzero()[:, 0].tolist()
    return {label: (labels == label).nonzero()[:, 0] for label in classes}


def initial_images(data: ClientData, rows: Mapping[int, Tensor], ipc: int, real: bool, seed: int) -> Tensor:
    """Return the initial images (k ipc, ...): noise, or distinct real images per class, repeated if too few."""
    draws = generator(seed, "first images")
    if real:
        chosen = [r[_repeated(torch.randperm(len(r), generator=draws), ipc)] for r in rows.values()]
        return data.x[torch.cat(chosen).to(data.x.device)]
    return torch.randn((len(rows) * ipc, *data.x.shape[1:]), generator=draws).to(data.x)


def _repeated(order: Tensor, n: int) -> Tensor:
    return order.repeat(-(-n // len(order)))[:n]


def batches(
    rows: Mapping[int, Tensor], size: int, steps: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return rows (steps, m), at most ``size`` per class, sampled anew per step, and class membership (k, m), 0/1."""
    draws, sizes = generator(seed, "real images"), torch.tensor([min(size, len(r)) for r in rows.values()])
    of_class = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    membership = (of_class == torch.arange(len(sizes)).unsqueeze(1)).float()
    batch_rows = torch.cat(list(rows.values())).expand(steps, -1)
    if steps and any(len(r) > size for r in rows.values()):
        permuted = ([r[torch.randperm(len(r), generator=draws)[:size]] for r in rows.values()] for _ in batch_rows)
        batch_rows = torch.stack([torch.cat(parts) for parts in permuted])
    return batch_rows.to(device), membership.to(device)


def samples(rows: Mapping[int, Tensor], size: int, dp: DPSGD, secret: Draws, step: int) -> list[Tensor]:
    """Return the rows of a Poisson sample of each class; its expected size is ``size``, or the class if smaller."""
    return [r[dp.sample(len(r), size, secret.stream(f"batch of class {c}", step))] for c, r in enumerate(rows.values())]


def update_batch_norm(work: Work, x: Flat, real: Tensor, size: int, seed: int) -> None:
    """Update BatchNorm's statistics on the client's images at the server model, as matching does not update them."""
    if not len(work.buffers):
        return
    work.load(x)
    work.module.train()
    set_default_generator(seed, "dropout")
    with torch.no_grad():
        for part in real.split(size):
            work.module(part)


def features(module: nn.Module, head: Head, x: Tensor) -> Tensor:
    """Return u of each image, (n, d + C); ``head`` must be watched."""
    module(x)
    return torch.cat([head.inputs.flatten(1), head.outputs], 1)


def means(u: Tensor, own_images: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the (weighted) class means (k, D) of the features u (m, D); ``mine`` (k, m): 1 for the rows of a class."""
    share = (own_images if weight is None else own_images * weight).to(u)
    return share / share.sum(1, keepdim=True) @ u


def losses(synthetic: Tensor, real: Tensor) -> Tensor:
    """Return L_c of each class (k,); synthetic: (k ipc, D) features, real: (k, D) means."""
    return (synthetic.unflatten(0, (len(real), -1)).mean(1) - real).square().sum(1)


def add_noise_level(gradient: Tensor, rows: Sequence[int], sigma: float, clip: float, draws: torch.Generator) -> Tensor:
    """Return G min(1, C/||G||) + N(0, sigma^2 C^2 I)/|B| for the gradient G of each class, as the paper prints it.

    gradient: (k ipc, ...); taken: |B| of each class, the number of real images in its batch.
    """
    parts = []
    for g, n in zip(gradient.chunk(len(rows)), rows, strict=True):
        noise = torch.randn(g.shape, generator=draws).to(g)
        parts.append(g * (clip / torch.linalg.vector_norm(g)).clamp(max=1) + noise * (sigma * clip / n))
    return torch.cat(parts)


def terms(images: Tensor, u: Tensor, real: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield (k, ipc, ...), the next term g~(x) = 2 (du(S)/dS)^T (u(S) - u(x)) of each class (equation 15).

    images: S, (k ipc, ...); u: features of S, with a graph; real: features (n_c, D) of each class's real images. The
    term is zero for a class without a next image. The mean of a class's terms is the gradient of its L_c.
    """
    synthetic_means = u.unflatten(0, (len(real), -1)).mean(1)
    at = synthetic_means.detach()
    for j in range(max(len(u_c) for u_c in real)):
        gap = torch.stack([at[c] - u_c[j] if j < len(u_c) else torch.zeros_like(at[c]) for c, u_c in enumerate(real)])
        (g,) = torch.autograd.grad((2 * gap * synthetic_means).sum(), images, retain_graph=True)
        yield g.unflatten(0, (len(real), -1))


def private_gradients(
    images: Tensor, u: Tensor, real: Sequence[Tensor], expected: Sequence[int], dp: DPSGD, secret: Draws, step: int
) -> tuple[Tensor, Release]:
    """Return the gradients (k ipc, ...) as noisy means of clipped terms, and their release at q = 1 (full batches).

    real: features of each class's Poisson sample; expected: the samples' expected sizes.
    """
    totals = [NoisySum(torch.zeros_like(part), dp.clip) for part in images.detach().chunk(len(real))]
    for j, class_terms in enumerate(terms(images, u, real)):
        for total, g, u_c in zip(totals, class_terms, real, strict=True):
            if j < len(u_c):
                total.add(*clipped(g, dp.clip))
    for c, total in enumerate(totals):
        total.blur(dp.noise_multiplier, secret.stream(f"noise of class {c}", step))
    (release,) = {total.release for total in totals}
    return torch.cat([total.values / n for total, n in zip(totals, expected, strict=True)]), release
