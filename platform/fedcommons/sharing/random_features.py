"""Random features of images, their sums per class, and a fit of images whose mean features match noisy sums.

Rahimi and Recht (2007); Harder, Adamczewski and Park, "DP-MERF", AISTATS 2021, arXiv:2002.11603.
W: (D/2, d) ~ N(0, 1/s);  s: the squared length scale of the kernel exp(-|x - y|^2/(2 s));  d: numbers of an image.

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
"""Number of images whose features are in memory at a time."""

LR = 0.05
"""Adam's first learning rate on the images' logits; it falls to zero."""


class Features(Protocol):
    """A public map of images to vectors, which torch can differentiate."""

    @property
    def size(self) -> int:
        """Return D, the length of a vector."""
        ...

    @property
    def digest(self) -> str:
        """Return a hash of the random numbers that define the features."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return vectors (..., D) of images (..., d) with pixels in [0, 1]; ``bounded`` clips their norm to 1."""
        ...


@dataclass(frozen=True, eq=False)
class Fourier:
    """The Fourier features phi; w: (D/2, d)."""

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
        """Draw ``size`` features, an even number for each scale s, seeded by ``key``."""
        draws = generator(*key, "random features")
        each = size // 2 // len(scales)
        return Fourier(torch.cat([torch.randn(each, d, generator=draws) / sqrt(s) for s in scales]))


def pixels(x: Tensor) -> Tensor:
    """Return images as (n, d) in [0, 1]; uint8 images are scaled."""
    return x.flatten(1).float() / (255 if x.dtype == torch.uint8 else 1)


def bounded(features: Features, x: Tensor) -> Tensor:
    """Clip the norm of each feature vector to 1; a vector that is not finite becomes zero."""
    phi = features(x)
    short = phi / phi.norm(dim=-1, keepdim=True).clamp_min(1)
    return torch.where(short.isfinite().all(-1, keepdim=True), short, 0.0)


def sums(features: Features, examples: Examples, n_classes: int) -> Tensor:
    """Return for each class the sum of [phi(x), 1]/sqrt(2), a vector of norm at most 1: (classes, D + 1) float64.

    An example adds only to the row of its class. A blank example (nan) adds nothing.
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
    """Return sum_c/n_c (classes, D) of noisy ``sums`` (classes, D + 1); a noisy n_c below 1 counts as 1."""
    per = noisy.float() * sqrt(2)
    return per[:, :-1] / per[:, -1:].clamp_min(1)


def fit_images(
    features: Features, noisy: Tensor, shape: tuple[int, ...], per_class: int, steps: int, seed: int
) -> Examples:
    """Fit ``per_class`` uint8 images per class to the mean features of the noisy ``sums`` (classes, D + 1).

        min over images of  sum_c | mean_k phi(x_ck) - sum_c/n_c |^2

    by Adam on the images' logits, which start from N(0, 1/4).
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
