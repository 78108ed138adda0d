"""The files and folders that a user names."""

import os
from pathlib import Path

from fedcommons.errors import UserError, shown

NOWHERE_YET = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What looking up a path may end with although it is one: who opens it says what is wrong."""


def user_path(what: str, text: str) -> Path:
    """The path that ``text`` names; ``~`` and ``~NAME`` are home folders. ``what``: the option, for the sentence.

    Raises:
        UserError: no file or folder can have that name, or it leads round in a circle of links.
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
