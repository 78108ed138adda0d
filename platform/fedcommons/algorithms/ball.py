"""Sampling from the ball of radius rho around a model, and projection to this ball.

FedDM uses it (arXiv:2207.09653, equations 23 and 24).   x: the model, P numbers;  g: P independent draws of N(0, 1).

Random numbers are drawn on the CPU and copied, so that they are the same on every device.
"""

import torch
from torch import Tensor

from fedcommons.flat_tensors import Flat


def around(x: Flat, radius: float, draws: torch.Generator) -> Flat:
    """Return x + g min(1, rho/||g||). As ||g|| is about sqrt(P), large models get a uniform point of the sphere."""
    g = torch.randn(x.buffer.shape, generator=draws, dtype=x.buffer.dtype).to(x.buffer.device)
    return Flat(x.layout, x.buffer + g.mul_(_shrinking(g, radius)))


def project(w: Tensor, x: Tensor, radius: float) -> None:
    """Set w <- x + (w - x) min(1, rho/||w - x||), in place; weights inside the ball stay bitwise unchanged."""
    step = w - x
    factor = _shrinking(step, radius)
    w.copy_(torch.where(factor < 1, x + factor * step, w))


def _shrinking(step: Tensor, radius: float) -> Tensor:
    """Return min(1, rho/||step||)."""
    return (radius / torch.linalg.vector_norm(step)).clamp(max=1)
