"""Checks that refuse requests for more memory than this machine has, before the memory is allocated."""

import os

from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, nbytes

MODELS = 4
"""Minimum memory of a run, in sizes of the model: server model, worker's model with gradient, and float64 sums."""


def require_model(model: Flat) -> None:
    """Refuse a model that is too large for this machine; ``model``: its parameters, on any device.

    Raises:
        UserError: a run with this model needs more memory than the machine has.
    """
    require("the model", MODELS * nbytes({"model": model}), "model.channels or model.projection")


def require(what: str, needed: int, field: str) -> None:
    """Refuse a request for more bytes than this machine's memory. what: its name. field: option to make smaller.

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
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
