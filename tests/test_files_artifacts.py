"""Files that are never half-written, and the store of artifacts built on them."""

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcommons.artifacts import Store, constants, key_of
from fedcommons.errors import UserError
from fedcommons.files import read_tensors, sha256, write_bytes, write_json, write_tensors, write_text

TENSORS = {"images": torch.arange(24, dtype=torch.uint8).view(2, 3, 4), "labels": torch.tensor([1, 0])}

KEY = key_of({})


def assert_same(found: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> None:
    """The same names, types, shapes and numbers."""
    assert found is not None
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in wanted.items()}
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


def tensors(store: Store, key: str = KEY) -> dict[str, Tensor] | None:
    """Of the images of this key."""
    return None if (found := store.get("images", key)) is None else found.tensors


def sidecar(path: Path) -> Path:
    """The file with an artifact's facts and checksum."""
    return path.with_name(path.name + ".json")


def damage(path: Path, how: str) -> None:
    """What may happen to a pair of files."""
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "altered":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1  # one bit of the last number: still a well-formed file
        path.write_bytes(bytes(content))
    elif how == "no sidecar":
        sidecar(path).unlink()
    elif how == "no tensors":
        path.unlink()
    elif how == "sidecar truncated":
        sidecar(path).write_text(sidecar(path).read_text()[:20])
    elif how == "sidecar without checksum":
        sidecar(path).write_text("{}")
    elif how == "sidecar not a record":
        sidecar(path).write_text("[]")
    else:
        raise ValueError(how)


DAMAGES = [
    "truncated",
    "emptied",
    "altered",
    "no sidecar",
    "no tensors",
    "sidecar truncated",
    "sidecar without checksum",
    "sidecar not a record",
]


def test_written_content_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_midway_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fresh = tmp_path / "file", tmp_path / "fresh"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in (path, fresh):
        with pytest.raises(OSError, match="No space left"):
            write_text(name, "new, much longer than the old")
    assert path.read_text() == "old"
    assert not fresh.exists()


def test_content_reaches_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without the fsync a crash could leave the final name on an empty file
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b))[1])
    write_text(tmp_path / "file", "content")
    assert calls == ["fsync", "replace"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_json_has_no_word_for(value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"loss": value})
    assert list(tmp_path.iterdir()) == []


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"facts": {"seed": 3}})
    found = read_tensors(path)
    assert found is not None
    assert_same(found[0], TENSORS)
    assert found[1]["facts"] == {"seed": 3}


def test_tensors_that_are_not_contiguous_or_have_a_graph_are_written(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "g": torch.ones(2, requires_grad=True)}
    write_tensors(tmp_path / "x", tensors, {})
    found = read_tensors(tmp_path / "x")
    assert found is not None
    assert_same(found[0], {name: t.detach() for name, t in tensors.items()})


def test_nothing_written_reads_as_none(tmp_path: Path) -> None:
    assert read_tensors(tmp_path / "x.safetensors") is None


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_detected(how: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {})
    damage(path, how)
    with pytest.raises(ValueError, match=r"x\.safetensors (is incomplete|was truncated or altered)"):
        read_tensors(path)


def test_the_checksum_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a crash between the two must leave an incomplete pair, never a checksum that vouches for nothing
    written: list[str] = []
    monkeypatch.setattr("fedcommons.files.write_bytes", lambda path, content: written.append(path.name))
    write_tensors(tmp_path / "x", TENSORS, {})
    assert written == ["x", "x.json"]


def test_a_key_depends_on_every_fact_but_not_on_their_order() -> None:
    facts: dict[str, Any] = {"seed": 0, "fitting": {"lr": 0.1, "channels": (8, 16)}}
    same = {"fitting": {"channels": [8, 16], "lr": 0.1}, "seed": 0}
    assert key_of(facts) == key_of(same)
    assert key_of(facts) != key_of({**facts, "seed": 1})
    assert key_of(facts) != key_of({**facts, "fitting": {"lr": 0.1, "channels": (8, 32)}})
    assert key_of(facts) != key_of({**facts, "more": None})


def test_the_store_gives_back_what_was_put_also_to_a_later_process(tmp_path: Path) -> None:
    key = key_of({"seed": 0})
    Store(tmp_path / "a" / "b").put("images", TENSORS, {"seed": 0})
    later = Store(tmp_path / "a" / "b")
    assert_same(tensors(later, key), TENSORS)
    assert later.get("generators", key) is None
    assert later.get("images", key_of({"seed": 1})) is None
    found = later.get("images", key)
    assert found is not None
    assert (found.facts, found.findings) == ({"seed": 0}, {})


def test_what_was_found_out_comes_back_and_decides_no_key(tmp_path: Path) -> None:
    store, findings = Store(tmp_path), {"receipt": {"sigma": 1.5, "steps": 20}}
    store.put("images", TENSORS, {}, findings)
    found = Store(tmp_path).get("images", KEY)
    assert found is not None
    assert found.findings == findings


def test_findings_that_were_altered_are_damage(tmp_path: Path) -> None:
    said: list[str] = []
    store = Store(tmp_path, said.append)
    store.put("images", TENSORS, {}, {"sigma": 1.5})
    path = tmp_path / "images" / f"{KEY}.safetensors.json"
    path.write_text(path.read_text().replace("1.5", "9.5"))
    assert store.get("images", KEY) is None
    assert "truncated or altered" in said[0]


@pytest.mark.parametrize("line", ["sha256", "facts_sha256"])
def test_an_artifact_without_a_checksum_is_damaged_also_if_nothing_else_is(line: str, tmp_path: Path) -> None:
    """Who deletes the line may have changed the receipt: nobody can tell."""
    said: list[str] = []
    store = Store(tmp_path, said.append)
    store.put("images", TENSORS, {}, {"receipt": {"sigma": 1.1}})
    path = tmp_path / "images" / f"{KEY}.safetensors.json"
    facts = json.loads(path.read_text())
    del facts[line]
    path.write_text(json.dumps(facts))
    assert store.get("images", KEY) is None
    where = path.with_name(f"{KEY}.safetensors")
    assert said == [f"{where} is incomplete: its checksum {line!r} is missing; it will be built again."]
    store.put("images", TENSORS, {}, {"receipt": {"sigma": 1.1}})
    assert_same(tensors(store), TENSORS)


@pytest.mark.parametrize("parts", [("tensors",), ("facts",), ("findings",), ("facts", "findings")], ids="+".join)
def test_parts_of_two_artifacts_make_none(parts: tuple[str, ...], tmp_path: Path) -> None:
    """The images of a generator without noise under the receipt of one with it, however they are put together."""
    said: list[str] = []
    store = Store(tmp_path, said.append)
    keys = [key_of({"sigma": sigma}) for sigma in (0, 5)]
    for sigma in (0, 5):
        store.put("images", {"images": torch.full((3,), sigma)}, {"sigma": sigma}, {"receipt": {"sigma": sigma}})
    plain, private = (tmp_path / "images" / f"{key}.safetensors" for key in keys)
    if parts == ("tensors",):
        private.write_bytes(plain.read_bytes())
    else:
        here, there = json.loads(sidecar(plain).read_text()), json.loads(sidecar(private).read_text())
        sidecar(plain).write_text(json.dumps(here | {part: there[part] for part in parts}))
    assert [store.get("images", key) is None for key in keys] == [parts != ("tensors",), parts == ("tensors",)]
    assert len(said) == 1


@dataclass(frozen=True)
class _Part:
    needed: int
    lr: float = 0.1
    channels: tuple[int, ...] = (8, 16)
    others: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Later(_Part):
    added: str = "as before"


def test_a_key_has_the_constants_that_differ_from_their_defaults() -> None:
    assert constants(_Part(3)) == {"needed": 3}  # one without a default is always told
    assert constants(_Part(3, others={"a": 1}, channels=(8,))) == {"needed": 3, "channels": (8,), "others": {"a": 1}}
    assert constants(_Part(3, lr=0.2), less=("lr",)) == {"needed": 3}
    for lr in (0.1, 0.2):  # a field that came later renames nothing
        assert key_of(constants(_Later(3, lr))) == key_of(constants(_Part(3, lr)))
    assert key_of(constants(_Later(3, added="other"))) != key_of(constants(_Part(3)))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_artifact_is_said_counts_as_absent_and_can_be_put_again(how: str, tmp_path: Path) -> None:
    said: list[str] = []
    store = Store(tmp_path, said.append)
    store.put("images", TENSORS, {})
    assert store.get("images", KEY) is not None
    assert said == []
    path = tmp_path / "images" / f"{KEY}.safetensors"
    damage(path, how)
    assert store.get("images", KEY) is None
    assert len(said) == 1
    assert str(path) in said[0]
    assert said[0].endswith("it will be built again.")
    store.put("images", TENSORS, {})
    assert_same(tensors(store), TENSORS)


def test_an_artifact_that_was_never_there_is_no_damage(tmp_path: Path) -> None:
    said: list[str] = []
    assert Store(tmp_path, said.append).get("images", KEY) is None
    assert said == []


@pytest.mark.parametrize("fails_at", [1, 2], ids=["tensors", "sidecar"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_putting_is_atomic(fails_at: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    store = Store(tmp_path, said.append)
    old = {"images": torch.zeros(3)}
    if there:
        store.put("images", old, {})
    calls = 0
    fsync = os.fsync

    def fails(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="No space left"):
            store.put("images", TENSORS, {})
    found = tensors(store)  # never something in between
    if there and fails_at == 1:
        assert_same(found, old)
    else:
        assert found is None
    if not there and fails_at == 1:
        assert not any(not p.name.startswith(".") for p in (tmp_path / "images").iterdir())
    store.put("images", TENSORS, {})
    assert_same(tensors(store), TENSORS)


def test_a_folder_that_cannot_be_written_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    # not by permissions: tests may run as root, whom they do not stop
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "artifacts"
    with pytest.raises(UserError, match=r"cannot be written .*file is no folder of ours") as raised:
        Store(folder).require_writable()
    assert str(folder) in str(raised.value)
    with pytest.raises(UserError, match="cannot be written"):
        Store(tmp_path / "file").require_writable()


def test_two_exchanged_artifacts_are_found_out(tmp_path: Path) -> None:
    """Both are intact, and each stands where the other should."""
    said: list[str] = []
    store = Store(tmp_path, said.append)
    keys = [key_of({"client": client}) for client in (0, 1)]
    for client in (0, 1):
        store.put("images", {"images": torch.full((3,), client)}, {"client": client})
    paths = [tmp_path / "images" / f"{key}.safetensors" for key in keys]
    for a, b in (paths, [sidecar(path) for path in paths]):
        a.rename(tmp_path / "aside")
        b.rename(a)
        (tmp_path / "aside").rename(b)
    assert [store.get("images", key) for key in keys] == [None, None]
    assert said == [
        f"{path} is another artifact: its facts are not those it is named after; it will be built again."
        for path in paths
    ]
    store.put("images", {"images": torch.full((3,), 1)}, {"client": 1})
    assert_same(tensors(store, keys[1]), {"images": torch.full((3,), 1)})


@pytest.mark.parametrize("facts", [None, [], "text", 7])
def test_an_artifact_whose_facts_are_malformed_is_none(facts: Any, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "images").mkdir()
    write_tensors(tmp_path / "images" / f"{KEY}.safetensors", TENSORS, {"facts": facts})
    assert Store(tmp_path, said.append).get("images", KEY) is None
    assert len(said) == 1


def test_what_has_the_right_checksum_but_is_no_safetensors_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not tensors")
    write_json(sidecar(path), {"sha256": sha256(b"not tensors"), "facts_sha256": sha256(b"{}")})
    with pytest.raises(ValueError, match="truncated or altered"):
        read_tensors(path)


def test_two_processes_may_put_the_same_artifact_at_once(tmp_path: Path) -> None:
    """Each also reads, all the time, what both write: it is never damaged."""

    def writes() -> None:
        said: list[str] = []
        store = Store(tmp_path, said.append)
        for number in range(40):
            store.put("images", {"images": torch.arange(50_000) + number % 3}, {"number": number % 3})
            assert_same(tensors(store, key_of({"number": 0})), {"images": torch.arange(50_000)})
        assert said == []

    processes = [_fork(writes) for _ in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [0, 0]
    assert len(list((tmp_path / "images").iterdir())) == 6  # and nothing half-written


def _fork(action: Callable[[], None]) -> int:
    """Do it in a process of its own, and nothing else."""
    if process := os.fork():
        return process
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def test_a_store_that_lacks_nothing_may_be_read_only(as_nobody: Callable[[Callable[[], None]], None]) -> None:
    with TemporaryDirectory() as folder:
        Store(Path(folder)).put("images", TENSORS, {})
        for path in (Path(folder), Path(folder) / "images"):
            path.chmod(0o555)

        def reads() -> None:
            assert_same(tensors(Store(Path(folder))), TENSORS)
            with pytest.raises(UserError, match="cannot be written"):
                Store(Path(folder)).require_writable()

        as_nobody(reads)
        for path in (Path(folder), Path(folder) / "images"):
            path.chmod(0o755)
