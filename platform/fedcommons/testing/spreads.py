"""How much noise is in what left, and by how much of it something moved."""

from collections.abc import Callable, Mapping
from math import inf

import torch
from torch import Tensor

from fedcommons.flat_tensors import Payload, data

SEEDS = 12
"""Plays with other seeds, which tell how much noise is in what draws it from its seed."""

SLACK = 0.25
"""Relative: of a standard deviation from so many plays."""

Spread = Callable[[], Mapping[str, Tensor]]
"""The standard deviation of the noise in each number of each tensor."""


def spread_of(play: Callable[[int], Payload], like: Payload) -> Spread:
    """From plays with other seeds, which ``play`` is given the numbers of."""

    def spread() -> Mapping[str, Tensor]:
        plays = [play(number) for number in range(1, 1 + SEEDS)]
        shapes = {name: data(x).shape for name, x in like.items() if data(x).numel()}
        same = [name for name, shape in shapes.items() if all(data(p[name]).shape == shape for p in plays)]
        return {name: torch.stack([data(p[name]).double() for p in plays]).std(0) for name in same}

    return spread


def in_units(moved: Tensor, sd: Tensor, rounded: bool) -> float:
    """||moved|| over the standard deviation of the noise where it moved; infinite without noise.

    rounded: to whole numbers after noise, so that each may be off by 1.
    """
    there = moved != 0
    of_noise = float(sd[there].square().mean().sqrt())
    if not 0 < of_noise < inf:
        return inf
    return float((moved.abs() - int(rounded)).clamp(min=0).norm()) / of_noise


def difference(a: Tensor, b: Tensor) -> Tensor:
    """b - a."""
    return b.detach().double() - a.detach().double()
