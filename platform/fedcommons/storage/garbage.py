"""Garbage of killed writers in a storage or artifact folder: objects without a list that names them, temporary files.

A writer writes objects first and then the list that names them, at most ``snapshots.FRESH_S`` later. An unnamed object
that is older than ``OLDEST_S`` does not belong to a running writer. Only names that fedcommons uses count as garbage.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fedcommons.storage import object_store
from fedcommons.storage.atomic_files import unfinished
from fedcommons.storage.snapshots import MANIFEST, OBJECT, Snapshots

OLDEST_S = 24 * 3600.0
"""The minimum age of garbage in seconds, so large that a clock that is wrong by hours does no harm."""

_OBJECT = rf"((?:runs|artifacts)/[^.].*)/objects/({OBJECT})"
_FINAL = rf"{MANIFEST}|{OBJECT}|fedcommons\.json|[0-9a-f]{{24}}\.safetensors(\.json)?"
"""The names of files in a storage and in a folder of artifacts."""


@dataclass(frozen=True)
class Garbage:
    """A file that no list names. size: in bytes. age: in seconds."""

    key: str
    size: int
    age: float


def find(storage: object_store.Bucket | object_store.Disk) -> Iterator[Garbage]:
    """Return the garbage of a storage, or of a folder of artifacts.

    Raises:
        StorageError: the storage cannot be listed, or a list in it is malformed.
    """
    named = dict[str, set[str]]()
    for key, size, age in sorted(storage.list_objects()):  # the files first, then the lists that name them
        if age < OLDEST_S:
            continue
        if match := re.fullmatch(_OBJECT, key):
            name, object_ = match.groups()
            if name not in named:
                named[name] = {entry.object for entry in Snapshots(storage, name, ".*").look().values()}
            if object_ not in named[name]:
                yield Garbage(key, size, age)
        elif re.fullmatch(_FINAL, unfinished(key.rpartition("/")[2]) or ""):
            yield Garbage(key, size, age)
