"""The file of weights that a model starts from, and its digest, which is a part of an experiment."""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from fedcommons.config import registry
from fedcommons.errors import UserError, shown

LARGEST = 64 * 2**30
"""The most bytes of such a file."""


def digest(name: str) -> str:
    """What the content of the file is known by; a file that has not changed is read once.

    Raises:
        UserError: it cannot be read.
    """
    try:
        at = _path(name).stat()
    except OSError as error:
        raise UserError(f"model.weights {shown(name)} cannot be read ({error.strerror}): it must be a file.") from None
    return _digest(name, _path(name), at.st_size, at.st_mtime_ns)


@lru_cache(maxsize=32)
def _digest(name: str, path: Path, size: int, changed: int) -> str:
    return digest_of(content(name, LARGEST))


def digest_of(data: bytes) -> str:
    """24 characters that follow these bytes."""
    return sha256(data).hexdigest()[:24]


def content(name: str, most: float) -> bytes:
    """The bytes of the file, of which there may be ``most``.

    Raises:
        UserError: it is no regular file, cannot be read, or is larger.
    """
    path = _path(name)
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"model.weights {shown(name)} must be a file, and {path} is none.")
    if (size := path.stat().st_size) > most:
        raise UserError(f"model.weights {shown(name)} has {size:,} bytes, and at most {most:,.0f} are read.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"model.weights {shown(name)} cannot be read ({error.strerror}).") from None


def _path(name: str) -> Path:
    """Relative paths start where those of parts do, in Ray's workers too."""
    return registry.base() / Path(name).expanduser()
