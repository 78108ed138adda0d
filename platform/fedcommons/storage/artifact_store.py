"""Costly results, stored under the hash of all they depend on: computed once and verified whenever they are read."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.errors import UserError, Warned, name_of
from fedcommons.storage import object_store
from fedcommons.storage.atomic_files import read_tensors, sha256, write_tensors
from fedcommons.storage.snapshots import Snapshots

if TYPE_CHECKING:
    from torch import Tensor


def key_of(facts: Mapping[str, Any] | None) -> str:
    """The hash of these facts, under which a result that depends only on them is stored."""
    return sha256(json.dumps(facts, sort_keys=True).encode())[:24]


def constants(part: Any, less: Collection[str] = ()) -> dict[str, Any]:
    """The constants of a part (a dataclass) that differ from their defaults, without those in ``less``.

    So a key made of them stays the same when a constant is added with a default. It also stays the same when a default
    changes: whoever changes one must change another fact of the key.

    Raises:
        UserError: the part is no dataclass.
    """
    if not is_dataclass(part):
        raise UserError(f"{name_of(part)} must be a dataclass: what it makes is stored under its fields.")
    found = {}
    for field in fields(part):
        factory, value = field.default_factory, getattr(part, field.name)
        default = field.default if factory is MISSING else factory()
        if field.name not in less and (default is MISSING or value != default):
            found[field.name] = value
    return found


@dataclass(frozen=True)
class Artifact:
    """A costly result: its tensors, the facts that it depends on, and findings: plain values from making it."""

    tensors: "dict[str, Tensor]"
    facts: Mapping[str, Any]
    findings: Mapping[str, Any]


class Store:
    """A folder of artifacts: ``KIND/KEY.safetensors``, and beside it the facts, findings and checksum as JSON.

    ``say`` is called with one sentence when an artifact is damaged. If nothing is missing, the folder may be read-only.

    Two processes may put the same artifact at the same time: each renames whole files, of equal content.

    storage: where the artifacts are kept besides, for other machines: one that is lacking or damaged here is brought
    from there, and what is put here is sent. What it cannot do is said once, and stops nobody: it is not asked again,
    as each answer may take its time, until ``send``.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print, storage: str | None = None) -> None:
        self.folder, self.say, self.storage = folder, say, storage
        self._unsent = set[tuple[str, str]]()  # of which nobody knows here that the storage has them
        self._brought = dict[tuple[str, str], Snapshots]()  # what is put in the place of one of these replaces it
        self._flaw = ""

    def require_writable(self) -> None:
        """Check that artifacts can be written, before the work of making them; nothing is written.

        Raises:
            UserError: the folder cannot be made or written.
        """
        folder = self.folder
        there = next(
            p for p in (folder.resolve(), *folder.resolve().parents) if os.path.exists(p)
        )  # False too where looking is forbidden
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise UserError(
                f"artifacts: {folder} cannot be written ({there} is no folder of ours); name another folder."
            )

    def get(self, kind: str, key: str) -> Artifact | None:
        """The artifact; None if it does not exist, or if it is damaged, which ``say`` is told."""
        if found := self._read(kind, key):
            if self.storage and (kind, key) not in self._brought:
                self._unsent.add((kind, key))
            return found
        is_brought = self.storage and not self._flaw and self._bring(kind, key)
        return self._read(kind, key) if is_brought else None

    def _read(self, kind: str, key: str) -> Artifact | None:
        path = self._path(kind, key)
        try:
            found = read_tensors(path)
            if found is None:
                return None
            facts, findings = found[1].get("facts"), found[1].get("findings", {})
            if key_of(facts) != key:
                raise ValueError(f"{path} is another artifact: its facts are not those it is named after")
            if not isinstance(facts, dict) or not isinstance(findings, dict):
                raise ValueError(f"{path} is malformed: its facts or findings have no names")
        except ValueError as error:
            self.say(Warned(f"{error}; it will be built again."))
            return None
        return Artifact(found[0], facts, findings)

    def put(
        self,
        kind: str,
        tensors: "Mapping[str, Tensor]",
        facts: Mapping[str, Any],
        findings: Mapping[str, Any] | None = None,
    ) -> None:
        """Store tensors under the facts they depend on; ``findings``: plain values to store with them."""
        path = self._path(kind, key_of(facts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors, {"facts": dict(facts), "findings": dict(findings or {})})
        if self.storage:
            self._unsent.add((kind, key_of(facts)))
            if not self._flaw:
                self.send()

    def send(self) -> str:
        """Send what is here and not in the storage; why it cannot be sent, empty where all is there."""
        for kind, key in sorted(self._unsent):
            try:
                there = self._brought.get((kind, key))
                if there is None:
                    there = self._there(kind, key)
                    there.look()
                if (
                    kind,
                    key,
                ) in self._brought or there.tag == object_store.NEW:  # else somebody has put it: of equal facts
                    there.send(self.folder / kind)
            except object_store.ChangedError:
                pass  # somebody has put it just now
            except object_store.StorageError as error:
                return self._told(f"{error}")
            else:
                self._brought[kind, key] = there
            self._unsent.remove((kind, key))
        self._flaw = ""
        return ""

    def _bring(self, kind: str, key: str) -> bool:
        """Bring the artifact from the storage; whether it is here now."""
        try:
            there = self._there(kind, key)
            if not there.look():
                return False
            flaws = there.bring(self.folder / kind)
        except object_store.StorageError as error:
            self._told(f"{error}")
            return False
        self._brought[kind, key] = there
        for flaw in flaws:
            self.say(Warned(f"{flaw}; it will be built again."))
        return not flaws

    def _there(self, kind: str, key: str) -> Snapshots:
        names = rf"{key}\.safetensors(\.json)?"
        return Snapshots(object_store.opened(self.storage or ""), f"artifacts/{kind}/{key}", names)

    def _told(self, flaw: str) -> str:
        if not self._flaw:
            self.say(Warned(f"storage: {flaw}; work goes on with what is here."))
        self._flaw = flaw
        return flaw

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / f"{key}.safetensors"
