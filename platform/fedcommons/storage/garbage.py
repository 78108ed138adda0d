"""Search for files that killed processes left in a storage or artifact folder: unlisted objects, temporary files.

A process first writes a snapshot's objects (the files' contents) and then, at most ``snapshots.FRESH_S`` seconds later,
the list that names them. So an object that no list names and that is older than ``OLDEST_S`` does not belong to a
running process. Only files whose names fedcommons uses count as garbage.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fedcommons.storage import object_store
from fedcommons.storage.atomic_files import unfinished
from fedcommons.storage.snapshots import MANIFEST, OBJECT, Snapshots

OLDEST_S = 24 * 3600.0
"""Minimum age of garbage in seconds. It is so large that a clock that is wrong by hours does no harm."""

_OBJECT = rf"((?:runs|artifacts)/[^.].*)/objects/({OBJECT})"
_FINAL = rf"{MANIFEST}|{OBJECT}|fedcommons\.json|[0-9a-f]{{24}}\.safetensors(\.json)?"
"""Regular expression of the file names in a storage and in a folder of artifacts."""


@dataclass(frozen=True)
class Garbage:
    """A stored file that is in no snapshot's file list. key: path in the storage. size: in bytes. age: in seconds."""

    key: str
    size: int
    age: float


def find(storage: object_store.Bucket | object_store.Disk) -> Iterator[Garbage]:
    """Yield the garbage of a storage, or of a folder of artifacts.

    Raises:
        StorageError: the objects of the storage cannot be listed, or the list of a snapshot is malformed.
    """
    named = dict[str, set[str]]()
    # The objects are listed first. So a snapshot's list that is read later names all objects that are still in use.
    for key, size, age in sorted(storage.list_objects()):
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
