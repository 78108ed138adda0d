"""A sweep's copy in a remote storage: download runs of other machines, and upload runs, tables and figures."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedcommons.errors import ClientError, UserError
from fedcommons.storage import object_store
from fedcommons.storage.object_store import StorageError
from fedcommons.storage.snapshots import MANIFEST, Snapshots
from fedcommons.tracking.remote_run import RunMirror, is_stored, name_of, open_snapshots
from fedcommons.tracking.run_folder import read_summary

REPORT = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(md|csv|json|png|svg|pdf|tex|html)"
"""Regular expression of the names of the result files in a sweep's folder that are uploaded."""


class SweepMirror:
    """The connection between the sweep in the folder ``out`` and its storage; without a storage, it does nothing.

    cells: the trials. Tables and figures go to the storage of the first trial.
    """

    def __init__(self, cells: Iterable[Any], out: Path, say: Callable[[str], None] = print) -> None:
        self.storages = {cell.name: cell.storage for cell in cells}
        self.out, self.say = out, say
        self._snapshots: Snapshots | None = None

    def begin(self, resume: bool) -> None:
        """Connect to the storage; with ``resume``, download the sweep's runs and upload finished local runs.

        Raises:
            ClientError: another process writes a run to the storage, or the storage does not accept a run.
            UserError: the storage cannot be reached or written, lies in ``out``, or holds this sweep already and
                ``resume`` is False.
        """
        places = {*self.storages.values()}
        for place in places:
            object_store.require(*place)
        storage, chosen = next(iter(self.storages.values()), (None, None))
        if storage is None:
            return
        name = name_of(self.out, chosen=chosen)
        self._snapshots = open_snapshots(storage, name, self.out, REPORT)
        if self._snapshots.tag != object_store.NEW and not resume:
            raise UserError(
                f"{storage} holds a sweep {name} already; add --resume to continue it, or name another --out or "
                "--storage_name."
            )
        for place in places if resume else ():
            self._synchronise(*place)

    def _synchronise(self, storage: str | None, chosen: str | None) -> None:
        """Download and upload the runs that differ between ``out`` and a storage, by one listing of the storage."""
        if storage is None:
            return
        try:
            opened = object_store.open_store(storage)
            tags = opened.tags(f"runs/{name_of(self.out, chosen=chosen)}", MANIFEST)
        except StorageError as error:
            raise UserError(f"storage: {error}.") from None
        for name in (name for name, place in self.storages.items() if place == (storage, chosen)):
            folder = self.out / name
            tag, is_finished = tags.get(name_of(folder), object_store.NEW), read_summary(folder) is not None
            is_known = is_stored(folder, opened.name, tag) if tag else not is_finished
            if not is_known and (mirror := self._mirror(name)):
                mirror.fetch()
                if read_summary(folder) is not None:
                    mirror.end()

    def fetch(self, name: str) -> None:
        """Download the run of trial ``name`` from the storage, unless the run in ``out`` is finished.

        Raises:
            UserError: the storage cannot be reached, or ``RunMirror.fetch`` raises this error.
        """
        if read_summary(self.out / name) is None and (mirror := self._mirror(name)):
            mirror.fetch()

    def upload(self, name: str) -> None:
        """Upload the run of trial ``name`` to the storage.

        Raises:
            UserError: the storage cannot be reached.
            ClientError: the storage does not accept the run.
        """
        if mirror := self._mirror(name):
            mirror.end()

    def claim(self) -> None:
        """Reserve the sweep's name: if the storage has no sweep of this name, upload tables and figures in ``out``."""
        if self._snapshots and self._snapshots.tag == object_store.NEW:
            self.end()

    def end(self) -> None:
        """Upload the sweep's tables and figures to the storage.

        Raises:
            ClientError: the upload failed, or another process has uploaded different files since. The files in ``out``
                remain.
        """
        try:
            if self._snapshots:
                self._snapshots.upload(self.out)
        except StorageError as error:
            raise ClientError(
                f"the storage does not take the tables of {self.out}: {error}; the folder has all tables, and the same "
                "command with --resume uploads them."
            ) from None

    def _mirror(self, name: str) -> RunMirror | None:
        (storage, chosen), folder = self.storages[name], self.out / name
        return RunMirror(storage, name_of(self.out, folder, chosen=chosen), folder, self.say) if storage else None
