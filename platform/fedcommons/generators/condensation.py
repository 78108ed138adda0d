"""What NDPDC shares beside the data: a keyed sequence of random networks, noisy sums of their features, and the fit.

Zhao and Bilen, "Dataset condensation with distribution matching", WACV 2023, arXiv:2110.04181; see ``ndpdc``.
psi_t: features of step t's network, flattened;  A_tc: its augmentation of class c;  D: numbers of psi_t;  S: images.

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
"""Images whose features are worked out at a time."""

Phi = Callable[[Tensor, Tensor], Tensor]
"""Features (n, D) of images (n, C, H, W) in [-1, 1] and their classes (n,)."""


@dataclass(frozen=True)
class Networks:
    """phi_1, phi_2, ...: everybody can draw them. depth: blocks of ``ConvNet``; None: ``blocks``."""

    shape: tuple[int, ...]
    n_classes: int
    width: int
    depth: int | None
    augment: str
    flip: bool
    seed: int

    @property
    def size(self) -> int:
        """D."""
        with torch.no_grad(), keyed_globals(self.seed, "size of features"):
            return self._network()(torch.zeros(1, *self.shape), torch.zeros(1, 8)).numel()

    @property
    def digest(self) -> str:
        """A hash of what the networks are and of the first one's weights."""
        with keyed_globals(self.seed, "network", 0):
            weights = self._network().state_dict()
        told = repr((self.shape, self.n_classes, self.width, self.depth, self.augment, self.flip)).encode()
        return hashlib.sha256(told + b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()

    def at(self, step: int) -> Phi:
        """phi_t; one draw of the augmentation for each class, the same for its real and made images."""
        with keyed_globals(self.seed, "network", step):
            network = self._network()
        drawn = torch.rand(self.n_classes, 8, generator=generator(self.seed, "augmentation", step))
        return lambda x, y: clipped(network(x, drawn[y]))

    @property
    def blocks(self) -> int:
        """The number of blocks of each network."""
        return self.depth or blocks(self.shape)

    def _network(self) -> RandomConvNet:
        return RandomConvNet(self.shape, self.width, self.blocks, self.augment, self.flip)


def clipped(features: Tensor) -> Tensor:
    """(n, D): those longer than 1 are cut to it; those that are not finite become zero, so a blank image adds none."""
    short = features / features.norm(dim=1, keepdim=True).clamp_min(1)
    return torch.where(short.isfinite().all(1, keepdim=True), short, 0.0)


def pixels(x: Tensor) -> Tensor:
    """In [-1, 1], of numbers 0 to 255."""
    return x.float() / 127.5 - 1


def sums(phi: Phi, examples: Examples, n_classes: int) -> Tensor:
    """(classes, D): of each class, the sum of its images' features. An image adds to the row of its class alone."""
    parts = []
    with torch.no_grad():
        for first in range(0, max(len(examples), 1), BLOCK):  # an empty sample has zeros
            part = examples[slice(first, first + BLOCK)]
            features = phi(pixels(part.x), part.y).double()
            parts.append(features.new_zeros(n_classes, features.shape[1]).index_add_(0, part.y, features))
    return torch.stack(parts).sum(0)


@dataclass(frozen=True, eq=False)
class Sender:
    """A client: its examples, its rate and its noise. The draws hide it, so they are its own and drawn once a step."""

    own: Examples
    n_classes: int
    q: float
    sigma: float
    draws: Draws

    def message(self, phi: Phi, step: int) -> NoisySum:
        """Of a Poisson sample, each example with probability q whatever its class: its sums (classes, D) and noise."""
        taken = np.flatnonzero(self.draws.stream("sample", step).random(len(self.own)) < self.q)
        real = sums(phi, self.own[torch.from_numpy(taken)], self.n_classes)
        total = NoisySum(torch.zeros_like(real), clip=1.0)
        total.add(real, norm=1.0)
        if self.sigma:
            total.blur(self.sigma, self.draws.hiding(real, "noise", step))
        return total


def condensed(
    networks: Networks,
    total: Callable[[Phi, int], Tensor],
    steps: int,
    per_class: int,
    expected: float,
    batch: int,
    lr: float,
) -> Examples:
    """``per_class`` uint8 images of each class, after a step of SGD for each noisy total (classes, D), asked for once.

        S <- S - lr d/dS sum_c | L/R total_c - L/ipc sum_k phi_t(S_ck, c) |^2,   momentum 0.5, from N(0, 1)

    expected: R, real images of a class in a total; batch: L, to which distances are scaled.
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
