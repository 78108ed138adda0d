"""The artifact store: costly results, stored under the hash of the facts that decide them, and verified when read."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError, Warned, name_of
from fedcommons.storage import object_store
from fedcommons.storage.atomic_files import checksum_of, read_tensors, write_tensors
from fedcommons.storage.snapshots import Snapshots

if TYPE_CHECKING:
    from torch import Tensor


def key_of(facts: Mapping[str, Any] | None) -> str:
    """Return the key of a result that depends only on ``facts`` (plain values): 24 hexadecimal digits of their hash."""
    return checksum_of(facts)[:24]


def constants(part: Any, less: Collection[str] = ()) -> dict[str, Any]:
    """Return name -> value of a component's constants that differ from their defaults, without the names in ``less``.

    A key computed from these constants does not change when a constant with a default is added. It does not change
    either when a default changes. Therefore a developer who changes a default must also change another fact of the key.

    Raises:
        UserError: the component is not a dataclass.
    """
    if not is_dataclass(part):
        raise UserError(f"{name_of(part)} must be a dataclass, because its fields decide where its results are stored.")
    result = {}
    for field in fields(part):
        factory, value = field.default_factory, getattr(part, field.name)
        default = field.default if factory is MISSING else factory()
        if field.name not in less and (default is MISSING or value != default):
            result[field.name] = value
    return result


@dataclass(frozen=True)
class Artifact:
    """A costly result.

    tensors: the result. facts: plain values that the result depends on. findings: further plain values that
    the computation returned.
    """

    tensors: "dict[str, Tensor]"
    facts: Mapping[str, Any]
    findings: Mapping[str, Any]


class Store:
    """A folder of artifacts: ``KIND/KEY.safetensors``, and next to it a JSON file with facts, findings and checksum.

    If no artifact is missing, the folder may be read-only. Two processes may put the same artifact at the same time,
    because each process renames complete files with equal content.

    folder: the folder. say: called with one sentence if an artifact is damaged or the storage fails. storage: a bucket
    or folder with a second copy of the artifacts, for other machines; None: no copy. The store downloads an artifact
    that is missing or damaged in the folder, and uploads each new artifact. A failure of the storage is reported once
    and raises no error. After a failure, which may have taken long, only ``upload`` uses the storage again.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print, storage: str | None = None) -> None:
        self.folder, self.say, self.storage = folder, say, storage
        self._unsent = set[tuple[str, str]]()  # (kind, key) of artifacts that the storage may lack
        self._brought = dict[tuple[str, str], Snapshots]()  # artifacts read from or written to the storage
        self._flaw = ""

    def require_writable(self) -> None:
        """Check that artifacts can be written, before they are computed; nothing is written.

        Raises:
            UserError: the folder cannot be created or written.
        """
        folder = self.folder
        # ``os.path.exists`` returns False for a path that this user has no permission to look up.
        existing = next(p for p in (folder.resolve(), *folder.resolve().parents) if os.path.exists(p))
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise UserError(
                f"artifacts: {folder} cannot be written ({existing} is not a writable folder); name another folder."
            )

    def get(self, kind: str, key: str) -> Artifact | None:
        """Return the artifact of this kind and key, or None; ``say`` reports an artifact that is damaged."""
        if artifact := self._read(kind, key):
            if self.storage and (kind, key) not in self._brought:
                self._unsent.add((kind, key))
            return artifact
        is_brought = self.storage and not self._flaw and self._fetch(kind, key)
        return self._read(kind, key) if is_brought else None

    def _read(self, kind: str, key: str) -> Artifact | None:
        path = self._path(kind, key)
        try:
            content = read_tensors(path)
            if content is None:
                return None
            facts, findings = content[1].get("facts"), content[1].get("findings", {})
            if key_of(facts) != key:
                raise ValueError(f"{path} does not hold the artifact that its name stands for")
            if not isinstance(facts, dict) or not isinstance(findings, dict):
                raise ValueError(f"{path} is malformed: its facts or findings are not mappings")
        except ValueError as error:
            self.say(Warned(f"{error}; it will be built again."))
            return None
        return Artifact(content[0], facts, findings)

    def put(
        self,
        kind: str,
        tensors: "Mapping[str, Tensor]",
        facts: Mapping[str, Any],
        findings: Mapping[str, Any] | None = None,
    ) -> None:
        """Store an artifact under the key of its facts, and upload it to the storage. Arguments: see ``Artifact``."""
        path = self._path(kind, key_of(facts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, {"facts": dict(facts), "findings": dict(findings or {})})
        if self.storage:
            self._unsent.add((kind, key_of(facts)))
            if not self._flaw:
                self.upload()

    def upload(self) -> str:
        """Upload the artifacts that the storage lacks. Return the reason of a failure; empty after success."""
        for kind, key in sorted(self._unsent):
            try:
                snapshots = self._brought.get((kind, key)) or self._snapshots(kind, key)
                # If another process has already uploaded the same artifact, nothing is uploaded.
                if (kind, key) in self._brought or snapshots.tag == object_store.NEW:
                    snapshots.upload(self.folder / kind)
                self._brought[kind, key] = snapshots
            except object_store.ChangedError:
                pass  # another process has just uploaded the same artifact
            except object_store.StorageError as error:
                return self._describe(f"{error}")
            self._unsent.remove((kind, key))
        self._flaw = ""
        return ""

    def _fetch(self, kind: str, key: str) -> bool:
        """Download an artifact from the storage. Return whether the folder now contains it undamaged."""
        try:
            snapshots = self._snapshots(kind, key)
            if not snapshots.entries:
                return False
            flaws = snapshots.fetch(self.folder / kind)
        except object_store.StorageError as error:
            self._describe(f"{error}")
            return False
        self._brought[kind, key] = snapshots
        for flaw in flaws:
            self.say(Warned(f"{flaw}; it will be built again."))
        return not flaws

    def _snapshots(self, kind: str, key: str) -> Snapshots:
        """Return the snapshots of an artifact in the storage, after reading the list of the newest one."""
        storage = object_store.open_store(self.storage or "")
        snapshots = Snapshots(storage, f"artifacts/{kind}/{key}", rf"{key}\.safetensors(\.json)?")
        snapshots.look()
        return snapshots

    def _describe(self, flaw: str) -> str:
        if not self._flaw:
            self.say(Warned(f"storage: {flaw}; work continues with the artifacts of this machine."))
        self._flaw = flaw
        return flaw

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / f"{key}.safetensors"
