"""The ball of a radius rho around a model: random weights in it, and the nearest weights of it.

It is FedDM's (arXiv:2207.09653, equations 23 and 24).   x: the model, of P numbers;  g: P independent draws of N(0, 1).

Draws are made on the CPU and copied, so that they are the same on every device.
"""

import torch
from torch import Tensor

from fedcommons.flat_tensors import Flat


def around(x: Flat, radius: float, draws: torch.Generator) -> Flat:
    """x + g min(1, rho/||g||):  as ||g|| is about sqrt(P), of a large model a point of the sphere, uniformly."""
    g = torch.randn(x.buffer.shape, generator=draws, dtype=x.buffer.dtype).to(x.buffer.device)
    return Flat(x.layout, x.buffer + g.mul_(_shrinking(g, radius)))


def project(w: Tensor, x: Tensor, radius: float) -> None:
    """w <- x + (w - x) min(1, rho/||w - x||), in place; what lies in the ball stays as it is, to the bit."""
    step = w - x
    factor = _shrinking(step, radius)
    w.copy_(torch.where(factor < 1, x + factor * step, w))


def _shrinking(step: Tensor, radius: float) -> Tensor:
    """min(1, rho/||step||)."""
    return (radius / torch.linalg.vector_norm(step)).clamp(max=1)
