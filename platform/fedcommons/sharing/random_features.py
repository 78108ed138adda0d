"""Random Fourier features of images, their sums per class, and a fit of images whose mean features match noisy sums.

Rahimi and Recht (2007); Harder, Adamczewski and Park, "DP-MERF", AISTATS 2021, arXiv:2002.11603.
x, y: images;  d: number of values of an image;  D: number of features;  W: (D/2, d) matrix with entries ~ N(0, 1/s);
s: squared length scale of the kernel exp(-|x - y|^2/(2 s)).

    phi(x) = [cos W x, sin W x] / sqrt(D/2),   |phi(x)| = 1,   phi(x)^T phi(y) ~ exp(-|x - y|^2/(2 s))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.generators.condensation import clipped
from fedcommons.seeding import generator
from fedcommons.storage.atomic_files import sha256

BLOCK = 4096
"""Number of images whose features are in memory at a time."""

LR = 0.05
"""Adam's learning rate for the images' logits at the first step; it falls linearly to zero."""


@dataclass(frozen=True, eq=False)
class Fourier:
    """Random Fourier features phi; ``w``: the matrix W (D/2, d)."""

    w: Tensor

    @property
    def size(self) -> int:
        """Return D, the length of a feature vector."""
        return 2 * len(self.w)

    @property
    def digest(self) -> str:
        """Return a hash of the matrix W."""
        return sha256(self.w.numpy().tobytes())

    def __call__(self, x: Tensor) -> Tensor:
        """Return phi(x), (..., D) feature vectors of norm 1, for images (..., d) with pixels in [0, 1]."""
        wx = x @ self.w.T
        return torch.cat([wx.cos(), wx.sin()], -1) / sqrt(len(self.w))

    @staticmethod
    def draw(d: int, size: int, scales: Sequence[float], *key: int | str) -> "Fourier":
        """Draw D = ``size`` features of images with d values, divided equally over the squared length ``scales``."""
        draws = generator(*key, "random features")
        each = size // 2 // len(scales)
        return Fourier(torch.cat([torch.randn(each, d, generator=draws) / sqrt(s) for s in scales]))


def pixels(x: Tensor) -> Tensor:
    """Flatten images to (n, d) float32; uint8 images are divided by 255, other images are assumed to be in [0, 1]."""
    return x.flatten(1).float() / (255 if x.dtype == torch.uint8 else 1)


def bounded(features: Fourier, x: Tensor) -> Tensor:
    """Return the feature vectors (..., D) of images x with norms clipped to 1; vectors that are not finite become 0."""
    return clipped(features(x))


def sums(features: Fourier, examples: Examples, n_classes: int) -> Tensor:
    """Return per class the sum over examples x of [phi(x), 1]/sqrt(2): (classes, D + 1) float64.

    Summands have norms of at most 1. An example adds to the row of its class only. A blank example (NaN) adds nothing.
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
    """Return the noisy mean features per class, (classes, D), from the noisy result of ``sums``, (classes, D + 1).

    A class's mean is its noisy sum of features divided by its noisy count (at least 1).
    """
    per = noisy.float() * sqrt(2)
    return per[:, :-1] / per[:, -1:].clamp_min(1)


def fit_images(
    features: Fourier, noisy: Tensor, shape: tuple[int, ...], per_class: int, steps: int, seed: int
) -> Examples:
    """Fit ``per_class`` uint8 images per class to noisy mean features.

        min over images x_ck of  sum over classes c of | mean_k phi(x_ck) - m_c |^2,   m_c: result of ``means``

    by ``steps`` steps of Adam on the images' logits, which start from N(0, 1/4). noisy: noisy result of ``sums``,
    (classes, D + 1). shape: (C, H, W) of an image.
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
