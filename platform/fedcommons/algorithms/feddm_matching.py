"""FedDM's client: it fits features of synthetic images to those of real images by SGD on the synthetic pixels.

u = (h, z): features of an image, its embedding h and its logits z concatenated;  u(S), u(D): mean features of the
synthetic images S and the real images D of a class;  L_c = ||u(D) - u(S)||^2: loss of class c.

One forward pass of real images and one of synthetic images serve all classes. In evaluation mode, the features of an
image do not depend on other images. So L_c is the only loss that depends on the pixels of class c.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from fedcommons.algorithms.feddm import FedDM


def match(
    work: Work, x: Flat, data: ClientData, rows: Mapping[int, Tensor], images: Tensor, how: "FedDM", seed: int
) -> tuple[Tensor, list[Tensor], Release | None]:
    """Fit synthetic images to the client's real images by SGD on their pixels; return (images, losses, protection).

    Each step samples weights around the server model x and reduces the sum of the class losses L_c. data: client data
    as network inputs. rows: row indices of each class. images: initial images, (k ipc, ...), ipc of each of k classes.
    losses: one per step; empty under DP-SGD. protection: the privacy ledger's entry (release) of all steps, at the
    sampling rate of the smallest class; None without DP-SGD, or if the entries of the steps differ.
    """
    module, head, dp = work.module, Head(work.module), work.loop.dp
    steps = ceil(how.iterations * work.share - 1e-9)  # A straggler takes fewer steps.
    batch_sizes = [min(how.match_batch, len(r)) for r in rows.values()]
    optimizer = torch.optim.SGD([images.requires_grad_()], how.image_lr, how.image_momentum)
    weights, noise = generator(seed, "around the model"), generator(seed, "noise level")
    batch_rows, membership = batches(rows, how.match_batch, steps, seed, data.x.device)
    secret = work.noise.call("images", *data.columns) if dp else None
    history, protections = [], set[Release]()
    with onednn(work.loop.onednn), head.watched():
        update_batch_norm(work, x, data.x, how.match_batch, seed)
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
                sampled = samples(rows, how.match_batch, dp, secret, step)
                with torch.no_grad():
                    real_features = [features(module, head, data.x[r.to(data.x.device)]) for r in sampled]
                gradient, protection = private_gradients(images, u, real_features, batch_sizes, dp, secret, step)
                protections.add(protection)
            images.grad = gradient
            optimizer.step()
    if len(protections) != 1:
        return images.detach(), history, None
    q = max(DPSGD.sampling_rate(len(r), how.match_batch) for r in rows.values())
    return images.detach(), history, replace(protections.pop(), q=q, steps=steps)


def is_owned(counts: Tensor, least: int) -> Tensor:
    """Return which classes each of N clients sends, (N, classes): those with at least ``least`` images.

    A client without such a class sends all its classes. counts: each client's numbers of images, (N, classes).
    """
    enough = counts >= least
    return torch.where(enough.any(1, keepdim=True), enough, counts > 0)


def rows_by_class(y: Tensor, least: int) -> dict[int, Tensor]:
    """Return the row indices of each class that a client with labels ``y`` sends; least: see ``is_owned``."""
    labels = y.cpu()
    classes = is_owned(torch.bincount(labels).unsqueeze(0), least)[0].nonzero()[:, 0].tolist()
    return {label: (labels == label).nonzero()[:, 0] for label in classes}


def initial_images(data: ClientData, rows: Mapping[int, Tensor], ipc: int, real: bool, seed: int) -> Tensor:
    """Return the initial synthetic images, (k ipc, ...), of the k classes in ``rows``, ``ipc`` of each class.

    They are noise or, with ``real``, distinct real images of the class, repeated if the class has fewer than ``ipc``.
    """
    draws = generator(seed, "first images")
    if real:
        chosen = [r[torch.randperm(len(r), generator=draws)[torch.arange(ipc) % len(r)]] for r in rows.values()]
        return data.x[torch.cat(chosen).to(data.x.device)]
    return torch.randn((len(rows) * ipc, *data.x.shape[1:]), generator=draws).to(data.x)


def batches(
    rows: Mapping[int, Tensor], size: int, steps: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the rows of real images in each step, (steps, m), and their class membership, (k, m) of 0 and 1.

    Each step samples at most ``size`` rows of each of the k classes anew, m rows in total.
    """
    draws, sizes = generator(seed, "real images"), torch.tensor([min(size, len(r)) for r in rows.values()])
    of_class = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    membership = (of_class == torch.arange(len(sizes)).unsqueeze(1)).float()
    batch_rows = torch.cat(list(rows.values())).expand(steps, -1)
    if steps and any(len(r) > size for r in rows.values()):
        permuted = ([r[torch.randperm(len(r), generator=draws)[:size]] for r in rows.values()] for _ in batch_rows)
        batch_rows = torch.stack([torch.cat(parts) for parts in permuted])
    return batch_rows.to(device), membership.to(device)


def samples(rows: Mapping[int, Tensor], size: int, dp: DPSGD, secret: Draws, step: int) -> list[Tensor]:
    """Return the row indices of a Poisson sample of each class, of expected size min(``size``, images of the class)."""
    return [r[dp.sample(len(r), size, secret.stream(f"batch of class {c}", step))] for c, r in enumerate(rows.values())]


def update_batch_norm(work: Work, x: Flat, real: Tensor, size: int, seed: int) -> None:
    """Update BatchNorm's statistics by a pass of the model x over real images; matching does not update them."""
    if not len(work.buffers):
        return
    work.load(x)
    work.module.train()
    set_default_generator(seed, "dropout")
    with torch.no_grad():
        for part in real.split(size):
            work.module(part)


def features(module: nn.Module, head: Head, x: Tensor) -> Tensor:
    """Return embedding and logits of each image, concatenated, (n, d + classes); call it within ``head.watched()``."""
    module(x)
    return torch.cat([head.inputs.flatten(1), head.outputs], 1)


def means(u: Tensor, own_images: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the (weighted) mean features of each class, (k, D). u: features of m images, (m, D).

    own_images: class membership, (k, m), 1 where the image belongs to the class. weight: example weights, (m,).
    """
    share = (own_images if weight is None else own_images * weight).to(u)
    return share / share.sum(1, keepdim=True) @ u


def losses(synthetic: Tensor, real: Tensor) -> Tensor:
    """Return squared distances of class means, (k,); synthetic: features, (k ipc, D); real: mean features, (k, D)."""
    return (synthetic.unflatten(0, (len(real), -1)).mean(1) - real).square().sum(1)


def add_noise_level(gradient: Tensor, rows: Sequence[int], sigma: float, clip: float, draws: torch.Generator) -> Tensor:
    """Return the gradient of each class, clipped and noised:  G min(1, C/||G||) + N(0, sigma^2 C^2 I)/|B|.

    gradient: G of all k classes, (k ipc, ...). rows: |B| of each class, the number of real images in its batch. C:
    ``clip``. No epsilon is certified for this noise, which is the paper's.
    """
    parts = []
    for g, n in zip(gradient.chunk(len(rows)), rows, strict=True):
        noise = torch.randn(g.shape, generator=draws).to(g)
        parts.append(g * (clip / torch.linalg.vector_norm(g)).clamp(max=1) + noise * (sigma * clip / n))
    return torch.cat(parts)


def terms(images: Tensor, u: Tensor, real: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield for j = 0, 1, ... the gradient terms 2 (du(S)/dS)^T (u(S) - u(x_j)) of the k classes, (k, ipc, ...).

    x_j: real image j of the class; if the class has no image j, the term is zero. S (``images``): synthetic images,
    (k ipc, ...). u: features of S, with an autograd graph. real: features of each class's n_c real images, (n_c, D).
    The mean of a class's terms is the gradient of the class's loss (equation 15).
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
    """Return the gradients, (k ipc, ...), as noisy means of clipped terms, and their privacy ledger entry (release).

    The entry has sampling rate 1; ``match`` sets the true rate. real: features of each class's Poisson sample.
    expected: expected numbers of images in the samples.
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
