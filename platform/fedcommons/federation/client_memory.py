"""Client memory: tensors that a client stores from round to round, in RAM up to a limit of bytes and then in files.

A client has a memory after its first reply with a memory. The memory that has been unchanged for the longest time is
moved to a file first. A file is written once, for one client and round, and never changed, so a checkpoint only names
the file.

The limit applies between rounds. During a round, the participants' old and new memories are in RAM too. A checkpoint
copies the memories that are in RAM.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from fedcommons.errors import ClientError
from fedcommons.federation.serialization import pack, unpack
from fedcommons.flat_tensors import Payload, nbytes
from fedcommons.storage.atomic_files import read_tensors, write_tensors
from fedcommons.storage.paths import MEMORY_FILE


@dataclass(frozen=True, eq=False, repr=False)
class ClientMemory(Mapping[int, Payload]):
    """An immutable mapping from client to memory; ``updated`` returns the mapping for the next round.

    entries: client -> tensors by name, or name of a file in ``folder``. cap_bytes: limit of the memories in RAM.
    folder: folder of memory files; None: all memories stay in RAM. run: identifier of the run, which files and
    checkpoints contain. Files of another run are not read, unless ``run`` is empty.
    """

    entries: Mapping[int, Payload | str] = field(default_factory=dict)
    cap_bytes: float = inf
    folder: Path | None = None
    run: str = ""

    def __getitem__(self, client: int) -> Payload:
        entry = self.entries[client]
        return self._read(client, entry) if isinstance(entry, str) else entry

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def in_ram(self) -> dict[int, Payload]:
        """Return client -> memory for the memories that are in RAM."""
        return {i: e for i, e in self.entries.items() if not isinstance(e, str)}

    @property
    def in_files(self) -> dict[int, str]:
        """Return client -> file name for the memories that are in files."""
        return {i: e for i, e in self.entries.items() if isinstance(e, str)}

    def updated(self, round: int, new: Mapping[int, Payload]) -> "ClientMemory":
        """Return the memories, updated by ``new``; above the RAM limit, the oldest memories move to files."""
        # The order is from the oldest memory to the newest, because ``_within_cap`` moves the first memories to files.
        after = replace(self, entries={i: e for i, e in self.entries.items() if i not in new} | dict(new))
        return after if self.folder is None else replace(after, entries=after._within_cap(self.folder, round))

    def restored(self, entries: Mapping[int, Payload | str]) -> "ClientMemory":
        """Return a mapping of ``entries`` with the same limit, folder and run as ``self``.

        Raises:
            ClientError: a named file is damaged, missing or of another run.
        """
        restored = replace(self, entries=entries)
        for client in restored.in_files:
            restored[client]
        return restored

    def _within_cap(self, folder: Path, round: int) -> dict[int, Payload | str]:
        """Write the first memories to files until at most ``cap_bytes`` remain in RAM; return all entries."""
        entries, in_ram = dict(self.entries), self.in_ram
        bytes_in_ram = sum(map(nbytes, in_ram.values()))
        for client, payload in in_ram.items():
            if bytes_in_ram <= self.cap_bytes:
                break
            folder.mkdir(parents=True, exist_ok=True)
            entries[client] = name = f"client-{client:07d}-round-{round:06d}.safetensors"
            tensors, facts = pack({"memory": payload})
            write_tensors(folder / name, tensors, facts | ({"run": self.run, "name": name} if self.run else {}))
            bytes_in_ram -= nbytes(payload)
        return entries

    def _read(self, client: int, name: str) -> Payload:
        assert self.folder is not None
        try:
            stored = read_tensors(self.folder / name, inner=2)
            payloads = unpack(*stored) if stored else None
            if stored and not belongs(stored[1], self.run, name):
                raise ValueError(f"{self.folder / name} belongs to another run or another client")
        except ValueError as error:
            raise ClientError(f"the memory of client {client} cannot be read: {error}") from error
        if not payloads or "memory" not in payloads:
            raise ClientError(f"the file with the memory of client {client} is missing: {self.folder / name}")
        return payloads["memory"]


def belongs(facts: Mapping[str, Any], run: str, name: str) -> bool:
    """Return whether a memory file with the values ``facts`` has the name ``name`` and belongs to the run ``run``.

    Files of earlier versions, which state neither name nor run, are accepted. If ``run`` is empty, nothing is checked.
    """
    return not run or (facts.get("run", run) == run and facts.get("name", name) == name)


def remove_files(folder: Path, needed: set[str]) -> None:
    """Remove all memory files in ``folder`` whose names are not in ``needed``."""
    for path in folder.glob("client-*.safetensors"):
        if path.name not in needed and re.fullmatch(MEMORY_FILE, path.name):
            remove(path)


def remove(tensors: Path) -> None:
    """Remove a tensor file and the file of its facts."""
    # The tensor file is removed last, so that the next call finds it if this call is interrupted.
    tensors.with_name(tensors.name + ".json").unlink(missing_ok=True)
    tensors.unlink()
