"""A sweep in a storage: runs that other machines played are brought from there, tables and pictures are sent there."""

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
"""Files in a sweep's own folder that are sent."""


class SweepMirror:
    """The sweep in ``out`` and its storage, that of its first cell; without one nothing is done.

    cells: each has a name and a config.
    """

    def __init__(self, cells: Iterable[Any], out: Path, say: Callable[[str], None] = print) -> None:
        self.storages = {cell.name: cell.config.storage for cell in cells}
        self.out, self.say = out, say
        self._there: Snapshots | None = None

    def begin(self, resume: bool) -> None:
        """With ``resume`` bring what there is of the sweep's runs, and send those that ended here and are not there.

        Raises:
            ClientError: somebody else writes such a run, or the storage cannot take it.
            UserError: the storage cannot be reached or written, lies in ``out``, or has such a sweep and ``resume`` is
                not asked for.
        """
        if (storage := next(iter(self.storages.values()), None)) is None:
            return
        if what := object_store.flaw(storage):
            raise UserError(f"storage must be {what}")
        require_apart(storage, self.out)
        try:
            self._there = Snapshots(object_store.opened(storage), f"runs/{name_of(self.out)}", REPORT)
            self._there.look()
        except StorageError as error:
            raise UserError(f"storage: {error}.") from None
        if self._there.tag != object_store.NEW and not resume:
            raise UserError(
                f"{storage} holds a sweep {self.out.name} already; add --resume to continue it or name another --out."
            )
        for name in self.storages if resume else ():
            if mirror := self._mirror(name):
                mirror.bring()
                if read_summary(self.out / name) is not None:
                    mirror.end()

    def bring(self, name: str) -> None:
        """Bring the run of this cell as the storage has it, unless it has ended here.

        Raises:
            UserError: the storage cannot be asked, or see ``RunMirror.bring``.
        """
        if read_summary(self.out / name) is None and (mirror := self._mirror(name)):
            mirror.bring()

    def send(self, name: str) -> None:
        """Send the run of this cell as it is here.

        Raises:
            UserError: the storage cannot be asked.
            ClientError: it cannot take it.
        """
        if mirror := self._mirror(name):
            mirror.end()

    def claim(self) -> None:
        """Take the sweep's name in the storage, where it is new there. Errors: see ``end``."""
        if self._there and self._there.tag == object_store.NEW:
            self.end()

    def end(self) -> None:
        """Send the sweep's tables and pictures.

        Raises:
            ClientError: they cannot be sent, or another process has sent others since; they are here.
        """
        try:
            if self._there:
                self._there.send(self.out)
        except StorageError as error:
            raise ClientError(
                f"the storage does not take the tables of {self.out}, which has them all: {error}; the same command "
                "with --resume sends them."
            ) from None

    def _mirror(self, name: str) -> RunMirror | None:
        storage, folder = self.storages[name], self.out / name
        return RunMirror(storage, name_of(self.out, folder), folder, self.say) if storage else None
