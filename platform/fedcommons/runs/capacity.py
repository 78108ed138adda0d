"""What a request holds at least, against the memory of this machine: what cannot fit is refused before it is tried."""

import os
from collections.abc import Sequence
from math import prod

from fedcommons.config.experiment import Experiment
from fedcommons.errors import UserError
from fedcommons.tensors import Flat, nbytes

MODELS = 4
"""A run holds the server model, a worker's with its gradient, and sums in float64."""

GENERATORS = 5
"""A training holds the weights, their gradient, Adam's two moments and the moving average."""


def require_model(model: Flat) -> None:
    """Refuse a model that a run could not hold; ``model``: its parameters, on any device.

    Raises:
        UserError: it is so.
    """
    _require("the model", MODELS * nbytes({"model": model}), "model.channels or model.projection")


def require_generator(config: Experiment) -> None:
    """Refuse a generator that could not be trained: at every level it has three 3x3 convolutions or more.

    Raises:
        UserError: it is so.
    """
    weights = sum(3 * 9 * n * n for n in config.generator.channels)
    _require("the generator", GENERATORS * 4 * weights, "generator.channels")


def require_images(n: int, shape: Sequence[int]) -> None:
    """Refuse ``n`` shared images of this shape, one byte a pixel and 8 a label, that a run could not hold.

    Raises:
        UserError: it is so.
    """
    _require(f"{n:,} synthetic images", n * (prod(shape) + 8), "sharing.p")


def _require(what: str, needed: int, field: str) -> None:
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        raise UserError(
            f"{what} would take {needed / 1e9:.3g} GB or more, and this machine has {has / 1e9:.3g} GB of memory; "
            f"use a smaller {field}."
        )
