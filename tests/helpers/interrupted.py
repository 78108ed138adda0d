"""Helpers for tests of resuming: a small run, an interruption after a round, compared outputs, a failing storage."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcommons.config import presets
from fedcommons.config.experiment import Experiment
from fedcommons.runs import experiment
from fedcommons.storage import object_store
from fedcommons.storage.object_store import StorageError
from fedcommons.storage.snapshots import MANIFEST

FIELDS = {
    "algorithm": "scaffold", "federation.rounds": 6, "federation.checkpoint_every": 2, "federation.memory_mb": 0.001,
    "partition.n_clients": 3, "model.channels": (2, 7), "client.epochs": 1, "data.limit": 40, "measure.every": 0,
    "tracking.wandb": "off",
}  # fmt: skip


def small(folder: Path, fields: Mapping[str, object] | None = None) -> Experiment:
    return presets.experiment("smoke", "digits", {**FIELDS, "artifacts": str(folder / "artifacts"), **(fields or {})})


class PowerCut(Exception):
    pass


def cut_at(last: int | None) -> Callable[[int, Mapping[str, float | None]], None]:
    """Return an ``on_round`` callback that raises ``PowerCut`` after round ``last`` (None: never)."""

    def cut(number: int, metrics: Mapping[str, float | None]) -> None:
        if number == last:
            raise PowerCut

    return cut


def outputs(folder: Path) -> dict[str, bytes]:
    """Return the files that must be equal after resuming, by name: metrics, summary, checkpoints, client memories."""
    paths = [folder / "rounds.jsonl", folder / "summary.json", *folder.glob("*/[!.]*-*[0-9].safetensors*")]
    return {path.name: path.read_bytes() for path in paths}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def require_resumed(config: Experiment, folder: Path, whole: Path, first: int | None) -> str:
    """Resume a run; check that it starts at round ``first`` (None: none) and ends like ``whole``; return messages."""
    seen: list[int] = []
    messages: list[str] = []
    experiment.run(config, folder, resume=True, say=messages.append, on_round=lambda number, _: seen.append(number))
    assert seen == ([] if first is None else [*range(first, config.federation.rounds + 1)])
    assert outputs(folder) == outputs(whole)
    return "\n".join(messages)


def ignore(key: str) -> None:
    pass


class Watched:
    """A storage that calls ``before(key)`` and ``after(key)`` around each write."""

    def __init__(self, place: str) -> None:
        self.plain = object_store.open_store(place)
        self.before: Callable[[str], None] = ignore
        self.after: Callable[[str], None] = ignore

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def write(self, key: str, *arguments: Any) -> str:
        self.before(key)
        tag = self.plain.write(key, *arguments)
        self.after(key)
        return tag


def refuse_lists(key: str) -> None:
    """Raise an error for the write of a snapshot's list of objects; use it as ``Watched.before``."""
    if key.endswith(MANIFEST):
        raise StorageError("no answer")
