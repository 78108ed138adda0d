"""Paths of files and folders that a user names, and regular expressions of the file names in a run folder."""

import os
from pathlib import Path

from fedcommons.errors import UserError, quote

CHECKPOINT_FILE = r"round-(\d{6,})\.safetensors"
"""Regular expression of a checkpoint's file name; its facts (plain values) are in NAME.json."""

LIST_FILE = r"round-\d{6,9}\.json"
"""Regular expression of the name of a file that lists a round's participants."""

MEMORY_FILE = r"client-\d{7,}-round-\d{6,}\.safetensors"
"""Regular expression of the name of a file with a client's state between rounds; its facts are in NAME.json."""


def user_path(what: str, text: str) -> Path:
    """Return the path that ``text`` names, with ``~`` and ``~NAME`` replaced. what: name of the option, for messages.

    Raises:
        UserError: no file or folder can have this name, or symbolic links form a circle.
    """
    if not text.strip():
        raise UserError(f"{what} must name a file or folder, got {quote(text)}.")
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # the code that opens the path reports these
        pass
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: unknown user; ValueError: NUL character
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise UserError(f"{what} cannot be {quote(text)} ({reason}).") from None
    return path


def sweeps_folder() -> Path | None:
    """Return the folder of the sweeps' scripts, in the clone or in the installed wheel; None if there is none."""
    package = Path(__file__).resolve().parent.parent
    folders = (package.parent.parent / "sweeps", package.parent / "fedcommons_sweeps")
    return next((folder for folder in folders if (folder / "run.py").is_file() and (folder / "papers").is_dir()), None)
