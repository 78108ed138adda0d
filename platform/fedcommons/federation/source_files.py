"""Hashes of the source files that a process runs, to detect hosts of a cluster that have different files.

Files with user-defined components have separate hashes, which are in the experiment (``config.user_code``).
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from fedcommons.storage.paths import sweeps_folder

PACKAGES = ("diffusers", "numpy", "opacus", "pytorch-lightning", "scikit-learn", "scipy", "torch", "torchvision")
"""Installed packages whose version can change numerical results."""


@cache
def hashes() -> Mapping[str, str]:
    """Return the hash of each source file, by path in the repository, and the version of each package in ``PACKAGES``.

    The first call reads the files. Later calls in the same process return the same hashes.
    """
    modules = find_spec("lightning_modules")
    folders = {
        "platform/fedcommons": Path(__file__).resolve().parent.parent,
        "lightning_modules": Path(modules.origin).parent if modules and modules.origin else None,
        "sweeps": sweeps_folder(),
    }
    hashed = {name: hash_ for name, folder in folders.items() if folder for name, hash_ in _hashed(name, folder)}
    return hashed | {name: version(name).partition("+")[0] for name in PACKAGES}


def _hashed(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, hash) of each Python file below ``folder`` except hidden files; paths begin with ``name``."""
    for file in folder.rglob("*.py"):
        below = file.relative_to(folder)
        if not any(part.startswith(".") for part in below.parts):
            try:
                yield f"{name}/{below.as_posix()}", sha256(file.read_bytes()).hexdigest()[:16]
            except IsADirectoryError:
                pass
            except OSError:  # a broken link or an unreadable file, which this process cannot run
                yield f"{name}/{below.as_posix()}", "unreadable"


def combined_hash() -> str:
    """Return one hash, 16 hexadecimal digits, of all source files and package versions in ``hashes``."""
    return sha256(json.dumps(hashes(), sort_keys=True).encode()).hexdigest()[:16]
