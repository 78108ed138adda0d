"""The files and folders that a user names."""

import os
from pathlib import Path

from fedcommons.errors import UserError, shown

NOWHERE_YET = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors that a valid path may give here; whoever opens it reports them."""


def user_path(what: str, text: str) -> Path:
    """The path that ``text`` names; ``~`` and ``~NAME`` are home folders. ``what``: the option's name for messages.

    Raises:
        UserError: no file or folder can have that name, or its links form a circle.
    """
    if not text.strip():
        raise UserError(f"{what} must name a file or folder, got {shown(text)}.")
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except NOWHERE_YET:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such user; ValueError: a NUL
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{what} cannot be {shown(text)} ({reason}).") from None
    return path
