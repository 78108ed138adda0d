"""Random features of images, their sums by class, and images whose features have given means.

Rahimi and Recht (2007); Harder, Adamczewski and Park, "DP-MERF", AISTATS 2021, arXiv:2002.11603.
W: (D/2, d) ~ N(0, 1/s);  s: a squared length of the kernel exp(-|x - y|^2/(2 s));  d: numbers of an image.

    phi(x) = [cos W x, sin W x] / sqrt(D/2),   |phi(x)| = 1,   phi(x)^T phi(y) ~ exp(-|x - y|^2/(2 s))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Protocol

import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.seeding import generator
from fedcommons.storage.atomic_files import sha256

BLOCK = 4096
"""Images whose features are held at a time."""

LR = 0.05
"""Adam's first rate on the images' logits; it falls to zero."""


class Features(Protocol):
    """A public map of images to vectors, which torch can differentiate."""

    @property
    def size(self) -> int:
        """D, numbers of a vector."""
        ...

    @property
    def digest(self) -> str:
        """A hash of what was drawn for them."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Vectors (..., D) of images (..., d) with pixels in [0, 1]; longer ones than 1 are cut to it."""
        ...


@dataclass(frozen=True, eq=False)
class Fourier:
    """phi; w: (D/2, d)."""

    w: Tensor

    @property
    def size(self) -> int:
        """See ``Features``."""
        return 2 * len(self.w)

    @property
    def digest(self) -> str:
        """See ``Features``."""
        return sha256(self.w.numpy().tobytes())

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Features``."""
        wx = x @ self.w.T
        return torch.cat([wx.cos(), wx.sin()], -1) / sqrt(len(self.w))

    @staticmethod
    def draw(d: int, size: int, scales: Sequence[float], *key: int | str) -> "Fourier":
        """``size`` features (even numbers of each scale s), drawn by this key."""
        draws = generator(*key, "random features")
        each = size // 2 // len(scales)
        return Fourier(torch.cat([torch.randn(each, d, generator=draws) / sqrt(s) for s in scales]))


def pixels(x: Tensor) -> Tensor:
    """(n, d) in [0, 1]; uint8 images are scaled."""
    return x.flatten(1).float() / (255 if x.dtype == torch.uint8 else 1)


def bounded(features: Features, x: Tensor) -> Tensor:
    """Features whose norm is at most 1, whatever they are: shorter ones are as they are, not finite ones are zero."""
    phi = features(x)
    short = phi / phi.norm(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(short.isfinite().all(-1, keepdim=True), short, 0.0)


def sums(features: Features, examples: Examples, n_classes: int) -> Tensor:
    """(classes, D + 1) float64: of each class, the sum of [phi(x), 1]/sqrt(2), a vector with a norm of at most 1.

    One example adds to the row of its class alone. A blank one (nan) adds nothing.
    """
    total = torch.zeros(n_classes, features.size + 1, dtype=torch.float64)
    for first in range(0, len(examples), BLOCK):
        part = examples[slice(first, first + BLOCK)]
        x = pixels(part.x)
        is_there = x.isfinite().all(1)
        phi = bounded(features, x[is_there])
        both = torch.cat([phi, torch.ones(len(phi), 1)], 1).double() / sqrt(2)
        total.index_add_(0, part.y[is_there], both)
    return total


def means(noisy: Tensor) -> Tensor:
    """(classes, D): sum_c/n_c, of noisy ``sums`` (classes, D + 1). Where the noisy n_c is below 1, it counts as 1."""
    per = noisy.float() * sqrt(2)
    return per[:, :-1] / per[:, -1:].clamp_min(1)


def fitted(
    features: Features, noisy: Tensor, shape: tuple[int, ...], per_class: int, steps: int, seed: int
) -> Examples:
    """``per_class`` uint8 images of each class whose mean features are those of the noisy ``sums`` (classes, D + 1).

        min over images of  sum_c | mean_k phi(x_ck) - sum_c/n_c |^2

    by Adam on their logits, from N(0, 1/4).
    """
    wanted, d = means(noisy), prod(shape)
    start = torch.randn(len(wanted), per_class, d, generator=generator(seed, "logits of images"))
    logits = (start.to(wanted.device) / 2).requires_grad_()
    optimizer = torch.optim.Adam([logits], LR)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        ((bounded(features, logits.sigmoid()).mean(1) - wanted) ** 2).sum().backward()
        optimizer.step()
        schedule.step()
    images = (255 * logits.detach().sigmoid()).round().to(torch.uint8).view(-1, *shape)
    return Examples(images.cpu(), torch.arange(len(wanted)).repeat_interleave(per_class))
