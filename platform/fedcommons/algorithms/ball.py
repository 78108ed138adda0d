"""Random sampling in a ball around a model's weights, and projection onto this ball.

FedDM uses both functions (arXiv:2207.09653, equations 23 and 24).   x: the weights of the model at the centre; rho: the
ball's radius.

Random numbers are drawn on the CPU and copied to the device, so that they are equal on every device.
"""

import torch
from torch import Tensor

from fedcommons.flat_tensors import Flat


def around(x: Flat, radius: float, draws: torch.Generator) -> Flat:
    """Return x + g min(1, rho/||g||), random weights in the ball of radius rho (``radius``) around the weights x.

    g: independent N(0, 1) numbers, one per weight. If ||g|| exceeds rho, as usual for a large model, the result is
    uniform on the ball's surface.
    """
    g = torch.randn(x.buffer.shape, generator=draws, dtype=x.buffer.dtype).to(x.buffer.device)
    return Flat(x.layout, x.buffer + g.mul_(_shrinking(g, radius)))


def project(w: Tensor, x: Tensor, radius: float) -> None:
    """Project weights w in place onto the ball of ``radius`` around weights x; a w inside the ball is unchanged."""
    step = w - x
    factor = _shrinking(step, radius)
    w.copy_(torch.where(factor < 1, x + factor * step, w))


def _shrinking(step: Tensor, radius: float) -> Tensor:
    """Return the factor min(1, rho/||step||), which shortens a step to a length of at most rho (``radius``)."""
    return (radius / torch.linalg.vector_norm(step)).clamp(max=1)
