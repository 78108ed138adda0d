"""Snapshots and artifacts in a storage, a bucket of an S3 server or a folder: nothing is lost, nothing wrong served."""

import json
import os
import shutil
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest
from interrupted import Watched, ignore, refuse_lists
from torch import Tensor, arange, equal

from fedcommons import Experiment, UserError
from fedcommons.config.dotted import choose, deciding, override, to_dict
from fedcommons.runs import build
from fedcommons.storage import object_store
from fedcommons.storage.artifact_store import Store, key_of
from fedcommons.storage.object_store import ChangedError, StorageError
from fedcommons.storage.snapshots import MANIFEST, Snapshots

FACTS = {"seed": 3}
KEY = key_of(FACTS)
TENSORS: dict[str, Tensor] = {"images": arange(6.0)}


def keys(place: str) -> list[str]:
    """Return the objects of a storage, without its own file and locks."""
    if "://" in place:
        names = [n.removeprefix(place.removeprefix("s3://") + "/") for n in fsspec.filesystem("s3").find(place)]
    else:
        names = [path.relative_to(place).as_posix() for path in Path(place).rglob("*") if path.is_file()]
    return sorted(name for name in names if name != "fedcommons.json" and not name.endswith(".writing"))


def snapshots(place: str, storage: Any = None) -> Snapshots:
    return Snapshots(storage or object_store.open_store(place), "runs/a", "[a-z]+|sub/[a-z]+")


def write(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def require_served(place: str | Snapshots, folder: Path, **files: str) -> None:
    """Check that a reader, by default one that sees the storage for the first time, fetches these files."""
    reader = snapshots(place) if isinstance(place, str) else place
    if isinstance(place, str):
        reader.look()
    shutil.rmtree(folder, ignore_errors=True)
    assert reader.fetch(folder) == []
    contents = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert contents == {name.replace("_", "/"): content for name, content in files.items()}


@pytest.mark.long
def test_a_folder_is_the_same_on_another_machine(place: str, tmp_path: Path) -> None:
    here = write(tmp_path / "a", x="1", empty="", sub_y="2", OTHER="not of a run", sub_sub_z="nor this")
    (here / "link").symlink_to("/etc/hostname")
    first, second = snapshots(place), snapshots(place)
    assert first.look() == {}
    first.upload(here)
    assert set(second.look()) == {"x", "empty", "sub/y"}
    require_served(second, tmp_path / "b", x="1", empty="", sub_y="2")
    tag, before = first.tag, keys(place)
    first.upload(here)
    assert (first.tag, keys(place)) == (tag, before)  # what is the same is not written again
    (here / "empty").unlink()
    first.upload(write(here, x="3"))
    assert len(keys(place)) == 3  # objects without a list are removed
    require_served(second, tmp_path / "c", x="3", sub_y="2")  # though the list that it had seen is an old one


def test_of_two_writers_the_second_is_refused_and_the_first_stays(place: str, tmp_path: Path) -> None:
    first, second, third = (snapshots(place) for _ in range(3))
    first.upload(write(tmp_path / "a", x="1"))
    third.upload(write(tmp_path / "equal", x="1"))
    assert third.tag == first.tag  # their contents are equal
    for again in range(2):
        with pytest.raises(ChangedError, match=r"runs/a/MANIFEST\.json was written"):
            second.upload(write(tmp_path / "b", x=f"2{again}"))
    require_served(place, tmp_path / "c", x="1")
    second.look()
    second.upload(tmp_path / "b")  # a writer that has seen it may replace it
    require_served(place, tmp_path / "c", x="21")


def test_a_list_of_ours_whose_answer_was_lost_is_no_second_writer(place: str, tmp_path: Path) -> None:
    """It is written, the answer is lost, and the folder has other files by the time of the next try."""
    watched = Watched(place)
    writer = snapshots(place, watched)
    writer.upload(write(tmp_path / "a", x="1", y="one"))
    watched.after = refuse_lists
    with pytest.raises(StorageError, match="no answer"):
        writer.upload(write(tmp_path / "a", x="2"))
    watched.after = ignore
    writer.upload(write(tmp_path / "a", x="3"))
    require_served(place, tmp_path / "b", x="3", y="one")
    assert len(keys(place)) == 3


def test_what_was_removed_there_is_sent_again(place: str, tmp_path: Path) -> None:
    writer = snapshots(place)
    writer.upload(write(tmp_path / "a", x="1", y="one"))
    for key in keys(place):
        writer.storage.remove(key)
    with pytest.raises(StorageError, match=r"MANIFEST\.json was removed") as refused:
        writer.upload(write(tmp_path / "a", x="2"))
    assert not isinstance(refused.value, ChangedError)
    writer.upload(tmp_path / "a")
    require_served(place, tmp_path / "b", x="2", y="one")


def test_a_half_written_snapshot_is_not_seen(place: str, tmp_path: Path) -> None:
    """All its objects are there, and its list is not."""
    watched = Watched(place)
    writer = snapshots(place, watched)
    writer.upload(write(tmp_path / "a", x="1", y="one"))
    watched.before = refuse_lists
    with pytest.raises(StorageError, match="no answer"):
        writer.upload(write(tmp_path / "a", x="2", y="two"))
    watched.before = ignore
    assert len(keys(place)) == 5
    require_served(place, tmp_path / "b", x="1", y="one")
    writer.upload(tmp_path / "a")
    assert len(keys(place)) == 3  # what was written before the cut was not written twice
    require_served(place, tmp_path / "b", x="2", y="two")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1], "longer": lambda content: content + b"!",
    "altered": lambda content: b"X" + content[1:],
}  # fmt: skip


def damage(place: str, key: str, how: str) -> None:
    storage = object_store.open_store(place)
    if how in DAMAGE:
        storage.write(key, DAMAGE[how](storage.read(key, 10**6) or b""))
    else:
        storage.remove(key)


def test_damaged_objects_are_reported_and_not_served(place: str, tmp_path: Path) -> None:
    whole = {name: f"{name} has a text" for name in (*DAMAGE, "removed", "intact")}
    writer = snapshots(place)
    writer.upload(write(tmp_path / "a", **whole))
    for how in (*DAMAGE, "removed"):
        damage(place, f"runs/a/objects/{writer.entries[how].object}", how)
    reader = snapshots(place)
    reader.look()
    messages = reader.fetch(tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["intact"]
    for how in (*DAMAGE, "removed"):
        (line,) = (line for line in messages if f": {how} " in line)
        assert ("is missing" if how == "removed" else "checksum") in line
    reader.upload(write(tmp_path / "b", **whole))  # a machine that has them still repairs them
    assert not {*snapshots(place).look().values()} & {writer.entries[how] for how in (*DAMAGE, "removed")}
    require_served(place, tmp_path / "c", **whole)


ENTRY = {"object": f"{'0' * 64}-{'0' * 8}", "bytes": 1}
HOSTILE: dict[str, object] = {
    "up": {"files": {"../x": ENTRY}}, "absolute": {"files": {"/tmp/x": ENTRY}}, "hidden": {"files": {".lock": ENTRY}},
    "newline": {"files": {"x\n": ENTRY}}, "other object": {"files": {"x": {**ENTRY, "object": "../../../secret"}}},
    "negative": {"files": {"x": {**ENTRY, "bytes": -1}}}, "huge": {"files": {"x": {**ENTRY, "bytes": 10**20}}},
    "half": {"files": {"x": {**ENTRY, "bytes": 0.5}}}, "long": {"files": {"x" * 201: ENTRY}},
    "no entry": {"files": {"x": 1}}, "a list": [], "nothing": None, "empty": b"", "no UTF-8": b"\xff\xfe", "cut": b"{",
    "deep": b"[" * 200_000,
}  # fmt: skip


def test_hostile_lists_are_refused(tmp_path: Path) -> None:
    place, key = str(tmp_path / "storage"), f"runs/a/{MANIFEST}"
    for how, content in HOSTILE.items():
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        object_store.open_store(place).write(key, sent)
        with pytest.raises(StorageError, match=r"runs/a/MANIFEST\.json is not the list of a snapshot"):
            pytest.fail(f"{how}: {snapshots(place).look()}")
    longest = {"files": {"x" * 200: {**ENTRY, "bytes": 0}}}
    object_store.open_store(place).write(key, json.dumps(longest).encode())
    assert len(snapshots(place).look()) == 1
    os.truncate(Path(place, key), 2**26 + 1)
    with pytest.raises(StorageError, match=r"has .* bytes"):
        snapshots(place).look()


def test_an_artifact_is_available_on_another_machine(place: str, tmp_path: Path) -> None:
    messages: list[str] = []
    a, b, c = (Store(tmp_path / name, messages.append, place) for name in "abc")
    assert b.get("images", KEY) is None
    Store(tmp_path / "a").put("images", TENSORS, FACTS, {"by": 1})  # before the folder had a storage
    assert a.get("images", KEY)
    assert Store(tmp_path / "b", storage=place).get("images", KEY) is None
    assert a.upload() == ""
    c.put("images", TENSORS, FACTS, {"by": 2})  # the first of two stays
    artifact = b.get("images", KEY)
    assert artifact is not None
    assert equal(artifact.tensors["images"], TENSORS["images"])
    assert (artifact.facts, artifact.findings) == (FACTS, {"by": 1})
    assert not messages
    assert {path.name for path in (tmp_path / "b").rglob("*")} == {path.name for path in (tmp_path / "a").rglob("*")}
    (tmp_path / "b" / "images" / f"{KEY}.safetensors").write_bytes(b"damaged")
    assert Store(tmp_path / "b", messages.append, place).get("images", KEY) is not None  # from the storage
    assert "truncated or altered" in messages.pop()


@pytest.mark.parametrize("how", ["altered", "removed"])
def test_a_damaged_artifact_is_reported_and_built_again(how: str, tmp_path: Path) -> None:
    place, messages = str(tmp_path / "storage"), list[str]()
    Store(tmp_path / "a", messages.append, place).put("images", TENSORS, FACTS)
    for key in keys(place):
        if not key.endswith(MANIFEST):
            damage(place, key, how)
    two = Store(tmp_path / "b", messages.append, place)
    assert two.get("images", KEY) is None
    assert ["built again" in line for line in messages] == [True, True]
    two.put("images", TENSORS, FACTS)
    assert Store(tmp_path / "c", pytest.fail, place).get("images", KEY)


class OldServer(BaseHTTPRequestHandler):
    """A server of HTTP/1.0, which accepts every write."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.end_headers()


def test_an_old_s3_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto would wait 60 s for its leave to send the content."""
    with HTTPServer(("127.0.0.1", 0), OldServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        credentials = {
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
            "DEFAULT_REGION": "us-east-1",
            "MAX_ATTEMPTS": "1",
        }
        for name, value in {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", **credentials}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(StorageError, match="ignores the conditions"):
            object_store.open_store("s3://old/x")
        server.shutdown()


BAD = {
    "s4://bucket/x": "storage must be .*'s4:'.*'s3://'", "s3:/bucket": "did you mean 's3://'",
    "s3://key:pass-word@bucket/x": "without user, password", "s3://bucket/x?secret=pass-word": "without .* options",
    "s3://": "s3://BUCKET/PREFIX, with", "s3://bucket/../other": "s3://BUCKET/PREFIX, with",
}  # fmt: skip


def test_a_wrong_url_is_refused_and_no_password_repeated() -> None:
    for url, words in BAD.items():
        with pytest.raises(UserError, match=words) as refused:
            build.build(override(Experiment(), {"storage": url}))
        assert "pass-word" not in str(refused.value)


def test_the_storage_decides_no_name() -> None:
    plain = choose({})
    assert deciding(override(plain, {"storage": "s3://bucket/lab"})) == deciding(plain)
    assert "storage" not in to_dict(plain)  # so old configs stay equal
