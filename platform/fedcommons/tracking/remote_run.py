"""Copies of a run folder in a remote storage: downloaded before a run resumes, uploaded with each checkpoint.

The upload contains the files of a run that ``run_folder`` lists, without W&B's folder, locks and temporary files. The
hidden file ``.storage.json`` names the snapshot that last equalled the local folder. A process reads the previous
snapshot before it writes the next. So a different snapshot in the storage is later, unless the run was removed there.
"""

import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from fedcommons.config import dotted
from fedcommons.errors import ClientError, UserError, Warned
from fedcommons.errors import quote as quote_value
from fedcommons.storage import file_lock, object_store, safe_read
from fedcommons.storage.atomic_files import write_bytes, write_json
from fedcommons.storage.object_store import ChangedError, StorageError
from fedcommons.storage.paths import CHECKPOINT_FILE, MEMORY_FILE
from fedcommons.storage.snapshots import Snapshots
from fedcommons.tracking.run_folder import FILES, STOPPED, is_run, read_config, require_plain, stranger

SEEN = ".storage.json"
BEGINS = {"config.yaml", "environment.json"}
"""Files that every run folder has; see ``is_run``."""


def name_of(*folders: Path) -> str:
    """Return the storage's name for nested folders, listed from the outermost to the innermost."""
    return "/".join(quote(folder.resolve().name, safe="") or "root" for folder in folders)


def require_apart(storage: str, folder: Path) -> None:
    """Check that the storage is neither ``folder``, whose files it stores, nor a folder inside ``folder``.

    Raises:
        UserError: the storage lies there.
    """
    if not object_store.is_url(storage) and Path(storage).resolve().is_relative_to(folder.resolve()):
        raise UserError(f"storage must be outside of --out, {folder}, got {quote_value(storage)}.")


class RunMirror:
    """The run in ``folder``, and its snapshots ``runs/NAME`` in the storage.

    late: why the storage lacks the newest snapshot; empty if the storage has it. ``say`` is called with this reason.
    has_lost: whether another process has written to the storage since.

    Raises:
        UserError: the storage cannot be reached or written, or lies in the folder.
    """

    def __init__(self, storage: str, name: str, folder: Path, say: Callable[[str], None] = print) -> None:
        inner = rf"checkpoints/{CHECKPOINT_FILE}(\.json)?|memory/{MEMORY_FILE}(\.json)?"
        self.folder, self.say, self.upload_error, self.has_lost = folder, say, "", False
        self._not_before = 0.0
        require_apart(storage, folder)
        try:
            opened = object_store.open_store(storage)
            self.storage = opened.name
            self.snapshots = Snapshots(opened, f"runs/{name}", rf"{FILES}|messages\.log|{re.escape(STOPPED)}|{inner}")
            self.snapshots.look()
        except StorageError as error:
            raise UserError(f"storage: {error}.") from None

    def fetch(self, resume: bool = True, patience: float = 0) -> None:
        """Replace the folder by the storage's snapshot, unless there is no snapshot or the folder has more rounds.

        patience: see ``file_lock.locked``.

        Raises:
            ClientError: another process writes to the storage.
            UserError: the storage has a run already and ``resume`` is false, the local folder has another run,
                another process has locked the folder, or a file of ``BEGINS`` is damaged in the storage.
            OSError: the local disk is full.
        """
        if self.snapshots.tag == object_store.NEW:
            return
        place = f"{self.snapshots.storage.name}/{self.snapshots.name}"
        if not resume:
            raise UserError(f"{place} holds a run already; add --resume to continue it or choose another --out.")
        if is_run(self.folder) and self._seen() == self.snapshots.tag:
            return
        with file_lock.open_lock(self.folder, self._stranger, "run folder", self.say, patience):
            require_plain(self.folder)
            if is_run(self.folder) and self._seen() is None and not self.snapshots.is_same(self.folder):
                raise UserError(
                    f"{place} holds a run that {self.folder} does not go back to; choose another --out or --storage."
                )
            try:
                if is_run(self.folder) and self._is_other():
                    raise UserError(f"{place} holds another run than {self.folder}; choose another --out or --storage.")
                if self._is_further():
                    self.say(f"{self.folder} has more rounds than {place}, and goes on.")
                    return
                self._see("")  # a process killed from here on downloads the snapshot again
                flaws = self.snapshots.fetch(self.folder)
            except StorageError as error:
                raise UserError(f"storage: {error}.") from None
            if not self.snapshots.whole >= BEGINS:
                reason = "; ".join(flaws) or "it has no config.yaml and environment.json"
                raise UserError(f"{place} holds no run that can go on ({reason}); choose another --out or --storage.")
            for flaw in flaws:
                self.say(Warned(f"{flaw}; the run goes on from what is whole."))
            self.snapshots.remove_others(self.folder)
            self._see(self.snapshots.tag)
            if flaws:
                self.upload()  # the next snapshot no longer lists the damaged files
        self.say(f"{self.folder} was brought from {place}.")

    def _stranger(self, path: Path) -> str | None:
        return None if self._seen() == "" else stranger(path)

    def _is_other(self) -> bool:
        """Return whether the local run has another config, data set or secret salt than the snapshot.

        They differ if a run was removed from the storage and another run of the same name was uploaded.
        """
        if (self.folder / "partition.json").exists() and not self.snapshots.is_same(self.folder, "partition.json"):
            return True
        if self.snapshots.is_same(self.folder, "config.yaml"):
            return False
        ours = read_config(self.folder)
        with tempfile.TemporaryDirectory() as folder:
            write_bytes(Path(folder) / "config.yaml", self.snapshots.read("config.yaml") or b"")
            with suppress(UserError):
                return not {*dotted.same_results(ours, read_config(Path(folder)))} <= {"federation.rounds"}
        return True

    def _is_further(self) -> bool:
        """Return whether the local run has more rounds than the snapshot: the same lines and further lines."""
        stored, local_file = self.snapshots.entries.get("rounds.jsonl"), self.folder / "rounds.jsonl"
        return (
            is_run(self.folder) and local_file.is_file() and local_file.stat().st_size > (stored.size if stored else 0)
        )

    def upload(self) -> None:
        """Upload the folder. If the upload fails, report the failure once; later calls try again.

        Failed attempts take at most a tenth of the time, however slow the storage is.

        Raises:
            ClientError: another process has written to the storage since.
        """
        if (began := time.monotonic()) < self._not_before:
            return
        try:
            self.snapshots.upload(self.folder)
            self._see(self.snapshots.tag)
            self.upload_error = ""
        except ChangedError as error:
            self.has_lost = True
            raise ClientError(
                f"another process plays this run too: {error}; what it wrote stays there, and {self.folder} has ours."
            ) from None
        except StorageError as error:
            if not self.upload_error:
                self.say(Warned(f"storage: {error}; the run goes on, and {self.folder} has it all."))
            self.upload_error = f"{error}"
            self._not_before = time.monotonic() + 9 * (time.monotonic() - began)

    def end(self, lacking: str = "") -> None:
        """Upload the folder for the last time. lacking: why the storage lacks another part of the run, or empty.

        Raises:
            ClientError: the storage lacks a part of the run.
        """
        self._not_before = 0
        self.upload()
        if self.upload_error or lacking:
            raise ClientError(
                f"the run has ended and {self.folder} has all of it, but the storage has not: "
                f"{self.upload_error or lacking}; the same command with --resume sends it."
            )

    def _seen(self) -> str | None:
        """Return the tag of the snapshot from which the folder comes; None if unknown or from another storage."""
        try:
            record = safe_read.json_of(self.folder / SEEN)
            return str(record["tag"]) if record["storage"] == self.storage else None
        except (ValueError, KeyError, TypeError):
            return None

    def _see(self, tag: str) -> None:
        write_json(self.folder / SEEN, {"storage": self.storage, "tag": tag})
