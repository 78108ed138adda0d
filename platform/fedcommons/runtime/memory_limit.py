"""Checks that stop a run before it allocates more RAM than this machine has."""

import os

from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, nbytes

MODELS = 4
"""Lower bound of a run's RAM, in multiples of the model's bytes: server model, worker's model, gradient and one sum."""


def require_model(model: Flat) -> None:
    """Check that this machine has enough RAM for a run with this model.

    Raises:
        UserError: the run needs more RAM than the machine has.
    """
    require("the model", MODELS * nbytes({"model": model}), "model.channels or model.projection")


def require(what: str, needed: int, field: str) -> None:
    """Check that this machine has ``needed`` bytes of RAM.

    what: name of the object that needs the RAM. field: option that the user can make smaller. Both are for the message.

    Raises:
        UserError: the machine has less RAM than ``needed``.
    """
    has = memory()
    if needed > has:
        raise UserError(
            f"{what} would take {needed / 1e9:.3g} GB or more, but this machine has {has / 1e9:.3g} GB of memory; "
            f"use a smaller {field}."
        )


def memory() -> int:
    """Return the RAM of this machine in bytes, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
