"""What FedDM matches: the classes a client holds, the features of a batch, and the gradients of its images' pixels.

u = (h, z): features of an image, the embedding and the logits side by side;  u(S), u(D): means over the synthetic and
the real images of a class;  L_c = ||u(D) - u(S)||^2 = ||h(D) - h(S)||^2 + ||z(D) - z(S)||^2.

All classes are matched in one forward pass of their real images and one of their synthetic ones. As the network is in
evaluation mode, no image's features depend on the others, so the sum of all L_c has the pixel gradients of each.
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
    batch_size: int  # most real images of a class
    lr: float
    momentum: float
    sigma: float
    clip: float


def match(
    work: Work, x: Flat, data: ClientData, rows: Mapping[int, Tensor], images: Tensor, how: Steps, seed: int
) -> tuple[Tensor, list[Tensor], Release | None]:
    """Step down the sum of L_c(w) over the images' pixels, with a new w around x in each step.

    data: examples as the network sees them; rows: of each class; images: (k ipc, ...) to start from.
    Returns (images, losses, protection). losses: of each step; none under DP-SGD. protection: all steps as one release,
    at the smallest class's q; None without DP-SGD, or if two steps were protected differently.
    """
    module, head, dp = work.module, Head(work.module), work.loop.dp
    steps = ceil(how.iterations * work.share - 1e-9)  # a late client's are fewer
    taken = [min(how.batch_size, len(of)) for of in rows.values()]
    optimizer = torch.optim.SGD([images.requires_grad_()], how.lr, how.momentum)
    weights, noise = generator(seed, "around the model"), generator(seed, "noise level")
    drawn, mine = batches(rows, how.batch_size, steps, seed, data.x.device)
    secret = work.noise.call("images", *data.columns) if dp else None
    history, protections = [], set[Release]()
    with onednn(work.loop.onednn), head.watched():
        see_statistics(work, x, data.x, how.batch_size, seed)
        module.eval()
        for step in range(steps):
            work.load(around(x, how.radius, weights))
            u = features(module, head, images)
            if dp is None or secret is None:
                with torch.no_grad():
                    weight = None if data.weight is None else data.weight[drawn[step]]
                    target = means(features(module, head, data.x[drawn[step]]), mine, weight)
                loss = losses(u, target).sum()
                history.append(loss.detach())
                (gradient,) = torch.autograd.grad(loss, images)
                if how.sigma:
                    gradient = with_level(gradient, taken, how.sigma, how.clip, noise)
            else:
                sampled = samples(rows, how.batch_size, dp, secret, step)
                with torch.no_grad():
                    of_real = [features(module, head, data.x[of.to(data.x.device)]) for of in sampled]
                gradient, protection = private(images, u, of_real, taken, dp, secret, step)
                protections.add(protection)
            images.grad = gradient
            optimizer.step()
    if len(protections) != 1:
        return images.detach(), history, None
    q = max(DPSGD.sampling_rate(len(of), how.batch_size) for of in rows.values())
    return images.detach(), history, replace(protections.pop(), q=q, steps=steps)


def is_owned(counts: Tensor, least: int) -> Tensor:
    """(N, classes) whether a client sends a class, from its ``counts``: those with ``least``, or all if none has."""
    enough = counts >= least
    return torch.where(enough.any(1, keepdim=True), enough, counts > 0)


def owned(y: Tensor, least: int) -> dict[int, Tensor]:
    """Rows of each class that a client with these labels sends, by class."""
    labels = y.cpu()
    classes = is_owned(torch.bincount(labels).unsqueeze(0), least)[0].nonzero()[:, 0].tolist()
    return {label: (labels == label).nonzero()[:, 0] for label in classes}


def first(data: ClientData, rows: Mapping[int, Tensor], ipc: int, real: bool, seed: int) -> Tensor:
    """(k ipc, ...) images to start from: noise, or different real ones of a class, repeated where there are fewer."""
    draws = generator(seed, "first images")
    if real:
        of = [of[_repeated(torch.randperm(len(of), generator=draws), ipc)] for of in rows.values()]
        return data.x[torch.cat(of).to(data.x.device)]
    return torch.randn((len(rows) * ipc, *data.x.shape[1:]), generator=draws).to(data.x)


def _repeated(order: Tensor, n: int) -> Tensor:
    return order.repeat(-(-n // len(order)))[:n]


def batches(
    rows: Mapping[int, Tensor], size: int, steps: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(steps, m) rows: at most ``size`` of each class, drawn anew for each step; (k, m) 1 for the rows of a class."""
    draws, taken = generator(seed, "real images"), torch.tensor([min(size, len(of)) for of in rows.values()])
    of_class = torch.repeat_interleave(torch.arange(len(taken)), taken)
    mine = (of_class == torch.arange(len(taken)).unsqueeze(1)).float()
    drawn = torch.cat(list(rows.values())).expand(steps, -1)
    if steps and any(len(of) > size for of in rows.values()):
        permuted = ([of[torch.randperm(len(of), generator=draws)[:size]] for of in rows.values()] for _ in drawn)
        drawn = torch.stack([torch.cat(parts) for parts in permuted])
    return drawn.to(device), mine.to(device)


def samples(rows: Mapping[int, Tensor], size: int, dp: DPSGD, secret: Draws, step: int) -> list[Tensor]:
    """Rows of each class's Poisson sample, of ``size`` expected."""
    return [
        of[dp.sample(len(of), size, secret.stream(f"batch of class {c}", step))] for c, of in enumerate(rows.values())
    ]


def see_statistics(work: Work, x: Flat, real: Tensor, size: int, seed: int) -> None:
    """Show BatchNorm, if there is any, the client's images at the server model: while they match it learns nothing."""
    if not len(work.buffers):
        return
    work.load(x)
    work.module.train()
    set_default_generator(seed, "dropout")
    with torch.no_grad():
        for part in real.split(size):
            work.module(part)


def features(module: nn.Module, head: Head, x: Tensor) -> Tensor:
    """(n, d + C): u of each image; ``head`` must be watched."""
    module(x)
    return torch.cat([head.inputs.flatten(1), head.outputs], 1)


def means(u: Tensor, mine: Tensor, weight: Tensor | None = None) -> Tensor:
    """(k, D): the (weighted) mean of the features (m, D) of each class; ``mine`` (k, m): 1 for the rows of a class."""
    share = (mine if weight is None else mine * weight).to(u)
    return share / share.sum(1, keepdim=True) @ u


def losses(synthetic: Tensor, real: Tensor) -> Tensor:
    """(k,) L_c of each class; synthetic: (k ipc, D) features, real: (k, D) means."""
    return (synthetic.unflatten(0, (len(real), -1)).mean(1) - real).square().sum(1)


def with_level(gradient: Tensor, taken: Sequence[int], sigma: float, clip: float, draws: torch.Generator) -> Tensor:
    """G min(1, C/||G||) + N(0, sigma^2 C^2 I)/|B|, as the paper prints it, for the gradient G of each class.

    gradient: (k ipc, ...); taken: |B| of each class, real images in its batch.
    """
    parts = []
    for g, n in zip(gradient.chunk(len(taken)), taken, strict=True):
        noise = torch.randn(g.shape, generator=draws).to(g)
        parts.append(g * (clip / torch.linalg.vector_norm(g)).clamp(max=1) + noise * (sigma * clip / n))
    return torch.cat(parts)


def terms(images: Tensor, u: Tensor, real: Sequence[Tensor]) -> Iterator[Tensor]:
    """(k, ipc, ...) once and again: the next term g~(x) = 2 (du(S)/dS)^T (u(S) - u(x)) of each class, equation 15.

    images: (k ipc, ...) S; u: their features, with a graph; real: of each class, the features (n_c, D) of its images.
    A class without a next image has zeros. The mean of a class's terms is the gradient of its L_c.
    """
    of_class = u.unflatten(0, (len(real), -1)).mean(1)
    at = of_class.detach()
    for j in range(max(len(of) for of in real)):
        gap = torch.stack([at[c] - of[j] if j < len(of) else torch.zeros_like(at[c]) for c, of in enumerate(real)])
        (g,) = torch.autograd.grad((2 * gap * of_class).sum(), images, retain_graph=True)
        yield g.unflatten(0, (len(real), -1))


def private(
    images: Tensor, u: Tensor, real: Sequence[Tensor], expected: Sequence[int], dp: DPSGD, secret: Draws, step: int
) -> tuple[Tensor, Release]:
    """The gradients (k ipc, ...) as noisy means of clipped terms, and what protects them, for batches of all (q = 1).

    real: of each class, the features of its Poisson sample; expected: the samples' expected sizes.
    """
    totals = [NoisySum(torch.zeros_like(part), dp.clip) for part in images.detach().chunk(len(real))]
    for j, of_classes in enumerate(terms(images, u, real)):
        for total, g, of in zip(totals, of_classes, real, strict=True):
            if j < len(of):
                total.add(*clipped(g, dp.clip))
    for c, total in enumerate(totals):
        total.blur(dp.noise_multiplier, secret.stream(f"noise of class {c}", step))
    (release,) = {total.release for total in totals}
    return torch.cat([total.values / n for total, n in zip(totals, expected, strict=True)]), release
