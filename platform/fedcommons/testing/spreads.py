"""Estimate the noise in the tensors that a client sent, and express differences in units of this noise."""

from collections.abc import Callable, Mapping
from math import inf

import torch
from torch import Tensor

from fedcommons.flat_tensors import Payload, data

SEEDS = 12
"""Number of runs with other seeds, from which the standard deviation of the noise is estimated."""

SLACK = 0.25
"""Relative tolerance for standard deviations that are estimated from ``SEEDS`` runs."""

Spread = Callable[[], Mapping[str, Tensor]]
"""A function that returns, by tensor name, the standard deviation of the noise in each element of the tensor."""


def spread_of(play: Callable[[int], Payload], like: Payload) -> Spread:
    """Return a function that estimates standard deviations from ``SEEDS`` runs.

    play: function that performs run number 1 to ``SEEDS`` and returns the tensors of this run. like: tensors with the
    expected shapes; a tensor that has another shape in a run gets no standard deviation.
    """

    def spread() -> Mapping[str, Tensor]:
        plays = [play(number) for number in range(1, 1 + SEEDS)]
        shapes = {name: data(x).shape for name, x in like.items() if data(x).numel()}
        same = [name for name, shape in shapes.items() if all(data(p[name]).shape == shape for p in plays)]
        return {name: torch.stack([data(p[name]).double() for p in plays]).std(0) for name in same}

    return spread


def in_units(moved: Tensor, sd: Tensor, rounded: bool) -> float:
    """Return the Euclidean norm of ``moved`` divided by the standard deviation of the noise; infinite without noise.

    moved: difference of a tensor between two runs. sd: standard deviations of the noise by element; the divisor
    is their root mean square over the changed elements. rounded: whether elements were rounded after the noise; then
    1 is subtracted from the absolute difference of each element.
    """
    is_moved = moved != 0
    of_noise = float(sd[is_moved].square().mean().sqrt())
    if not 0 < of_noise < inf:
        return inf
    return float((moved.abs() - int(rounded)).clamp(min=0).norm()) / of_noise


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return the difference b - a in float64, so that the subtraction adds no rounding."""
    return b.detach().double() - a.detach().double()
