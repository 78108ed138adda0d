"""The file of a model's initial weights, and the hash of this file, which an experiment stores."""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from fedcommons.config import registry
from fedcommons.errors import UserError, quote

LARGEST = 64 * 2**30
"""Largest size of a weights file, in bytes."""


def digest(name: str) -> str:
    """Return the hash of the file's content. A file that has not changed is read only once.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        at = _path(name).stat()
    except OSError as error:
        raise UserError(f"model.weights {quote(name)} cannot be read ({error.strerror}): it must be a file.") from None
    return _digest(name, _path(name), at.st_size, at.st_mtime_ns)


@lru_cache(maxsize=32)
def _digest(name: str, path: Path, size: int, changed: int) -> str:
    return digest_of(content(name, LARGEST))


def digest_of(data: bytes) -> str:
    """Return the first 24 hexadecimal digits of the SHA-256 hash of ``data``."""
    return sha256(data).hexdigest()[:24]


def content(name: str, most: float) -> bytes:
    """Return the content of the file. most: largest allowed size, in bytes.

    Raises:
        UserError: the path is no regular file, or the file cannot be read or is too large.
    """
    path = _path(name)
    if not path.is_file():  # reading a pipe would block
        raise UserError(f"model.weights {quote(name)} must be a file, and {path} is none.")
    if (size := path.stat().st_size) > most:
        raise UserError(f"model.weights {quote(name)} has {size:,} bytes, and at most {most:,.0f} are read.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"model.weights {quote(name)} cannot be read ({error.strerror}).") from None


def _path(name: str) -> Path:
    """Return the path. A relative path starts at the folder of relative import paths, in Ray's workers too."""
    return registry.base() / Path(name).expanduser()
