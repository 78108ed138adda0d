"""Snapshots of a folder in a storage: all files of the folder as they were at one time, written atomically.

A snapshot is a list, ``NAME/MANIFEST.json``. For each file it names the object with the file's content; the name of an
object begins with the SHA-256 of the content. The list is written last, by a conditional write. So no reader uses the
objects of a writer that was killed, and if two processes write, the second gets a ``ChangedError``. Content is compared
with its hash when it is read. The writer of a new list removes the objects that the new list no longer names. Objects
of different writers have different names, so no writer removes the objects of another.
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
"""Maximum number of characters of the name of a file in a snapshot."""
OBJECT = "[0-9a-f]{64}-[0-9a-f]{8}"
FRESH_S = 6 * 3600.0
"""Maximum seconds between writing an object and writing the list that names it. ``garbage`` relies on this maximum."""


@dataclass(frozen=True)
class Entry:
    """A file of a snapshot.

    object: name of the object with the content, which begins with the content's SHA-256. size: size in bytes.
    """

    object: str
    size: int

    @property
    def content(self) -> str:
        """Return the SHA-256 of the file's content."""
        return self.object[:64]


class Snapshots:
    """The newest snapshot of one folder in a storage, and its download and upload.

    storage: the storage. name: name of the folder in the storage, such as ``runs/NAME``. names: regular expression of
    the relative paths of files that a snapshot may contain; other files are neither uploaded nor downloaded. tag:
    version of the list that was last read or written; ``object_store.NEW`` if there is no snapshot. entries: path ->
    ``Entry``, the files of this snapshot.
    """

    def __init__(self, storage: Bucket | Disk, name: str, names: str) -> None:
        self.storage, self.name, self.names = storage, name, names
        self.tag, self.entries = object_store.NEW, dict[str, Entry]()
        self._damaged = set[str]()  # files in ``entries`` whose objects are missing or damaged
        self._me = secrets.token_hex(4)
        self._sent = dict[str, Entry]()  # hash -> object written by this instance, for a retry of ``upload``
        self._stale = set[Entry]()  # objects written before ``_since``, which may have been removed as garbage
        self._since = time.time()  # all objects in ``_sent`` were written after this time

    @property
    def whole(self) -> set[str]:
        """Return the files in ``entries``, except files whose objects are known to be missing or damaged."""
        return self.entries.keys() - self._damaged

    def look(self) -> Mapping[str, Entry]:
        """Read the list of the newest snapshot and return ``entries``, which are empty if there is no snapshot.

        Raises:
            StorageError: a request to the storage failed, or the list is malformed.
        """
        key = f"{self.name}/{MANIFEST}"
        self._damaged = set()
        size, tag = self.storage.look(key) or (0, object_store.NEW)
        if size > safe_read.LARGEST_JSON:
            raise StorageError(f"{self.storage.name}/{key} has {size:,} bytes, more than any list of a snapshot")
        is_new = tag == object_store.NEW
        entries = {} if is_new else self._entries(self.storage.read(key, safe_read.LARGEST_JSON + 1) or b"")
        # If the list is replaced between ``look`` and ``read``, ``tag`` is outdated, so the next write fails.
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
            raise StorageError(
                f"{self.storage.name}/{self.name}/{MANIFEST} is not the list of a snapshot's files ({error})"
            ) from None
        return entries

    def read(self, name: str) -> bytes | None:
        """Return the content of the file ``name`` in the snapshot; None if it is missing or damaged.

        Raises:
            StorageError: a request to the storage failed.
        """
        if (entry := self.entries.get(name)) is None:
            return None
        content = self._object(entry)
        return content if _digest(content) == entry.content else None

    def _object(self, entry: Entry) -> bytes | None:
        """Return an object's content, at most one byte more than ``entry.size``; None if the object is missing."""
        return self.storage.read(f"{self.name}/objects/{entry.object}", entry.size + 1)

    def fetch(self, folder: Path) -> list[str]:
        """Download the snapshot's files into ``folder``, each file atomically. Return one sentence per damaged file.

        A file that already has the right content is not downloaded. If the disk lacks space for all missing files, no
        file is written.

        Raises:
            StorageError: a request to the storage failed.
            OSError: the local disk is full, or cannot be written.
        """
        while True:
            damaged, tag = self._fetch(folder), self.tag
            if not damaged or (self.look() and self.tag == tag):  # else another process replaced the list: try again
                self._damaged = set(damaged)
                return list(damaged.values())

    def _fetch(self, folder: Path) -> dict[str, str]:
        """Download the files that are missing or different in the folder. Return file -> sentence for damaged files."""
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
                damaged[name] = f"{where} was truncated or altered: its checksum does not match"
            else:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                write_bytes(folder / name, content)
        return damaged

    def upload(self, folder: Path) -> None:
        """Upload the folder's files as a new snapshot, which replaces the snapshot that was last read or written.

        Raises:
            ChangedError: another process has meanwhile written a snapshot with other content. That snapshot stays.
            StorageError: a request to the storage failed, and the previous snapshot stays. Or the previous snapshot
                was removed from the storage, and the next call uploads all files again.
        """
        new = dict[str, Entry]()
        if time.time() - self._since > FRESH_S:
            self._stale |= {*self._sent.values()}
            self._sent, self._me, self._since = {}, secrets.token_hex(4), time.time()
        for name in self._files(folder):
            if (content := _read(folder, name, float("inf"))) is None:
                continue
            digest = sha256(content)
            entry = self.entries.get(name)
            if entry is None or entry.content != digest or name in self._damaged:
                entry = self._sent.get(digest)
            if entry is None:
                entry = Entry(f"{digest}-{self._me}", len(content))
                self.storage.write(f"{self.name}/objects/{entry.object}", content)
                self._sent[digest] = entry
            new[name] = entry
        if new == self.entries and self.tag != object_store.NEW:
            return
        self._replace(new)

    def copy(self, folder: Path, target: Path) -> None:
        """Copy the folder's files to ``target``, for a later ``upload(target)`` while a run still writes in ``folder``.

        Files in subfolders become hard links if the file system supports them, because a run writes such a file only
        as a new file under the same name.
        """
        for name in self._files(folder):
            if (folder / name).parent.is_symlink():
                continue  # as ``upload`` does
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                if "/" not in name:
                    raise OSError("a run appends to some of its other files")
                os.link(folder / name, target / name)
            except OSError:
                shutil.copyfile(folder / name, target / name, follow_symlinks=False)

    def is_same(self, folder: Path, *names: str) -> bool:
        """Return whether files have the same content in the folder and in the snapshot.

        names: the files to compare; () compares all files of the snapshot.
        """
        return all(
            _digest(_read(folder, n, e.size)) == e.content for n, e in self.entries.items() if not names or n in names
        )

    def remove_others(self, folder: Path) -> None:
        """Remove the folder's files that match ``names``, unless the snapshot has an undamaged copy of the file."""
        for name in [name for name in self._files(folder) if name not in self.whole]:
            (folder / name).unlink()

    def _replace(self, new: dict[str, Entry]) -> None:
        files = {name: {"object": e.object, "bytes": e.size} for name, e in sorted(new.items())}
        content = (json.dumps({"files": files}, indent=1) + "\n").encode()
        before, key = {*self.entries.values(), *self._sent.values(), *self._stale}, f"{self.name}/{MANIFEST}"
        if time.time() - self._since > FRESH_S:  # for example, this process was suspended
            raise StorageError(f"{self.storage.name}/{self.name} could not be uploaded within {FRESH_S / 3600:g} hours")
        try:
            tag = self.storage.write(key, content, self.tag)
        except ChangedError:
            theirs = Snapshots(self.storage, self.name, self.names)
            theirs.look()
            if theirs.tag == object_store.NEW:
                self.tag, self.entries, self._sent = object_store.NEW, {}, {}
                raise StorageError(f"{self.storage.name}/{key} was removed meanwhile") from None
            if _hashes(theirs.entries) == _hashes(new):  # an earlier attempt succeeded, but its answer was lost
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
                with suppress(StorageError):  # an object that cannot be removed only takes space
                    self.storage.remove(f"{self.name}/objects/{entry.object}")
        self._sent = {digest: entry for digest, entry in self._sent.items() if entry.object in named_objects}

    def _is_own(self, entries: Mapping[str, Entry]) -> bool:
        """Return whether this instance wrote the list with ``entries``.

        True if the list names objects that ``self.entries`` lacks, and this instance wrote all these objects.
        """
        unknown = {*entries.values()} - {*self.entries.values()}
        return bool(unknown) and unknown <= {*self._sent.values(), *self._stale}

    def _files(self, folder: Path) -> Iterator[str]:
        """Yield the relative paths of the regular files in the folder that a snapshot may contain."""
        for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
            name = path.relative_to(folder).as_posix()
            if re.fullmatch(self.names, name) and path.is_file() and not path.is_symlink():
                yield name


def _hashes(files: Mapping[str, Entry]) -> dict[str, str]:
    return {name: entry.content for name, entry in files.items()}


def _digest(content: bytes | None) -> str | None:
    return None if content is None else sha256(content)


def _read(folder: Path, name: str, most: float) -> bytes | None:
    """Return the content of the file ``name`` in a folder; None if it is not regular or has over ``most`` bytes."""
    with (
        suppress(safe_read.UnreadableError),
        safe_read.open_file(folder / name, most, inner=1 + name.count("/")) as file,
    ):
        return None if file is None else file.read()
    return None
