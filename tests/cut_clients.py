"""Images of noise, and clients that hold them, cut at given places."""

import numpy as np
import torch

from fedcommons import Clients, Dealt, Examples, generator

SHAPE = (1, 8, 8)


def some(n: int, seed: int = 0) -> Examples:
    draws = generator(seed, "images of the test")
    x = torch.randint(256, (n, *SHAPE), generator=draws, dtype=torch.uint8)
    return Examples(x, torch.randint(10, (n,), generator=draws))


def clients(*cuts: int, n: int = 60, data: Examples | None = None) -> Dealt:
    """The same images, cut into clients at these places."""
    return Dealt(Clients(data or some(n), np.split(np.arange(n), cuts)), 10, False, 0, False)
