"""What a request holds at least, against the memory of this machine: what cannot fit is refused before it is tried."""

import os

from fedcommons.errors import UserError
from fedcommons.tensors import Flat, nbytes

MODELS = 4
"""A run holds the server model, a worker's with its gradient, and sums in float64."""


def require_model(model: Flat) -> None:
    """Refuse a model that a run could not hold; ``model``: its parameters, on any device.

    Raises:
        UserError: it is so.
    """
    require("the model", MODELS * nbytes({"model": model}), "model.channels or model.projection")


def require(what: str, needed: int, field: str) -> None:
    """Refuse what takes ``needed`` bytes or more where this machine has less; ``field``: what to make smaller.

    Raises:
        UserError: it is so.
    """
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has:
        raise UserError(
            f"{what} would take {needed / 1e9:.3g} GB or more, and this machine has {has / 1e9:.3g} GB of memory; "
            f"use a smaller {field}."
        )
