"""The copy of a run folder in a remote storage: downloaded before a run resumes, uploaded with each checkpoint.

A copy (snapshot) contains the files that ``run_folder`` lists, without W&B's folder, locks and temporary files. The
hidden file ``.storage.json`` names the snapshot that the local folder last equalled. A process reads the previous
snapshot before it writes the next. So any other snapshot in the storage is newer than the local folder, unless
the run was removed from the storage.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, cast
from urllib.parse import quote

from fedcommons.config import dotted
from fedcommons.errors import ClientError, UserError, Warned
from fedcommons.errors import quote as quote_value
from fedcommons.storage import file_lock, object_store, safe_read
from fedcommons.storage.atomic_files import sha256, write_bytes, write_json
from fedcommons.storage.object_store import ChangedError, StorageError
from fedcommons.storage.snapshots import Snapshots
from fedcommons.tracking.run_folder import FILES, INNER, STOPPED, is_run, read_config, require_plain, stranger

SEEN = ".storage.json"
COPY = ".upload"
"""Folder with the files of the upload that runs."""
BEGINS = {"config.yaml", "environment.json"}
"""Files that every run writes first; see ``run_folder.is_run``."""


def name_of(*folders: Path, chosen: str | None = None) -> str:
    """Return the name of a run in a storage, from the names of nested folders, the outermost folder first.

    chosen: the name to use for the outermost folder; None: its own.
    """
    names = [quote(folder.resolve().name, safe="") or "root" for folder in folders]
    return "/".join([chosen or names[0], *names[1:]])


def is_stored(folder: Path, storage: str, tag: str) -> bool:
    """Return whether a storage holds a run as the folder does, by the folder's own record, so without a request.

    True if the folder equalled the snapshot ``tag`` after the last transfer, and has the same summary.json since.
    storage: the storage's name. tag: tag of the run's present snapshot in the storage.
    """
    record, summary = _record(folder, storage), None
    with suppress(OSError):
        summary = sha256((folder / "summary.json").read_bytes())
    return is_run(folder) and (record.get("tag"), record.get("summary")) == (tag, summary)


def open_snapshots(storage: str, name: str, folder: Path, files: str) -> Snapshots:
    """Open a storage and read the list of the newest snapshot of ``folder``; files: see ``Snapshots.names``.

    Raises:
        UserError: the storage cannot be reached or written, or it lies in the folder whose files it stores.
    """
    if not object_store.is_url(storage) and Path(storage).resolve().is_relative_to(folder.resolve()):
        raise UserError(f"storage must be outside of --out, {folder}, got {quote_value(storage)}.")
    try:
        snapshots = Snapshots(object_store.open_store(storage), f"runs/{name}", files)
        snapshots.look()
        return snapshots
    except StorageError as error:
        raise UserError(f"storage: {error}.") from None


class RunMirror:
    """The connection between a run folder and its snapshots ``runs/NAME`` in a storage.

    storage: bucket or folder. name: NAME. folder: the local run folder. say: called with one sentence per message.
    upload_error: why the last upload failed; empty after success. has_lost: whether another process has written to the
    snapshots since this process last read or wrote them.

    Raises:
        UserError: the storage cannot be reached or written, or it lies in the run folder.
    """

    def __init__(self, storage: str, name: str, folder: Path, say: Callable[[str], None] = print) -> None:
        inner = "|".join(f"{folder}/{files}" for folder, files in INNER.items())
        self.folder, self.say, self.upload_error, self.has_lost = folder, say, "", False
        self._not_before, self._outcome = 0.0, cast("Future[None] | None", None)
        files = rf"{FILES}|messages\.log|{re.escape(STOPPED)}|{inner}"
        self.snapshots = open_snapshots(storage, name, folder, files)
        self.storage = self.snapshots.storage.name

    def fetch(self, resume: bool = True, patience: float = 0) -> None:
        """Download the newest snapshot, if there is one, unless the local run has more rounds than the snapshot.

        resume: whether the user wants to resume the run. patience: seconds to wait for the folder's lock.

        Raises:
            ClientError: another process writes to the snapshots.
            UserError: the local folder cannot continue the stored run, or the stored run is damaged.
        """
        if self.snapshots.tag == object_store.NEW:
            return
        place = f"{self.storage}/{self.snapshots.name}"
        if not resume:
            raise UserError(f"{place} holds a run already; add --resume to continue this run, or choose another --out.")
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
                    self.say(f"{self.folder} has more rounds than {place}, and the run continues from them.")
                    return
                self._see("")  # records an unfinished download, which the next process repeats
                flaws = self.snapshots.fetch(self.folder)
            except StorageError as error:
                raise UserError(f"storage: {error}.") from None
            if not self.snapshots.whole >= BEGINS:
                reason = "; ".join(flaws) or "it has no config.yaml and environment.json"
                raise UserError(f"{place} holds no run that can go on ({reason}); choose another --out or --storage.")
            for flaw in flaws:
                self.say(Warned(f"{flaw}; the run continues from the undamaged files."))
            self.snapshots.remove_others(self.folder)
            self._see(self.snapshots.tag)
            if flaws:
                self.upload()  # replaces the snapshot by one without the damaged files
        self.say(f"{self.folder} was downloaded from {place}.")

    def _stranger(self, path: Path) -> str | None:
        return None if self._seen() == "" else stranger(path)

    def _is_other(self) -> bool:
        """Return whether the snapshot is of another run, as its config, data or secret salt differ."""
        if (file := self.folder / "partition.json").exists() and not self.snapshots.is_same(self.folder, file.name):
            ours, stored = _identity(file.read_bytes()), _identity(self.snapshots.read(file.name) or b"")
            if ours is None or ours != stored:
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
        """Return whether the local run has more rounds than the snapshot, as its rounds.jsonl is larger."""
        stored, local_file = self.snapshots.entries.get("rounds.jsonl"), self.folder / "rounds.jsonl"
        size = local_file.stat().st_size if local_file.is_file() else 0
        return is_run(self.folder) and size > (stored.size if stored else 0)

    def upload(self) -> None:
        """Upload the folder and wait for the end. Errors: see ``wait``."""
        self.wait()
        if time.monotonic() >= self._not_before:
            outcome = Future[None]()
            self._send(self.folder, outcome)
            self._outcome = outcome
            self.wait()

    def begin_upload(self) -> None:
        """Wait for the end of the previous upload, then upload a copy of the folder's present files in a thread.

        After a failed upload, calls do nothing for nine times the duration of the failed upload, so the run waits
        little. The caller must hold the folder's lock. Errors of the previous upload: see ``wait``.
        """
        self.wait()
        if time.monotonic() < self._not_before:
            return
        copy, outcome = self.folder / COPY, Future[None]()
        try:
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            self.snapshots.copy(self.folder, copy)
            Thread(target=self._send, args=(copy, outcome), daemon=True).start()
        except (OSError, RuntimeError) as error:  # such as a full disk, or too many threads
            shutil.rmtree(copy, ignore_errors=True)
            outcome.set_exception(StorageError(f"{copy} cannot be written ({error})"))
        self._outcome = outcome

    def _send(self, folder: Path, outcome: "Future[None]") -> None:
        """Upload the files in ``folder``, the run folder or its copy, and store success or error in ``outcome``."""
        began, flaw = time.monotonic(), cast("Exception | None", None)
        try:
            self.snapshots.upload(folder)
            self._see(self.snapshots.tag)  # at once, as the run may be killed before it waits
        except Exception as error:
            self._not_before, flaw = time.monotonic() + 9 * (time.monotonic() - began), error
        if folder != self.folder:
            shutil.rmtree(folder, ignore_errors=True)
        outcome.set_exception(flaw) if flaw else outcome.set_result(None)

    def wait(self) -> None:
        """Wait for the end of an upload in progress. A warning reports the first of several failures in a row.

        Raises:
            ClientError: another process has written to the snapshots since this process last read or wrote them.
        """
        if self._outcome is None:
            return
        futures.wait([self._outcome])  # Ctrl-C here leaves the upload to a later call
        outcome, self._outcome = self._outcome, None
        try:
            outcome.result()
            self.upload_error = ""
        except ChangedError as error:
            self.has_lost = True
            raise ClientError(
                f"another process writes this run too: {error}; its files stay there, and {self.folder} has the "
                "files of this process."
            ) from None
        except (StorageError, OSError) as error:
            if not self.upload_error:
                self.say(Warned(f"storage: {error}; the run continues, and {self.folder} has all files."))
            self.upload_error = f"{error}"

    def end(self, lacking: str = "") -> None:
        """Upload the folder at the end of the run.

        lacking: why the storage lacks other files of the run, such as artifacts; empty if no file is lacking.

        Raises:
            ClientError: the storage lacks files of the run.
        """
        self.wait()
        self._not_before = 0.0
        self.upload()
        if self.upload_error or lacking:
            raise ClientError(
                f"the run has ended and {self.folder} has it all, but the storage has not: "
                f"{self.upload_error or lacking}; the same command with --resume uploads it."
            )

    def _seen(self) -> str | None:
        """Return the tag of the snapshot that the folder last equalled; None: unknown; "": a download has not ended."""
        return _record(self.folder, self.storage).get("tag")

    def _see(self, tag: str) -> None:
        summary = self.snapshots.entries.get("summary.json")
        write_json(self.folder / SEEN, {"storage": self.storage, "tag": tag, "summary": summary and summary.content})


def _record(folder: Path, storage: str) -> Mapping[str, Any]:
    """Return the content of ``SEEN``: ``tag`` of the last equal snapshot, and hash of its ``summary``."""
    with suppress(ValueError, KeyError, TypeError):
        if (record := safe_read.json_of(folder / SEEN))["storage"] == storage:
            return {"tag": str(record["tag"]), "summary": record.get("summary")}
    return {}


def _identity(text: bytes) -> dict[str, Any] | None:
    """Return the facts of a ``partition.json`` that every version of fedcommons writes alike; None if it is damaged."""
    with suppress(ValueError):
        if isinstance(facts := safe_read.parsed(text), dict):
            return {name: facts.get(name) for name in ("data", "fingerprint", "noise")}
    return None
