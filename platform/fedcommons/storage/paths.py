"""The files and folders that a user names, and the names of files in a run folder."""

import os
from pathlib import Path

from fedcommons.errors import UserError, shown

CHECKPOINT_FILE = r"round-(\d{6,})\.safetensors"
"""The name of a checkpoint; its facts are in a file of this name and .json."""

MEMORY_FILE = r"client-\d{7,}-round-\d{6,}\.safetensors"
"""The name of a file of a client's memory; its facts are in a file of this name and .json."""

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


def sweeps_folder() -> Path | None:
    """Return the folder of the sweeps' scripts, in the clone or in the installed wheel; None if there is none."""
    package = Path(__file__).resolve().parent.parent
    folders = (package.parent.parent / "sweeps", package.parent / "fedcommons_sweeps")
    return next((one for one in folders if (one / "run.py").is_file() and (one / "papers").is_dir()), None)
