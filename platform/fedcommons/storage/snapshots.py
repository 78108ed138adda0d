"""Snapshots of folders in a storage: all files of a folder as they were at one time, written atomically.

A snapshot is a list, ``NAME/MANIFEST.json``, of files and the objects with their content, each named after its SHA-256.
The list is written last, by a conditional write. So no reader uses the objects of a killed writer, and the second of
two writers gets a ``ChangedError``. Each content that is read is compared with its hash. The writer of a new list
removes the objects that no list names any more. Objects of two writers have different names, so no writer removes
objects of another writer.
"""

import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedcommons.errors import clean
from fedcommons.storage import object_store, safe_read
from fedcommons.storage.atomic_files import memory, sha256, write_bytes
from fedcommons.storage.object_store import Bucket, ChangedError, Disk, StorageError

MANIFEST = "MANIFEST.json"
LONGEST = 200
"""Maximum number of characters of a file's name."""
OBJECT = "[0-9a-f]{64}-[0-9a-f]{8}"
FRESH_S = 6 * 3600.0
"""Maximum seconds between writing an object and writing the list that names it: see ``garbage``."""


@dataclass(frozen=True)
class Entry:
    """A file of a snapshot: its object's name, which begins with the SHA-256 of the content, and its size in bytes."""

    object: str
    size: int

    @property
    def content(self) -> str:
        """Return the SHA-256 of the file's content."""
        return self.object[:64]


class Snapshots:
    """The newest snapshot of the folder ``name``.

    names: a regular expression of the files that the snapshot may have, with ``/`` between folder and file; other files
    are neither uploaded nor downloaded. tag: the tag of the snapshot last read or written; ``object_store.NEW`` without
    a snapshot. held: the files of this snapshot by name.
    """

    def __init__(self, storage: Bucket | Disk, name: str, names: str) -> None:
        self.storage, self.name, self.names = storage, name, names
        self.tag, self.entries = object_store.NEW, dict[str, Entry]()
        self._damaged = set[str]()  # files of ``held`` whose objects are missing or damaged
        self._me = secrets.token_hex(4)
        self._sent = dict[str, Entry]()  # objects that this instance wrote, by hash, for a retry of ``send``
        self._stale = set[Entry]()  # earlier objects of ``_sent``, which ``garbage`` may have removed
        self._since = time.time()  # earlier objects are stale, unless a list names them

    @property
    def whole(self) -> set[str]:
        """Return the names in ``held`` without the files found missing or damaged."""
        return self.entries.keys() - self._damaged

    def look(self) -> Mapping[str, Entry]:
        """Read the newest snapshot's list, and return its files; an empty mapping if there is no snapshot.

        Raises:
            StorageError: a request to the storage failed, or the list is malformed.
        """
        key = f"{self.name}/{MANIFEST}"
        self._damaged = set()
        if (status := self.storage.look(key)) is None:
            self.tag, self.entries = object_store.NEW, {}
            return self.entries
        size, tag = status
        if size > safe_read.LARGEST_JSON:
            raise StorageError(f"{self.storage.name}/{key} has {size:,} bytes, and no list of ours is so long")
        entries = self._entries(self.storage.read(key, safe_read.LARGEST_JSON + 1) or b"")
        # If the list was replaced between both requests, it is newer than its tag: the next conditional write fails.
        self.tag, self.entries = tag, entries
        return entries

    def _entries(self, content: bytes) -> dict[str, Entry]:
        try:
            files = safe_read.parsed(content)["files"]
            entries = {name: Entry(entry["object"], entry["bytes"]) for name, entry in files.items()}
            for name, entry in entries.items():
                if not re.fullmatch(self.names, name) or not re.fullmatch(OBJECT, entry.object):
                    raise ValueError(f"it names {clean(name[:80])!r}")
                if len(name) > LONGEST or type(entry.size) is not int or not 0 <= entry.size <= memory():
                    raise ValueError(f"its {clean(name[:80])!r} is longer than this machine can hold")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StorageError(f"{self.storage.name}/{self.name}/{MANIFEST} is no list of ours ({error})") from None
        return entries

    def read(self, name: str) -> bytes | None:
        """Return the content of a file of ``held``; None if it is missing or damaged.

        Raises:
            StorageError: a request to the storage failed.
        """
        if (entry := self.entries.get(name)) is None:
            return None
        content = self._object(entry)
        return content if _digest(content) == entry.content else None

    def _object(self, entry: Entry) -> bytes | None:
        """Return the object's content, at most one byte more than its stated size; None if it is missing."""
        return self.storage.read(f"{self.name}/objects/{entry.object}", entry.size + 1)

    def fetch(self, folder: Path) -> list[str]:
        """Download the files of ``held`` into the folder, each atomically; return sentences on damaged files.

        A file with the same content in the folder is not downloaded. No file is written if the disk has not enough
        space for all files.

        Raises:
            StorageError: a request to the storage failed.
            OSError: the local disk is full, or cannot be written.
        """
        while True:
            damaged, tag = self._fetch(folder), self.tag
            if not damaged or (self.look() and self.tag == tag):  # else the snapshot was replaced meanwhile
                self._damaged = set(damaged)
                return list(damaged.values())

    def _fetch(self, folder: Path) -> dict[str, str]:
        """Download the files that differ in the folder; return file name -> sentence for damaged files."""
        missing = {n: e for n, e in self.entries.items() if _digest(_read(folder, n, e.size)) != e.content}
        room = shutil.disk_usage(next(p for p in (folder, *folder.resolve().parents) if p.exists())).free
        if sum(entry.size for entry in missing.values()) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        damaged = {}
        for name, entry in missing.items():
            where = f"{self.storage.name}/{self.name}: {name}"
            if (content := self._object(entry)) is None:
                damaged[name] = f"{where} is missing"
            elif len(content) != entry.size or sha256(content) != entry.content:
                damaged[name] = f"{where} was truncated or altered: its checksum is not the one it was written with"
            else:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_bytes(folder / name, content)
        return damaged

    def upload(self, folder: Path) -> None:
        """Upload the folder's present files as the newest snapshot, which replaces the snapshot with tag ``tag``.

        Raises:
            ChangedError: another writer has written a snapshot with other content since; that snapshot stays.
            StorageError: a request to the storage failed, and the previous snapshot stays; or the previous snapshot
                was removed, and the next call uploads all files again.
        """
        new = dict[str, Entry]()
        if time.time() - self._since > FRESH_S:
            self._stale |= {*self._sent.values()}
            self._sent, self._me, self._since = {}, secrets.token_hex(4), time.time()
        for name in self._files(folder):
            if (content := _read(folder, name, float("inf"))) is None:
                continue
            digest = sha256(content)
            known_entry = self.entries.get(name)
            is_there = known_entry is not None and known_entry.content == digest and name not in self._damaged
            entry = known_entry if is_there else self._sent.get(digest)
            if entry is None:
                entry = Entry(f"{digest}-{self._me}", len(content))
                self.storage.write(f"{self.name}/objects/{entry.object}", content)
                self._sent[digest] = entry
            new[name] = entry
        if new == self.entries and self.tag != object_store.NEW:
            return
        self._replace(new)

    def is_same(self, folder: Path, *names: str) -> bool:
        """Return whether the folder has the files of ``held`` (or only ``names``) with the snapshot's content."""
        return all(
            _digest(_read(folder, n, e.size)) == e.content for n, e in self.entries.items() if not names or n in names
        )

    def remove_others(self, folder: Path) -> None:
        """Remove the files of the folder that match ``self.names`` and are not in this snapshot."""
        for name in [name for name in self._files(folder) if name not in self.whole]:
            (folder / name).unlink()

    def _replace(self, new: dict[str, Entry]) -> None:
        files = {name: {"object": e.object, "bytes": e.size} for name, e in sorted(new.items())}
        content = (json.dumps({"files": files}, indent=1) + "\n").encode()
        before, key = {*self.entries.values(), *self._sent.values(), *self._stale}, f"{self.name}/{MANIFEST}"
        if time.time() - self._since > FRESH_S:  # this process was stopped meanwhile
            raise StorageError(f"{self.storage.name}/{self.name} was sent for more than {FRESH_S / 3600:g} hours")
        try:
            tag = self.storage.write(key, content, self.tag)
        except ChangedError:
            theirs = Snapshots(self.storage, self.name, self.names)
            theirs.look()
            if theirs.tag == object_store.NEW:
                self.tag, self.entries, self._sent = object_store.NEW, {}, {}
                raise StorageError(f"{self.storage.name}/{key} was removed meanwhile") from None
            if _hashes(theirs.entries) == _hashes(new):  # the first request succeeded, and its answer was lost
                tag, new = theirs.tag, dict(theirs.entries)
            elif self._is_own(theirs.entries):
                before |= {*theirs.entries.values()}
                tag = self.storage.write(key, content, theirs.tag)
            else:
                raise
        self.tag, self.entries, self._damaged = tag, new, set()
        self._stale, self._since = set(), time.time()
        named_objects = {entry.object for entry in new.values()}
        for entry in before:
            if entry.object not in named_objects:
                with suppress(StorageError):  # a remaining object takes space, and no reader uses it
                    self.storage.remove(f"{self.name}/objects/{entry.object}")
        self._sent = {digest: entry for digest, entry in self._sent.items() if entry.object in named_objects}

    def _is_own(self, entries: Mapping[str, Entry]) -> bool:
        """Return whether this instance wrote the list: only it knows objects that no list has named."""
        unknown = {*entries.values()} - {*self.entries.values()}
        return bool(unknown) and unknown <= {*self._sent.values(), *self._stale}

    def _files(self, folder: Path) -> Iterator[str]:
        """Return the names of regular files in the folder that a snapshot may have."""
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
            name = path.relative_to(folder).as_posix()
            if re.fullmatch(self.names, name) and path.is_file() and not path.is_symlink():
                yield name


def _hashes(files: Mapping[str, Entry]) -> dict[str, str]:
    return {name: entry.content for name, entry in files.items()}


def _digest(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def _read(folder: Path, name: str, most: float) -> bytes | None:
    """Return the content of a file in the folder; None if there is no regular file of at most ``most`` bytes."""
    with (
        suppress(safe_read.UnreadableError),
        safe_read.open_file(folder / name, most, inner=1 + name.count("/")) as file,
    ):
        return None if file is None else file.read()
    return None
