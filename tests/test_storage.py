"""Snapshots and artifacts in a storage, a bucket of an S3 server or a folder: nothing is lost, nothing wrong served."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from torch import Tensor, arange, equal

from fedcommons.artifacts import Store, key_of
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import choose, deciding, override, to_dict
from fedcommons.errors import UserError
from fedcommons.files import garbage, remote
from fedcommons.files.remote import ChangedError, StorageError
from fedcommons.files.snapshots import MANIFEST, Snapshots
from fedcommons.runs import build
from fedcommons.tracking import wandb_tracker

FACTS = {"seed": 3}
KEY = key_of(FACTS)
TENSORS: dict[str, Tensor] = {"images": arange(6.0)}
Bucket = Callable[[], str]


def keys(place: str) -> list[str]:
    """The objects of a storage, its own file and locks left out."""
    if "://" in place:
        found = [n.removeprefix(place.removeprefix("s3://") + "/") for n in fsspec.filesystem("s3").find(place)]
    else:
        found = [path.relative_to(place).as_posix() for path in Path(place).rglob("*") if path.is_file()]
    return sorted(name for name in found if name != "fedcommons.json" and not name.endswith(".writing"))


def snapshots(place: str) -> Snapshots:
    return Snapshots(remote.opened(place), "runs/a", "[a-z]+|sub/[a-z]+")


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_the_same_on_another_machine(place: str, tmp_path: Path) -> None:
    here = write(tmp_path / "a", x="1", empty="", sub_y="2")
    write(here, OTHER="not of a run", sub_sub_z="nor this")
    (here / "link").symlink_to("/etc/hostname")
    one = snapshots(place)
    assert one.look() == {}
    one.send(here)
    two = snapshots(place)
    assert set(two.look()) == {"x", "empty", "sub/y"}
    assert two.bring(tmp_path / "b") == []
    assert contents(tmp_path / "b") == {"x": "1", "empty": "", "sub/y": "2"}
    tag, before = one.tag, keys(place)
    one.send(here)
    assert (one.tag, keys(place)) == (tag, before)  # what is the same is not written again
    (here / "empty").unlink()
    write(here, x="3")
    one.send(here)
    assert len(keys(place)) == 3  # what no list names is gone
    assert two.bring(tmp_path / "c") == []  # though the list that it had seen is an old one
    assert contents(tmp_path / "c") == {"x": "3", "sub/y": "2"}


def test_of_two_writers_the_second_is_told_and_the_first_stays(place: str, tmp_path: Path) -> None:
    first, second, third = snapshots(place), snapshots(place), snapshots(place)
    for one in (first, second, third):
        one.look()
    first.send(write(tmp_path / "a", x="1"))
    third.send(write(tmp_path / "equal", x="1"))
    assert third.tag == first.tag  # they say the same
    for again in range(2):
        with pytest.raises(ChangedError, match=r"runs/a/MANIFEST\.json was written by somebody else meanwhile"):
            second.send(write(tmp_path / "b", x=f"2{again}"))
    first.send(write(tmp_path / "a", x="3"))
    with pytest.raises(ChangedError):
        third.send(write(tmp_path / "b", x="4"))
    reader = snapshots(place)
    assert reader.look()
    assert reader.bring(tmp_path / "c") == []
    assert contents(tmp_path / "c") == {"x": "3"}
    second.look()
    second.send(tmp_path / "b")  # who has seen it may replace it
    reader.look()
    assert reader.bring(tmp_path / "c") == []
    assert contents(tmp_path / "c") == {"x": "4"}


@pytest.mark.long
def test_a_list_of_ours_whose_answer_was_lost_is_no_second_writer(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written, we are not told, and have other files by the time that we try again."""
    one, other = snapshots(place), snapshots(place)
    one.send(write(tmp_path / "a", x="1", y="one"))
    other.look()
    plain = one.storage.write

    def lost(key: str, content: bytes, tag: str | None = None) -> str:
        plain(key, content, tag)
        if key.endswith(MANIFEST):
            raise StorageError("no answer")
        return remote.NEW

    with monkeypatch.context() as patch:
        patch.setattr(one.storage, "write", lost)
        with pytest.raises(StorageError, match="no answer"):
            one.send(write(tmp_path / "a", x="2"))
    one.send(write(tmp_path / "a", x="3"))
    reader = snapshots(place)
    reader.look()
    assert reader.bring(tmp_path / "b") == []
    assert contents(tmp_path / "b") == {"x": "3", "y": "one"}
    assert len(keys(place)) == 3
    with pytest.raises(ChangedError):
        other.send(write(tmp_path / "c", x="4"))


def test_what_somebody_has_removed_is_sent_anew(place: str, tmp_path: Path) -> None:
    one = snapshots(place)
    one.send(write(tmp_path / "a", x="1", y="one"))
    for key in keys(place):
        one.storage.remove(key)
    with pytest.raises(StorageError, match=r"runs/a/MANIFEST\.json was removed meanwhile") as told:
        one.send(write(tmp_path / "a", x="2"))
    assert not isinstance(told.value, ChangedError)
    one.send(tmp_path / "a")
    reader = snapshots(place)
    reader.look()
    assert reader.bring(tmp_path / "b") == []
    assert contents(tmp_path / "b") == {"x": "2", "y": "one"}


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2])
def test_nobody_sees_a_snapshot_that_is_half_written(
    after: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after so many objects, before the list."""
    one = snapshots(place)
    one.send(write(tmp_path / "a", x="1", y="one"))
    before, write_object, done = keys(place), one.storage.write, []

    def cut(*given: Any) -> str:
        if len(done) == after:
            raise PowerCut
        done.append(given[0])
        return write_object(*given)

    with monkeypatch.context() as patch:
        patch.setattr(one.storage, "write", cut)
        with pytest.raises(PowerCut):
            one.send(write(tmp_path / "a", x="2", y="two"))
    assert len(keys(place)) == len(before) + after
    reader = snapshots(place)
    reader.look()
    assert reader.bring(tmp_path / "b") == []
    assert contents(tmp_path / "b") == {"x": "1", "y": "one"}
    one.send(tmp_path / "a")
    assert len(keys(place)) == 3  # and what was written before the cut was not written twice
    reader.look()
    reader.bring(tmp_path / "b")
    assert contents(tmp_path / "b") == {"x": "2", "y": "two"}


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"!",
    "altered": lambda content: b"X" + content[1:],
    "gone": lambda content: None,
}


def damage(place: str, key: str, how: str) -> None:
    """Change an object behind our back."""
    storage = remote.opened(place)
    content = DAMAGE[how](storage.read(key, 10**6) or b"")
    if content is None:
        storage.remove(key)
    else:
        storage.write(key, content)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_object_is_told_and_not_served(how: str, place: str, tmp_path: Path) -> None:
    one = snapshots(place)
    one.send(write(tmp_path / "a", x="a long text", y="another"))
    damage(place, f"runs/a/objects/{one.held['x'].object}", how)
    reader = snapshots(place)
    reader.look()
    (said,) = reader.bring(tmp_path / "b")
    assert said.endswith("x is missing" if how == "gone" else "its checksum is not the one it was written with")
    assert contents(tmp_path / "b") == {"y": "another"}
    reader.send(write(tmp_path / "b", x="a long text"))  # who has it still mends it
    assert snapshots(place).look()["x"].object != one.held["x"].object
    assert reader.bring(tmp_path / "c") == []


ENTRY = {"object": f"{'0' * 64}-{'0' * 8}", "bytes": 1}
HOSTILE = {
    "up": {"files": {"../x": ENTRY}},
    "absolute": {"files": {"/tmp/x": ENTRY}},
    "hidden": {"files": {".lock": ENTRY}},
    "newline": {"files": {"x\n": ENTRY}},
    "other object": {"files": {"x": {**ENTRY, "object": "../../../secret"}}},
    "negative": {"files": {"x": {**ENTRY, "bytes": -1}}},
    "huge": {"files": {"x": {**ENTRY, "bytes": 10**20}}},
    "half": {"files": {"x": {**ENTRY, "bytes": 0.5}}},
    "long": {"files": {"x" * 300: ENTRY}},
    "no entry": {"files": {"x": 1}},
    "a list": [],
    "nothing": None,
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.long
def test_a_hostile_list_is_refused(how: str, place: str, tmp_path: Path) -> None:
    remote.opened(place).write(f"runs/a/{MANIFEST}", json.dumps(HOSTILE[how]).encode())
    with pytest.raises(StorageError, match=r"runs/a/MANIFEST\.json is no list of ours"):
        snapshots(place).look()


def test_what_is_no_json_or_too_long_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"\xff\xfe", b"{", b"[" * 200_000):
        remote.opened(place).write(f"runs/a/{MANIFEST}", content)
        with pytest.raises(StorageError, match="is no list of ours"):
            snapshots(place).look()
    monkeypatch.setattr("fedcommons.files.stored.LARGEST_JSON", 1000)
    with pytest.raises(StorageError, match=r"has .* bytes, and no list of ours is so long"):
        snapshots(place).look()


@pytest.mark.long
def test_what_has_no_room_here_is_not_brought(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = snapshots(place)
    one.send(write(tmp_path / "a", x="12345", y="1"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5))
    with pytest.raises(OSError, match="No space left on device"):
        one.bring(tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert one.bring(tmp_path / "a") == []  # what is here already takes none


# --- artifacts


def test_an_artifact_is_found_on_another_machine(place: str, tmp_path: Path) -> None:
    said: list[str] = []
    one, two = (Store(tmp_path / name, said.append, place) for name in ("a", "b"))
    assert two.get("images", KEY) is None
    one.put("images", TENSORS, FACTS, {"n": 1})
    found = two.get("images", KEY)
    assert found is not None
    assert equal(found.tensors["images"], TENSORS["images"])
    assert (found.facts, found.findings) == (FACTS, {"n": 1})
    assert not said
    assert sorted(path.name for path in (tmp_path / "b").rglob("*")) == sorted(
        path.name for path in (tmp_path / "a").rglob("*")
    )
    (tmp_path / "b" / "images" / f"{KEY}.safetensors").write_bytes(b"damaged")
    assert Store(tmp_path / "b", said.append, place).get("images", KEY) is not None  # from the storage
    assert "truncated or altered" in said.pop()


def test_artifacts_from_before_there_was_a_storage_are_sent(place: str, tmp_path: Path) -> None:
    Store(tmp_path / "a").put("images", TENSORS, FACTS)
    store = Store(tmp_path / "a", storage=place)
    assert store.get("images", KEY)
    assert Store(tmp_path / "b", storage=place).get("images", KEY) is None
    assert store.send() == ""
    assert Store(tmp_path / "b", storage=place).get("images", KEY)


def test_two_machines_put_one_artifact_and_the_first_stays(place: str, tmp_path: Path) -> None:
    """Their facts are equal, so either will do."""
    one, two = (Store(tmp_path / name, pytest.fail, place) for name in ("a", "b"))
    one.put("images", TENSORS, FACTS, {"by": 1})
    two.put("images", TENSORS, FACTS, {"by": 2})
    found = Store(tmp_path / "c", pytest.fail, place).get("images", KEY)
    assert found is not None
    assert found.findings == {"by": 1}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_artifact_is_told_and_built_again(how: str, place: str, tmp_path: Path) -> None:
    said: list[str] = []
    Store(tmp_path / "a", said.append, place).put("images", TENSORS, FACTS)
    for key in keys(place):
        if not key.endswith(MANIFEST):
            damage(place, key, how)
    two = Store(tmp_path / "b", said.append, place)
    assert two.get("images", KEY) is None
    assert len(said) == 2
    assert all(line.endswith("; it will be built again.") for line in said)
    two.put("images", TENSORS, FACTS)
    three = Store(tmp_path / "c", pytest.fail, place)
    assert three.get("images", KEY)


def test_an_artifact_of_other_facts_under_its_name_is_not_served(place: str, tmp_path: Path) -> None:
    """Whole files of somebody's, under a key that is not theirs."""
    said: list[str] = []
    Store(tmp_path / "a").put("images", TENSORS, {"seed": 4})
    folder = tmp_path / "a" / "images"
    for path in list(folder.iterdir()):
        path.rename(folder / path.name.replace(key_of({"seed": 4}), KEY))
    liar = Snapshots(remote.opened(place), f"artifacts/images/{KEY}", r".*")
    liar.send(folder)
    assert Store(tmp_path / "b", said.append, place).get("images", KEY) is None
    assert "is another artifact" in said[0]


# --- what is asked for


BAD = {
    "s4://bucket/x": r"storage must be s3://BUCKET/PREFIX or a folder, got 's4:'; did you mean 's3://'\?",
    "S3://bucket/x": "did you mean 's3://'",
    "s3:/bucket": "did you mean 's3://'",
    "file:///tmp/x": "did you mean 's3://'",
    "s3://key:pass-word@bucket/x": "without user, password and options",
    "s3://bucket/x?secret=pass-word": "without user, password and options",
    "s3://": "s3://BUCKET/PREFIX, with",
    "s3://Bucket/x": "s3://BUCKET/PREFIX, with",
    "s3://bucket/../other": "s3://BUCKET/PREFIX, with",
    "s3://bucket//x": "s3://BUCKET/PREFIX, with",
}


@pytest.mark.parametrize("url", BAD)
def test_a_url_that_is_none_is_refused_and_no_password_repeated(url: str) -> None:
    with pytest.raises(UserError, match=BAD[url]) as refused:
        build.prepare(override(Experiment(), {"storage": url}))
    assert "pass-word" not in str(refused.value)


def test_the_storage_names_no_run_and_is_told_to_nobody() -> None:
    plain = choose({"tracking.wandb": "offline"})
    kept = override(plain, {"storage": "s3://secret-bucket/lab"})
    assert deciding(kept) == deciding(plain)
    assert "storage" not in to_dict(plain)  # so configs are what they were
    assert "secret-bucket" not in json.dumps(wandb_tracker._config(kept, 0.0))
    assert wandb_tracker._config(kept, 0.0) == wandb_tracker._config(plain, 0.0)


def aged(place: str, hours: float) -> None:
    """Make all files of a folder so many hours old."""
    for path in Path(place).rglob("*"):
        os.utime(path, (then := time.time() - 3600 * hours, then), follow_symlinks=False)


def collected(*words: str, command: Callable[..., Any], cwd: Path) -> list[str]:
    done = command("storage_gc", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return [line.split("  ")[0] for line in done.stdout.splitlines()[:-1]]


def test_what_killed_writers_left_is_listed_and_removed_and_nothing_else(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    place, here = str(tmp_path / "storage"), write(tmp_path / "here", x="1")
    remote.opened(place)
    snapshots(place).send(here)
    Store(tmp_path / "made", storage=place).put("images", TENSORS, FACTS)
    dead, run = "f" * 64 + "-01234567", Path(place, "runs", "a")
    left = [f"runs/a/objects/{dead}", f"runs/gone/objects/{dead}", "runs/a/.MANIFEST.json.77.tmp",
            f"artifacts/images/{KEY}/objects/.{dead}.77.tmp"]  # fmt: skip
    for name in (*left, "runs/a/mine.txt", "runs/a/.notes.txt.77.tmp", f"mine/objects/{dead}"):
        Path(place, name).parent.mkdir(parents=True, exist_ok=True)
        Path(place, name).write_text("left", encoding="utf-8")
    (run / "objects" / dead.replace("f", "e")).symlink_to(here / "x")
    before = keys(place)
    assert collected(place, "--remove", command=command, cwd=tmp_path) == []  # a live writer's may be so new
    aged(place, 23)
    assert collected(place, command=command, cwd=tmp_path) == []
    aged(place, 25)
    assert collected(place, command=command, cwd=tmp_path) == sorted(left)
    assert keys(place) == before
    assert collected(place, "--remove", command=command, cwd=tmp_path) == [f"removed {name}" for name in sorted(left)]
    assert keys(place) == sorted({*before} - {*left})
    assert Store(tmp_path / "new", storage=place).get("images", KEY)
    (two := snapshots(place)).look()
    assert two.bring(tmp_path / "b") == []


def test_temporary_files_in_a_folder_of_artifacts_are_listed(tmp_path: Path, command: Callable[..., Any]) -> None:
    Store(tmp_path / "made").put("images", TENSORS, FACTS)
    (tmp_path / "made" / "images" / f".{KEY}.safetensors.77.tmp").touch()
    aged(str(tmp_path / "made"), 25)
    assert collected("made", "--remove", command=command, cwd=tmp_path) == [f"removed images/.{KEY}.safetensors.77.tmp"]
    assert Store(tmp_path / "made").get("images", KEY)


def test_objects_of_a_bucket_that_no_list_names_are_listed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = remote.opened(bucket())
    storage.write(dead := "runs/a/objects/" + "f" * 64 + "-01234567", b"left")
    assert list(garbage.find(storage)) == []
    monkeypatch.setattr(garbage, "OLDEST_S", 0.0)
    assert [one.key for one in garbage.find(storage)] == [dead]


def test_what_was_sent_long_ago_and_never_named_is_sent_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage took the objects and not the list, was away for a day, and was cleaned meanwhile."""
    place, here, now = str(tmp_path / "storage"), write(tmp_path / "here", x="1"), [time.time()]
    monkeypatch.setattr("fedcommons.files.snapshots.time", SimpleNamespace(time=lambda: now[0]))
    one = snapshots(place)
    write_now = one.storage.write

    def refuse_lists(key: str, content: bytes, tag: str | None = None) -> str:
        if tag is not None:
            raise StorageError("away")
        return write_now(key, content, tag)

    monkeypatch.setattr(one.storage, "write", refuse_lists)
    with pytest.raises(StorageError, match="away"):
        one.send(here)
    monkeypatch.setattr(one.storage, "write", write_now)
    now[0] += 25 * 3600
    (left,) = Path(place, "runs", "a", "objects").iterdir()
    left.unlink()
    one.send(here)
    (two := snapshots(place)).look()
    assert two.bring(tmp_path / "b") == []


def test_a_process_that_was_stopped_for_a_day_names_nothing_that_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, here, now = str(tmp_path / "storage"), write(tmp_path / "here", x="1"), [time.time()]
    monkeypatch.setattr("fedcommons.files.snapshots.time", SimpleNamespace(time=lambda: now[0]))
    one = snapshots(place)
    write_now = one.storage.write

    def stop(key: str, content: bytes, tag: str | None = None) -> str:
        now[0] += 25 * 3600
        return write_now(key, content, tag)

    monkeypatch.setattr(one.storage, "write", stop)
    with pytest.raises(StorageError, match="6 hours"):
        one.send(here)
    assert snapshots(place).look() == {}
