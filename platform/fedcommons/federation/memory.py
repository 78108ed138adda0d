"""What clients keep from round to round: in RAM up to a bound, beyond it in files.

A memory begins with a client's first reply that has one. The memory least recently changed goes to a file first. A file
is written once, for one client at one round, and never changed, so a checkpoint need only name it.

The bound is on what rests between rounds. In a round its participants' memories are in RAM besides, as they were before
it and as they are after it, and a checkpoint copies those that rest there.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from fedcommons.errors import ClientError
from fedcommons.federation.packing import pack, unpack
from fedcommons.files import read_tensors, write_tensors
from fedcommons.tensors import Payload, nbytes

FILE = r"client-\d{7,}-round-\d{6,}\.safetensors"
"""The name of a file of ours; its facts have .json behind it."""


class ClientMemory(Mapping[int, Payload]):
    """Client to memory; ``updated`` makes the next round's and leaves this one as it is.

    ``entries``: payloads, or names of files in ``folder``. Without a folder all of it stays in RAM.
    """

    def __init__(
        self,
        entries: Mapping[int, Payload | str] | None = None,
        cap_bytes: float = float("inf"),
        folder: Path | None = None,
    ) -> None:
        self.entries: dict[int, Payload | str] = dict(entries or {})
        self.cap_bytes, self.folder = cap_bytes, folder

    def __getitem__(self, client: int) -> Payload:
        entry = self.entries[client]
        return self._read(client, entry) if isinstance(entry, str) else entry

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def in_ram(self) -> dict[int, Payload]:
        """The memories that are in RAM."""
        return {i: e for i, e in self.entries.items() if not isinstance(e, str)}

    @property
    def in_files(self) -> dict[int, str]:
        """The files of the others."""
        return {i: e for i, e in self.entries.items() if isinstance(e, str)}

    def updated(self, round: int, new: Mapping[int, Payload]) -> "ClientMemory":
        """The memories after ``round``, in which these changed; what is too much for RAM is written to files."""
        entries = {i: e for i, e in self.entries.items() if i not in new} | dict(new)  # the latest stand last
        after = ClientMemory(entries, self.cap_bytes, self.folder)
        if self.folder is not None:
            after._spill(self.folder, round)
        return after

    def restored(self, entries: Mapping[int, Payload | str]) -> Self:
        """A memory with this one's bound and folder.

        Raises:
            ClientError: a file that is named is damaged or not there.
        """
        restored = type(self)(entries, self.cap_bytes, self.folder)
        for client in restored.in_files:
            restored[client]
        return restored

    def _spill(self, folder: Path, round: int) -> None:
        sizes = {i: nbytes(payload) for i, payload in self.in_ram.items()}
        held = sum(sizes.values())
        if held <= self.cap_bytes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for client, size in sizes.items():
            if held <= self.cap_bytes:
                return
            name = f"client-{client:07d}-round-{round:06d}.safetensors"
            write_tensors(folder / name, *pack({"memory": self[client]}))
            self.entries[client] = name
            held -= size

    def _read(self, client: int, name: str) -> Payload:
        assert self.folder is not None
        try:
            found = read_tensors(self.folder / name)
            payloads = unpack(*found) if found else None
        except ValueError as error:
            raise ClientError(f"the memory of client {client} cannot be read: {error}") from error
        if not payloads or "memory" not in payloads:
            raise ClientError(f"the memory of client {client} is gone: {self.folder / name}")
        return payloads["memory"]


def remove_files(folder: Path, needed: set[str]) -> None:
    """Remove the files of memories that nothing names any more."""
    for path in folder.glob("client-*.safetensors"):
        if path.name not in needed and re.fullmatch(FILE, path.name):
            path.with_name(path.name + ".json").unlink(missing_ok=True)  # first: what is left is found next time
            path.unlink()
