"""The file of a model's initial weights (``model.weights``), and its hash, which is a part of the experiment."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from os.path import isfile
from pathlib import Path

from fedcommons.config import registry, torchvision_names
from fedcommons.errors import UserError, quote

LARGEST = 64 * 2**30
"""Largest size of a weights file, in bytes."""


@dataclass(frozen=True)
class WeightsFile:
    """A file of initial weights. digest: the hash that the file must have; renames, is_strict: see ``schema.Model``."""

    name: str
    digest: str | None
    renames: str | None = None
    is_strict: bool = True

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs (old, new) of name prefixes.

        Raises:
            UserError: a pair has no equals sign.
        """
        pairs = [pair.strip().partition("=") for pair in (self.renames or "").split(",") if pair.strip()]
        if wrong := next((pair[0] for pair in pairs if not pair[1]), None):
            raise UserError(
                f"model.weights_map must be pairs OLD=NEW of name prefixes, such as backbone.=body., got "
                f"{quote(wrong)}."
            )
        return [(old, new) for old, _, new in pairs]


def digest(name: str, may_download: bool = False) -> str:
    """Return the hash of a weights file: 24 hexadecimal digits. A file that has not changed is read only once.

    may_download: download pretrained weights that the cache lacks.

    Raises:
        UserError: the file cannot be read, ``name`` is not a file, or a file of torchvision is damaged.
    """
    path = _file(name, may_download)
    return _digest(name, path, path.stat().st_size, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _digest(name: str, path: Path, size: int, changed: int) -> str:
    digest, expected = digest_of(content(name, LARGEST)), path.stem.rpartition("-")[2]
    if torchvision_names.is_torchvisions(name) and not digest.startswith(expected):
        raise UserError(
            f"model.weights {name}: {path} is damaged, as its hash does not begin with {expected}; delete the file and "
            "get it again with --download."
        )
    return digest


def digest_of(data: bytes) -> str:
    """Return the first 24 hexadecimal digits of the SHA-256 hash of ``data``."""
    return sha256(data).hexdigest()[:24]


def content(name: str, most: float) -> bytes:
    """Return the content of the weights file ``name``. most: maximum size of the file, in bytes.

    Raises:
        UserError: the path is not a regular file, or the file is too large or cannot be read.
    """
    path = _file(name)
    if (size := path.stat().st_size) > most:
        raise UserError(f"model.weights {quote(name)} has {size:,} bytes; at most {most:,.0f} are allowed.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"model.weights {quote(name)} cannot be read ({error.strerror}).") from None


def _file(name: str, may_download: bool = False) -> Path:
    """Return the path of the weights file. A relative path starts at the folder of the command, also in Ray."""
    if torchvision_names.is_torchvisions(name):
        return torchvision_names.find("weights", "model.weights", name)(may_download)
    path = registry.base() / Path(name).expanduser()
    if not isfile(path):  # reading a pipe would never end
        raise UserError(
            f"model.weights {quote(name)} cannot be read: {path} is not a file."
            " Pretrained weights have names such as torchvision:ResNet18_Weights.DEFAULT."
        )
    return path
