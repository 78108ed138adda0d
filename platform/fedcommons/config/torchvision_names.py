"""Components of torchvision by name: data sets (``torchvision:SVHN``), models and pretrained weights."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fedcommons.errors import UserError, nearest, quote

PREFIX = "torchvision:"
"""Prefix of names of components of torchvision."""

MOST = 30
"""Maximum number of names that a message lists."""

LIBRARIES = {
    "data": "fedcommons.data.torchvision_sets",
    "model": "lightning_modules.networks.torchvision_models",
    "weights": "fedcommons.config.torchvision_weights",
}
"""Kind of component -> module with the functions ``names()`` and ``component(name)``; imported if needed."""


def is_torchvisions(name: str) -> bool:
    """Return whether ``name`` has the form of a component of torchvision."""
    return name.startswith(PREFIX)


def find(kind: str, field: str, name: str) -> Callable[..., Any]:
    """Return the component ``torchvision:NAME``. field: name of the field in messages.

    Raises:
        UserError: torchvision has no such component. The message names the nearest one.
    """
    if kind not in LIBRARIES:
        raise UserError(f"{field} {quote(name)}: components of torchvision are for {', '.join(LIBRARIES)} only.")
    library, leaf = import_module(LIBRARIES[kind]), name.removeprefix(PREFIX)
    if leaf not in (names := library.names()):
        near = nearest(leaf, names).replace("'", f"'{PREFIX}", 1)
        listed = ", ".join(names) if len(names) <= MOST else f"{', '.join(names[:MOST])} and {len(names) - MOST} more"
        raise UserError(f"unknown {field} {quote(name)}{near} torchvision has {listed}.")
    return library.component(leaf)


def same(kind: str, name: str) -> list[str]:
    """Return the component of torchvision that differs from ``name`` only in capitals, as a list of at most one."""
    names = import_module(LIBRARIES[kind]).names() if kind in LIBRARIES else []
    return [PREFIX + candidate for candidate in names if candidate.lower() == name.lower()][:1]
