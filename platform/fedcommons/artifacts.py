"""Costly results by the hash of all they depend on: computed once, verified whenever read."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedcommons.errors import UserError
from fedcommons.files import read_tensors, sha256, write_tensors


def key_of(facts: Mapping[str, Any] | None) -> str:
    """The hash of these facts, by which a result that depends on nothing else is found again."""
    return sha256(json.dumps(facts, sort_keys=True).encode())[:24]


class Store:
    """A folder of artifacts: ``KIND/KEY.safetensors``, and the facts and checksum beside it as JSON.

    ``say`` is told, in one sentence, when an artifact is found damaged. A folder that lacks nothing may be read-only.

    Two processes that put the same artifact at once do no harm: each renames whole files, of equal content.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder, self.say = folder, say

    def require_writable(self) -> None:
        """See that something can be put, before the work of making it; nothing is written.

        Raises:
            UserError: the folder could not be made or written.
        """
        folder = self.folder
        there = next(
            p for p in (folder.resolve(), *folder.resolve().parents) if os.path.exists(p)
        )  # False too where looking is forbidden
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise UserError(
                f"artifacts: {folder} cannot be written ({there} is no folder of ours); name another folder."
            )

    def get(self, kind: str, key: str) -> dict[str, Tensor] | None:
        """The tensors; None if they are not there, or damaged, which is said."""
        path = self._path(kind, key)
        try:
            found = read_tensors(path)
            if found and key_of(found[1].get("facts")) != key:
                raise ValueError(f"{path} is another artifact: its facts are not those it is named after")
        except ValueError as error:
            self.say(f"{error}; it will be built again.")
            return None
        return found[0] if found else None

    def put(self, kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Store tensors by the facts they depend on."""
        path = self._path(kind, key_of(facts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, {"facts": dict(facts)})

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / f"{key}.safetensors"
