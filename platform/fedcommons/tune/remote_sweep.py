"""A sweep's copy in a storage: fetch runs of other machines from the storage, and send runs, tables and figures."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedcommons.errors import ClientError, UserError
from fedcommons.storage import object_store
from fedcommons.storage.object_store import StorageError
from fedcommons.storage.snapshots import Snapshots
from fedcommons.tracking.remote_run import RunMirror, name_of, require_apart
from fedcommons.tracking.run_folder import read_summary

REPORT = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(md|csv|json|png|svg|pdf|tex|html)"
"""Names of the files in a sweep's folder that are sent to the storage, as a regular expression."""


class SweepMirror:
    """The connection between the sweep in ``out`` and the storage of its first trial; without a storage, a no-op.

    cells: the trials, each with a name and a config.
    """

    def __init__(self, cells: Iterable[Any], out: Path, say: Callable[[str], None] = print) -> None:
        self.storages = {cell.name: cell.config.storage for cell in cells}
        self.out, self.say = out, say
        self._snapshots: Snapshots | None = None

    def begin(self, resume: bool) -> None:
        """Connect to the storage; with ``resume``, fetch the sweep's runs and send finished runs that it lacks.

        Raises:
            ClientError: another process writes such a run, or the storage does not accept the run.
            UserError: the storage cannot be reached or written, lies in ``out``, or holds this sweep already and
                ``resume`` is False.
        """
        if (storage := next(iter(self.storages.values()), None)) is None:
            return
        if what := object_store.flaw(storage):
            raise UserError(f"storage must be {what}")
        require_apart(storage, self.out)
        try:
            self._snapshots = Snapshots(object_store.open_store(storage), f"runs/{name_of(self.out)}", REPORT)
            self._snapshots.look()
        except StorageError as error:
            raise UserError(f"storage: {error}.") from None
        if self._snapshots.tag != object_store.NEW and not resume:
            raise UserError(
                f"{storage} holds a sweep {self.out.name} already; add --resume to continue it or name another --out."
            )
        for name in self.storages if resume else ():
            if mirror := self._mirror(name):
                mirror.fetch()
                if read_summary(self.out / name) is not None:
                    mirror.end()

    def fetch(self, name: str) -> None:
        """Fetch the run of trial ``name`` from the storage, unless the run in ``out`` is finished.

        Raises:
            UserError: the storage cannot be reached, or as ``RunMirror.bring``.
        """
        if read_summary(self.out / name) is None and (mirror := self._mirror(name)):
            mirror.fetch()

    def upload(self, name: str) -> None:
        """Send the run of trial ``name`` to the storage.

        Raises:
            UserError: the storage cannot be reached.
            ClientError: the storage does not accept the run.
        """
        if mirror := self._mirror(name):
            mirror.end()

    def claim(self) -> None:
        """Reserve the sweep's name in the storage if the name is new. Raises: as ``end``."""
        if self._snapshots and self._snapshots.tag == object_store.NEW:
            self.end()

    def end(self) -> None:
        """Send the sweep's tables and figures to the storage.

        Raises:
            ClientError: the files cannot be sent, or another process has sent other files in the meantime. The files
                in ``out`` remain.
        """
        try:
            if self._snapshots:
                self._snapshots.upload(self.out)
        except StorageError as error:
            raise ClientError(
                f"the storage does not take the tables of {self.out}, which has them all: {error}; the same command "
                "with --resume sends them."
            ) from None

    def _mirror(self, name: str) -> RunMirror | None:
        storage, folder = self.storages[name], self.out / name
        return RunMirror(storage, name_of(self.out, folder), folder, self.say) if storage else None
