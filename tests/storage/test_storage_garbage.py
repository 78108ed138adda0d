"""Objects that killed writers left in a storage are listed and removed after a day, and nothing else is."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from interrupted import Watched, ignore
from torch import arange

from fedcommons.storage import garbage, object_store
from fedcommons.storage.artifact_store import Store, key_of
from fedcommons.storage.object_store import StorageError
from fedcommons.storage.snapshots import Snapshots

KEY = key_of({"seed": 3})
DEAD = "f" * 64 + "-01234567"
"""An object that no list names."""

HOUR = 3600.0
Command = Callable[..., Any]


def snapshots(place: str) -> Snapshots:
    return Snapshots(object_store.open_store(place), "runs/a", "[a-z]+")


def readable(place: str, folder: Path) -> bool:
    """Whether a reader of the storage gets all files."""
    reader = snapshots(place)
    return set(reader.look()) == {"x"} and reader.fetch(folder) == []


def aged(place: Path, hours: float) -> None:
    """Make all files of a folder so many hours old."""
    for path in place.rglob("*"):
        os.utime(path, (then := time.time() - HOUR * hours, then), follow_symlinks=False)


def collected(*words: str, command: Command, cwd: Path) -> list[str]:
    done = command("gc", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [line.split("  ")[0] for line in done.stdout.splitlines()[:-1]]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x").write_text("1")
    return tmp_path / "here"


@pytest.mark.long
def test_garbage_of_a_day_is_listed_and_removed_and_nothing_else(here: Path, tmp_path: Path, command: Command) -> None:
    place = tmp_path / "storage"
    snapshots(str(place)).upload(here)
    Store(tmp_path / "made", storage=str(place)).put("images", {"images": arange(6.0)}, {"seed": 3})
    leftovers = [f"runs/a/objects/{DEAD}", f"runs/gone/objects/{DEAD}", "runs/a/.MANIFEST.json.77.tmp",
            f"artifacts/images/{KEY}/objects/.{DEAD}.77.tmp"]  # fmt: skip
    for name in (*leftovers, "runs/a/mine.txt", "runs/a/.notes.txt.77.tmp", f"mine/objects/{DEAD}"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("left", encoding="utf-8")
    (place / "runs" / "a" / "objects" / DEAD.replace("f", "e")).symlink_to(here / "x")
    before = {path for path in place.rglob("*") if not path.is_dir()}
    words = [str(place), "--remove"]
    aged(place, 23.9)
    assert collected(*words, command=command, cwd=tmp_path) == []  # objects of a live writer may be so new
    aged(place, 24.1)
    assert collected(str(place), command=command, cwd=tmp_path) == sorted(leftovers)
    assert {path for path in place.rglob("*") if not path.is_dir()} == before
    assert collected(*words, command=command, cwd=tmp_path) == [f"removed {name}" for name in sorted(leftovers)]
    assert {path for path in place.rglob("*") if not path.is_dir()} == before - {place / name for name in leftovers}
    assert Store(tmp_path / "new", storage=str(place)).get("images", KEY)
    assert readable(str(place), tmp_path / "b")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + self.ahead)


def test_objects_that_no_list_names_are_listed(bucket: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = object_store.open_store(bucket())
    storage.write(dead := f"runs/a/objects/{DEAD}", b"left")
    clock = Clock(monkeypatch)
    for hours, expected in ((23.9, []), (24.1, [dead])):
        clock.ahead = HOUR * hours
        assert [entry.key for entry in garbage.find(storage)] == expected


@pytest.mark.parametrize(("hours", "is_sent"), [(5.9, True), (6.1, False)])
def test_a_process_that_was_stopped_for_hours_lists_nothing_that_may_be_removed(
    hours: float, is_sent: bool, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, place = Clock(monkeypatch), str(tmp_path / "storage")
    watched: Any = Watched(place)

    def stop(key: str) -> None:
        clock.ahead = HOUR * hours

    watched.before = stop
    writer = Snapshots(watched, "runs/a", "[a-z]+")
    with nullcontext() if is_sent else pytest.raises(StorageError, match="6 hours"):
        writer.upload(here)
    assert bool(snapshots(place).look()) == is_sent
    if not is_sent:  # the next try sends the object again, which was removed as garbage meanwhile
        watched.before = ignore
        next(Path(place, "runs", "a", "objects").iterdir()).unlink()
        writer.upload(here)
    assert readable(place, tmp_path / "b")
