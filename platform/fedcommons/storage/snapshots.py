"""Snapshots of folders in a storage: all files of a folder as they were at one time, or nothing of them.

A snapshot is a list, ``NAME/MANIFEST.json``, of files and the objects that hold them, each named after its SHA-256. The
list is written last, and only if nobody else has written one since: what a killed writer leaves, nobody reads, and of
two writers the second is told. What is read is compared with its hash. Objects that no list names any more are removed
by whoever wrote the new list; what two writers write has different names, so neither removes what is the other's.
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
"""Characters of a file's name, at most."""
OBJECT = "[0-9a-f]{64}-[0-9a-f]{8}"
FRESH_S = 6 * 3600.0
"""Seconds within which a list names an object that was written for it: see ``garbage``."""


@dataclass(frozen=True)
class Entry:
    """A file of a snapshot: the object's name, which begins with the SHA-256 of its content, and its bytes."""

    object: str
    size: int

    @property
    def content(self) -> str:
        """The hash."""
        return self.object[:64]


class Snapshots:
    """The newest snapshot of a folder of this name.

    names: a regular expression of the files it may have, with ``/`` between folder and file: nothing else is sent or
    brought. tag: of the snapshot last seen or written; ``remote.NEW`` if there was none. held: its files by name.
    """

    def __init__(self, storage: Bucket | Disk, name: str, names: str) -> None:
        self.storage, self.name, self.names = storage, name, names
        self.tag, self.held = object_store.NEW, dict[str, Entry]()
        self._damaged = set[str]()  # files of ``held`` that were found so
        self._me = secrets.token_hex(4)
        self._sent = dict[str, Entry]()  # objects that this one has written, by hash: a push that failed goes on
        self._stale = set[Entry]()  # of them those that ``garbage`` may have removed
        self._since = time.time()  # what was written earlier is stale, unless a list names it

    @property
    def whole(self) -> set[str]:
        """The names in ``held``, but for what was found damaged."""
        return self.held.keys() - self._damaged

    def look(self) -> Mapping[str, Entry]:
        """The files of the snapshot that is there now; none if there is no snapshot.

        Raises:
            StorageError: the storage cannot be asked, or the list is none of ours.
        """
        key = f"{self.name}/{MANIFEST}"
        self._damaged = set()
        if (found := self.storage.look(key)) is None:
            self.tag, self.held = object_store.NEW, {}
            return self.held
        size, tag = found
        if size > safe_read.LARGEST_JSON:
            raise StorageError(f"{self.storage.name}/{key} has {size:,} bytes, and no list of ours is so long")
        held = self._entries(self.storage.read(key, safe_read.LARGEST_JSON + 1) or b"")
        self.tag, self.held = tag, held  # written in between, the content would be newer than its tag: a write sees it
        return held

    def _entries(self, content: bytes) -> dict[str, Entry]:
        try:
            files = safe_read.parsed(content)["files"]
            found = {name: Entry(entry["object"], entry["bytes"]) for name, entry in files.items()}
            for name, entry in found.items():
                if not re.fullmatch(self.names, name) or not re.fullmatch(OBJECT, entry.object):
                    raise ValueError(f"it names {clean(name[:80])!r}")
                if len(name) > LONGEST or type(entry.size) is not int or not 0 <= entry.size <= memory():
                    raise ValueError(f"its {clean(name[:80])!r} is longer than this machine can hold")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StorageError(f"{self.storage.name}/{self.name}/{MANIFEST} is no list of ours ({error})") from None
        return found

    def read(self, name: str) -> bytes | None:
        """The content of one of the files of ``held``; None if it is not there or damaged.

        Raises:
            StorageError: the storage cannot be asked.
        """
        if (entry := self.held.get(name)) is None:
            return None
        content = self._object(entry)
        return content if _digest(content) == entry.content else None

    def _object(self, entry: Entry) -> bytes | None:
        """What is there under the object's name, up to a byte more than it should be."""
        return self.storage.read(f"{self.name}/objects/{entry.object}", entry.size + 1)

    def bring(self, folder: Path) -> list[str]:
        """Write the files of ``held`` into the folder, each whole or not at all; what is damaged there, in sentences.

        A file that is the same here is not read again. Nothing is written where there is not room for all.

        Raises:
            StorageError: the storage cannot be asked.
            OSError: the disk here is full, or cannot be written.
        """
        while True:
            damaged, tag = self._bring(folder), self.tag
            if not damaged or (self.look() and self.tag == tag):  # else it was replaced meanwhile
                self._damaged = set(damaged)
                return list(damaged.values())

    def _bring(self, folder: Path) -> dict[str, str]:
        """Bring what is not the same here; what is damaged, by the file's name."""
        lacking = {n: e for n, e in self.held.items() if _digest(_read(folder, n, e.size)) != e.content}
        room = shutil.disk_usage(next(p for p in (folder, *folder.resolve().parents) if p.exists())).free
        if sum(entry.size for entry in lacking.values()) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        damaged = {}
        for name, entry in lacking.items():
            where = f"{self.storage.name}/{self.name}: {name}"
            if (content := self._object(entry)) is None:
                damaged[name] = f"{where} is missing"
            elif len(content) != entry.size or sha256(content) != entry.content:
                damaged[name] = f"{where} was truncated or altered: its checksum is not the one it was written with"
            else:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_bytes(folder / name, content)
        return damaged

    def send(self, folder: Path) -> None:
        """Make the folder as it is now the newest snapshot, in the place of the one that ``tag`` tells.

        Raises:
            ChangedError: somebody else has written a snapshot with other content since; it stays.
            StorageError: the storage cannot take it, and the snapshot before stays; or somebody has removed that one,
                and the next call sends all anew.
        """
        new = dict[str, Entry]()
        if time.time() - self._since > FRESH_S:
            self._stale |= {*self._sent.values()}
            self._sent, self._me, self._since = {}, secrets.token_hex(4), time.time()
        for name in self._files(folder):
            if (content := _read(folder, name, float("inf"))) is None:
                continue
            digest = sha256(content)
            there = self.held.get(name)
            is_there = there is not None and there.content == digest and name not in self._damaged
            entry = there if is_there else self._sent.get(digest)
            if entry is None:
                entry = Entry(f"{digest}-{self._me}", len(content))
                self.storage.write(f"{self.name}/objects/{entry.object}", content)
                self._sent[digest] = entry
            new[name] = entry
        if new == self.held and self.tag != object_store.NEW:
            return
        self._replace(new)

    def is_same(self, folder: Path, *names: str) -> bool:
        """Whether the folder has the files of ``held``, or those of these names, as they are there."""
        return all(
            _digest(_read(folder, n, e.size)) == e.content for n, e in self.held.items() if not names or n in names
        )

    def remove_others(self, folder: Path) -> None:
        """Remove the files of the folder that a snapshot may have and this one has not."""
        for name in [name for name in self._files(folder) if name not in self.whole]:
            (folder / name).unlink()

    def _replace(self, new: dict[str, Entry]) -> None:
        files = {name: {"object": e.object, "bytes": e.size} for name, e in sorted(new.items())}
        content = (json.dumps({"files": files}, indent=1) + "\n").encode()
        before, key = {*self.held.values(), *self._sent.values(), *self._stale}, f"{self.name}/{MANIFEST}"
        if time.time() - self._since > FRESH_S:  # this process was stopped meanwhile
            raise StorageError(f"{self.storage.name}/{self.name} was sent for more than {FRESH_S / 3600:g} hours")
        try:
            tag = self.storage.write(key, content, self.tag)
        except ChangedError:
            theirs = Snapshots(self.storage, self.name, self.names)
            theirs.look()
            if theirs.tag == object_store.NEW:
                self.tag, self.held, self._sent = object_store.NEW, {}, {}
                raise StorageError(f"{self.storage.name}/{key} was removed meanwhile") from None
            if _hashes(theirs.held) == _hashes(new):  # a retry of our own, whose first answer was lost
                tag, new = theirs.tag, dict(theirs.held)
            elif self._is_own(theirs.held):
                before |= {*theirs.held.values()}
                tag = self.storage.write(key, content, theirs.tag)
            else:
                raise
        self.tag, self.held, self._damaged = tag, new, set()
        self._stale, self._since = set(), time.time()
        kept = {entry.object for entry in new.values()}
        for entry in before:
            if entry.object not in kept:
                with suppress(StorageError):  # it takes room, and nobody reads it
                    self.storage.remove(f"{self.name}/objects/{entry.object}")
        self._sent = {digest: entry for digest, entry in self._sent.items() if entry.object in kept}

    def _is_own(self, found: Mapping[str, Entry]) -> bool:
        """Whether a list is one that we wrote without an answer: nobody else knows objects that no list has named."""
        unknown = {*found.values()} - {*self.held.values()}
        return bool(unknown) and unknown <= {*self._sent.values(), *self._stale}

    def _files(self, folder: Path) -> Iterator[str]:
        """The names of regular files here that a snapshot may have."""
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
            name = path.relative_to(folder).as_posix()
            if re.fullmatch(self.names, name) and path.is_file() and not path.is_symlink():
                yield name


def _hashes(files: Mapping[str, Entry]) -> dict[str, str]:
    return {name: entry.content for name, entry in files.items()}


def _digest(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def _read(folder: Path, name: str, most: float) -> bytes | None:
    """The content of a file here; None if there is no regular file of at most so many bytes."""
    with suppress(safe_read.UnreadableError), safe_read.opened(folder / name, most, inner=1 + name.count("/")) as file:
        return None if file is None else file.read()
    return None
