"""Requests that need more memory than this machine has are refused before they are tried."""

import os

from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, nbytes

MODELS = 4
"""A run's size in models: the server's, a worker's with its gradient, and sums in float64."""


def require_model(model: Flat) -> None:
    """Refuse a model that is too large for this machine; ``model``: its parameters, on any device.

    Raises:
        UserError: it is too large.
    """
    require("the model", MODELS * nbytes({"model": model}), "model.channels or model.projection")


def require(what: str, needed: int, field: str) -> None:
    """Refuse what needs more bytes than this machine's memory; ``field``: what to make smaller.

    Raises:
        UserError: ``needed`` exceeds the memory.
    """
    has = memory()
    if needed > has:
        raise UserError(
            f"{what} would take {needed / 1e9:.3g} GB or more, and this machine has {has / 1e9:.3g} GB of memory; "
            f"use a smaller {field}."
        )


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
