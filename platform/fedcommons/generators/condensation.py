"""The computations of NDPDC: a seeded sequence of random networks, noisy sums of features, and the fit of images.

Zhao and Bilen, "Dataset condensation with distribution matching", WACV 2023, arXiv:2110.04181; see ``ndpdc``.
psi_t: features of step t's random network, flattened to a vector of length D;  A_tc: augmentation of class c in step t;
phi_t: features clipped to norm 1.

    phi_t(x, c) = psi_t(A_tc x) / max(1, |psi_t(A_tc x)|),   |phi_t| <= 1
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.privacy.dp_sgd import NoisySum
from fedcommons.privacy.noise import Draws
from fedcommons.seeding import generator, keyed_globals
from lightning_modules.random_convnet import RandomConvNet, blocks

BLOCK = 256
"""Number of images whose features are computed at a time."""

Phi = Callable[[Tensor, Tensor], Tensor]
"""A function from images (n, C, H, W) in [-1, 1] and classes (n,) to feature vectors (n, D)."""


@dataclass(frozen=True)
class Networks:
    """The public feature maps phi_1, phi_2, ..., which every party can draw from ``seed``.

    shape: (C, H, W) of an image. width: number of channels. depth: number of blocks of each network; None: ``shape``
    decides. augment: augmentation of the images (see ``ndpdc``). flip: whether the augmentation may mirror images.
    """

    shape: tuple[int, ...]
    n_classes: int
    width: int
    depth: int | None
    augment: str
    flip: bool
    seed: int

    @property
    def size(self) -> int:
        """Return D, the length of a feature vector."""
        with torch.no_grad(), keyed_globals(self.seed, "size of features"):
            return self._network()(torch.zeros(1, *self.shape), torch.zeros(1, 8)).numel()

    @property
    def digest(self) -> str:
        """Return a hash of the networks' constants and of the weights of the network at step 0."""
        with keyed_globals(self.seed, "network", 0):
            weights = self._network().state_dict()
        prefix = repr((self.shape, self.n_classes, self.width, self.depth, self.augment, self.flip)).encode()
        return hashlib.sha256(
            prefix + b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
        ).hexdigest()

    def at(self, step: int) -> Phi:
        """Return the map phi_t of step t = ``step``; in a step, all images of a class get the same augmentation."""
        with keyed_globals(self.seed, "network", step):
            network = self._network()
        augmentation = torch.rand(self.n_classes, 8, generator=generator(self.seed, "augmentation", step))
        return lambda x, y: clipped(network(x, augmentation[y]))

    @property
    def blocks(self) -> int:
        """Return the number of convolutional blocks of each network."""
        return self.depth or blocks(self.shape)

    def _network(self) -> RandomConvNet:
        return RandomConvNet(self.shape, self.width, self.blocks, self.augment, self.flip)


def clipped(features: Tensor) -> Tensor:
    """Clip feature vectors (..., D) to norm 1. Vectors with NaN or infinity, such as a blank image's, become 0."""
    short = features / features.norm(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(short.isfinite().all(-1, keepdim=True), short, 0.0)


def pixels(x: Tensor) -> Tensor:
    """Scale pixels from the range 0 to 255 to the range -1 to 1."""
    return x.float() / 127.5 - 1


def sums(phi: Phi, examples: Examples, n_classes: int) -> Tensor:
    """Return the sum of the feature vectors of each class, (classes, D) float64; images are processed in blocks."""
    parts = []
    with torch.no_grad():
        for first in range(0, max(len(examples), 1), BLOCK):  # without examples, the loop runs once and adds zeros
            part = examples[slice(first, first + BLOCK)]
            features = phi(pixels(part.x), part.y).double()
            parts.append(features.new_zeros(n_classes, features.shape[1]).index_add_(0, part.y, features))
    return torch.stack(parts).sum(0)


@dataclass(frozen=True, eq=False)
class Sender:
    """A client of NDPDC: its examples, sampling rate q, noise multiplier sigma and random numbers ``draws``."""

    examples: Examples
    n_classes: int
    q: float
    sigma: float
    draws: Draws

    def message(self, phi: Phi, step: int) -> NoisySum:
        """Return noisy sums of features (classes, D) over a Poisson sample of the examples with sampling rate q."""
        sample = np.flatnonzero(self.draws.stream("sample", step).random(len(self.examples)) < self.q)
        real = sums(phi, self.examples[torch.from_numpy(sample)], self.n_classes)
        total = NoisySum(torch.zeros_like(real), clip=1.0)
        total.add(real, norm=1.0)
        if self.sigma:
            total.blur(self.sigma, self.draws.stream_for(real, "noise", step))
        return total


def fit_images(
    networks: Networks,
    total: Callable[[Phi, int], Tensor],
    steps: int,
    per_class: int,
    expected: float,
    batch: int,
    lr: float,
) -> Examples:
    """Fit ``per_class`` uint8 images per class, with one SGD step per noisy total of the clients' messages.

        S <- S - lr d/dS sum_c | L/R total_c - L/ipc sum_k phi_t(S_ck, c) |^2,   momentum 0.5

    total: function (phi_t, t) -> noisy total (classes, D) of step t with feature map phi_t; total_c: row of class c.
    per_class: ipc, number of images S_ck of class c, which start from N(0, 1). expected: R, expected number of real
    images per class in a total. batch: L, which scales both terms of the loss.
    """
    y = torch.arange(networks.n_classes).repeat_interleave(per_class)
    images = torch.randn(len(y), *networks.shape, generator=generator(networks.seed, "first images")).requires_grad_()
    optimizer = torch.optim.SGD([images], lr, momentum=0.5)
    for step in range(steps):
        phi = networks.at(step)
        wanted = total(phi, step).float() / expected
        optimizer.zero_grad()
        of_class = phi(images, y).unflatten(0, (networks.n_classes, per_class)).mean(1)
        (batch**2 * (of_class - wanted).square().sum()).backward()
        optimizer.step()
    x = ((images.detach() + 1) * 127.5).clamp(0, 255).round().to(torch.uint8)
    return Examples(x, y)
