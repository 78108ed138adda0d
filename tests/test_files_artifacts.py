"""Files that are never half-written, files that others may have made, and the store of artifacts built on them."""

import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from forked import forked
from torch import Tensor

from fedcommons.artifacts import Store, constants, key_of
from fedcommons.config import cli, presets
from fedcommons.config.flat import override
from fedcommons.errors import UserError
from fedcommons.files import read_tensors, sha256, stored, write_bytes, write_json, write_tensors, write_text
from fedcommons.locks import holder
from fedcommons.runs.replay import replay
from fedcommons.tracking.run_folder import RunFolder, read_config

TENSORS = {"images": torch.arange(24, dtype=torch.uint8).view(2, 3, 4), "labels": torch.tensor([1, 0])}

KEY = key_of({})


def require_same(found: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> None:
    """The same names, types, shapes and numbers."""
    assert found is not None
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in wanted.items()}
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


@dataclass
class Shelf:
    """A store and its messages."""

    folder: Path
    said: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return Store(self.folder, self.said.append)

    def path(self, key: str = KEY) -> Path:
        return self.folder / "images" / f"{key}.safetensors"

    def tensors(self, key: str = KEY) -> dict[str, Tensor] | None:
        return None if (found := self.store.get("images", key)) is None else found.tensors

    def require_lost(self, key: str, *words: str) -> None:
        """The artifact counts as absent, which is reported once, and it can be put again."""
        assert self.tensors(key) is None
        (said,) = self.said
        assert all(word in said for word in (str(self.path(key)), "built again", *words)), said
        self.said.clear()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def sidecar(path: Path) -> Path:
    """The file with the facts and the checksum."""
    return path.with_name(path.name + ".json")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "emptied": lambda path: path.write_bytes(b""),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "no sidecar": lambda path: sidecar(path).unlink(),
    "no tensors": lambda path: path.unlink(),
    "sidecar truncated": lambda path: sidecar(path).write_text(sidecar(path).read_text()[:20]),
    "sidecar without checksum": lambda path: sidecar(path).write_text("{}"),
    "sidecar not a record": lambda path: sidecar(path).write_text("[]"),
}


def test_written_content_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to("elsewhere")  # the temporary name is not written through
    write_text(path, "old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_midway_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new = tmp_path / "file", tmp_path / "new"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in (path, new):
        with pytest.raises(OSError, match="No space left"):
            write_text(name, "new, much longer than the old")
    assert path.read_text() == "old"
    assert not new.exists()


def test_content_reaches_the_disk_before_its_name_and_the_checksum_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash leaves neither a name on an empty file nor a checksum of tensors that are not there."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(Path(b).name), replace(a, b))[1])
    write_tensors(tmp_path / "x", TENSORS, {})
    assert calls == ["fsync", "x", "fsync", "x.json"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 309])
def test_json_has_finite_numbers_only(number: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="number"):
        stored.parsed(f"[{number}]".encode())
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"loss": float(number)})
    assert list(tmp_path.iterdir()) == []
    assert stored.parsed(b"[-1.7976931348623157e308]") == [-sys.float_info.max]


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Also those that are not contiguous or have a graph."""
    path = tmp_path / "x.safetensors"
    assert read_tensors(path) is None
    tensors = {**TENSORS, "t": torch.arange(6.0).view(2, 3).t(), "g": torch.ones(2, requires_grad=True)}
    write_tensors(path, tensors, {"facts": {"seed": 3}})
    found = read_tensors(path)
    assert found is not None
    require_same(found[0], {name: t.detach() for name, t in tensors.items()})
    assert found[1]["facts"] == {"seed": 3}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_detected_and_the_artifact_is_built_again(how: str, shelf: Shelf) -> None:
    shelf.store.put("images", TENSORS, {})
    require_same(shelf.tensors(), TENSORS)
    assert shelf.said == []
    DAMAGES[how](shelf.path())
    with pytest.raises(ValueError, match=r"(is incomplete|was truncated or altered)"):
        read_tensors(shelf.path())
    shelf.require_lost(KEY)
    shelf.store.put("images", TENSORS, {})
    require_same(shelf.tensors(), TENSORS)


def test_a_right_checksum_of_no_tensors_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not tensors")
    write_json(sidecar(path), {"sha256": sha256(b"not tensors"), "facts_sha256": sha256(b"{}")})
    with pytest.raises(ValueError, match="truncated or altered"):
        read_tensors(path)


def test_a_key_depends_on_every_fact_but_not_on_their_order() -> None:
    facts: dict[str, Any] = {"seed": 0, "fitting": {"lr": 0.1, "channels": (8, 16)}}
    assert key_of(facts) == key_of({"fitting": {"channels": [8, 16], "lr": 0.1}, "seed": 0})
    for other in ({"seed": 1}, {"fitting": {"lr": 0.1, "channels": (8, 32)}}, {"more": None}):
        assert key_of(facts) != key_of({**facts, **other})


def test_the_store_returns_what_was_put_also_to_a_later_process(shelf: Shelf) -> None:
    key, findings = key_of({"seed": 0}), {"receipt": {"sigma": 1.5, "steps": 20}}
    Store(shelf.folder / "a" / "b").put("images", TENSORS, {"seed": 0}, findings)
    later = Store(shelf.folder / "a" / "b", pytest.fail)
    found = later.get("images", key)
    assert found is not None
    require_same(found.tensors, TENSORS)
    assert (found.facts, found.findings) == ({"seed": 0}, findings)
    assert later.get("generators", key) is None
    assert later.get("images", key_of({"seed": 1})) is None


@pytest.mark.parametrize("line", ["sha256", "facts_sha256", "sigma"])
def test_a_receipt_that_was_altered_or_lost_its_checksum_is_damage(line: str, shelf: Shelf) -> None:
    shelf.store.put("images", TENSORS, {}, {"receipt": {"sigma": 1.5}})
    path = sidecar(shelf.path())
    if line == "sigma":
        path.write_text(path.read_text().replace("1.5", "9.5"))
    else:
        path.write_text(json.dumps({name: fact for name, fact in json.loads(path.read_text()).items() if name != line}))
    shelf.require_lost(KEY, "truncated or altered" if line == "sigma" else f"checksum {line!r} is missing")


@pytest.mark.parametrize("parts", [("tensors",), ("facts",), ("findings",), ("facts", "findings")], ids="+".join)
def test_parts_of_two_artifacts_make_none(parts: tuple[str, ...], shelf: Shelf) -> None:
    """The images of a generator without noise under the receipt of one with it, in all combinations."""
    keys = [key_of({"sigma": sigma}) for sigma in (0, 5)]
    for sigma in (0, 5):
        shelf.store.put("images", {"images": torch.full((3,), sigma)}, {"sigma": sigma}, {"receipt": {"sigma": sigma}})
    plain, private = (shelf.path(key) for key in keys)
    if parts == ("tensors",):
        private.write_bytes(plain.read_bytes())
    else:
        here, there = json.loads(sidecar(plain).read_text()), json.loads(sidecar(private).read_text())
        sidecar(plain).write_text(json.dumps(here | {part: there[part] for part in parts}))
    is_lost = [shelf.tensors(key) is None for key in keys]
    assert is_lost == [parts != ("tensors",), parts == ("tensors",)]
    assert len(shelf.said) == 1


def test_two_exchanged_artifacts_are_noticed(shelf: Shelf) -> None:
    """Both are intact, and each stands where the other should."""
    keys = [key_of({"client": client}) for client in (0, 1)]
    for client in (0, 1):
        shelf.store.put("images", {"images": torch.full((3,), client)}, {"client": client})
    paths = [shelf.path(key) for key in keys]
    for a, b in (paths, [sidecar(path) for path in paths]):
        a.rename(shelf.folder / "aside")
        b.rename(a)
        (shelf.folder / "aside").rename(b)
    for key in keys:
        shelf.require_lost(key, "is another artifact")
    shelf.store.put("images", {"images": torch.full((3,), 1)}, {"client": 1})
    require_same(shelf.tensors(keys[1]), {"images": torch.full((3,), 1)})


@pytest.mark.parametrize("facts", [None, [], "text", 7])
def test_an_artifact_whose_facts_are_malformed_is_none(facts: Any, shelf: Shelf) -> None:
    (shelf.folder / "images").mkdir()
    write_tensors(shelf.path(), TENSORS, {"facts": facts})
    shelf.require_lost(KEY)
    assert shelf.tensors("0" * 24) is None  # what was never there is no damage
    assert shelf.said == []


@dataclass(frozen=True)
class Part:
    needed: int
    lr: float = 0.1
    channels: tuple[int, ...] = (8, 16)
    others: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LaterPart(Part):
    added: str = "as before"


def test_a_key_has_the_constants_that_differ_from_their_defaults() -> None:
    assert constants(Part(3)) == {"needed": 3}  # without a default
    assert constants(Part(3, others={"a": 1}, channels=(8,))) == {"needed": 3, "channels": (8,), "others": {"a": 1}}
    assert constants(Part(3, lr=0.2), less=("lr",)) == {"needed": 3}
    for lr in (0.1, 0.2):  # a field that was added later renames nothing
        assert key_of(constants(LaterPart(3, lr))) == key_of(constants(Part(3, lr)))
    assert key_of(constants(LaterPart(3, added="other"))) != key_of(constants(Part(3)))


@pytest.mark.parametrize("fails_at", [1, 2], ids=["tensors", "sidecar"])
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "replaced"])
def test_putting_is_atomic(fails_at: int, is_there: bool, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"images": torch.zeros(3)}
    if is_there:
        shelf.store.put("images", old, {})
    calls: list[int] = []
    fsync = os.fsync

    def fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="No space left"):
            shelf.store.put("images", TENSORS, {})
    if is_there and fails_at == 1:
        require_same(shelf.tensors(), old)
    else:
        assert shelf.tensors() is None  # never something in between
    if not is_there and fails_at == 1:
        assert not any(not p.name.startswith(".") for p in (shelf.folder / "images").iterdir())
    shelf.store.put("images", TENSORS, {})
    require_same(shelf.tensors(), TENSORS)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file" / "artifacts", tmp_path / "file"):
        with pytest.raises(UserError, match=f"{re.escape(str(folder))}.* cannot be written"):
            Store(folder).require_writable()


@pytest.mark.long
def test_two_processes_may_put_the_same_artifact_at_once(tmp_path: Path) -> None:
    """Each also reads, all the time, what both write: it is never damaged."""

    def writes() -> None:
        store = Store(tmp_path, pytest.fail)
        for number in range(20):
            store.put("images", {"images": torch.arange(50_000) + number % 3}, {"number": number % 3})
            found = store.get("images", key_of({"number": 0}))
            assert found is not None
            require_same(found.tensors, {"images": torch.arange(50_000)})

    with ThreadPoolExecutor() as pool:
        assert [ended.code for ended in pool.map(lambda _: forked(writes, tmp_path), range(2))] == [0, 0]
    assert len(list((tmp_path / "images").iterdir())) == 6  # and nothing half-written


def test_a_store_that_lacks_nothing_may_be_read_only(as_nobody: Callable[[Callable[[], None]], None]) -> None:
    with TemporaryDirectory() as folder:
        shelf = Shelf(Path(folder))
        shelf.store.put("images", TENSORS, {})
        for path in (shelf.folder, shelf.folder / "images"):
            path.chmod(0o555)

        def reads() -> None:
            require_same(shelf.tensors(), TENSORS)
            with pytest.raises(UserError, match="cannot be written"):
                shelf.store.require_writable()

        as_nobody(reads)
        for path in (shelf.folder, shelf.folder / "images"):
            path.chmod(0o755)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


MANY = "a: [" + "1," * 200_000 + "1]"
ALIASES = "a: &a [" + "1," * 999 + "1]\n" + "".join(f"b{i}: *a\n" for i in range(200))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("config.yaml", BOMB, "aliases"), ("config.yaml", "seed: &s 3\ntarget: *s\n", "aliases"),
        ("config.yaml", "a: " + "[" * 300_000, "nested too deeply|nesting depth"),  # ours, and PyYAML's from 6.0.4
        ("config.yaml", MANY, "100,000 values"), ("config.yaml", "x" * 1_000_001, "at most 1,000,000"),
        ("mine.yaml", ALIASES, r"mine\.yaml has more than 100,000 values"), ("mine.yaml", MANY, "100,000 values"),
    ],
    ids=["bomb", "alias", "deep", "values", "long", "own aliases", "own values"],
)  # fmt: skip
def test_a_config_file_is_bounded(name: str, text: str, why: str, tmp_path: Path) -> None:
    """That of a run folder, and that of the user."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=why):
        read_config(tmp_path) if name == "config.yaml" else cli.read([f"--config={tmp_path / name}"])


@pytest.mark.parametrize("text", ['{"pid": 1e999, "host": "x"}', '{"pid": "1", "host": "x"}', '{"pid": 1, "host": 2}'])
def test_a_lock_of_another_form_names_no_process(text: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(text)
    assert holder(tmp_path) is None


def test_a_message_is_written_to_a_plain_file_only(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "second").hardlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "second", "pipe"):
        with pytest.raises(OSError, match=r"."):
            stored.write_alone(tmp_path / name, "more")
    for text in ("one\n", "two\n"):
        stored.write_alone(tmp_path / "own", text)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "own").read_text() == "one\ntwo\n"


def test_a_folder_in_a_run_that_links_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("{}")
    (tmp_path / "linked").symlink_to("real")
    assert stored.json_of(tmp_path / "linked" / "file", inner=1) == {}  # a run folder may be a link
    with pytest.raises(stored.UnreadableError, match="linked is a link"):
        stored.json_of(tmp_path / "linked" / "file", inner=2)


def test_control_characters_are_escaped() -> None:
    assert stored.clean("a\x1b[31m\u202e\ud800 \u00e9\n") == r"a\x1b[31m\u202e\ud800 é\n"
    assert str(UserError("\x1b[31mred.")) == r"\x1b[31mred."


def test_a_replay_downloads_nothing_and_reads_no_folder_that_the_user_does_not_name(tmp_path: Path) -> None:
    wanted = tmp_path / "wanted"
    config = override(presets.experiment("smoke", "mnist"), {"data.download": True, "data.dir": str(wanted)})
    RunFolder(tmp_path / "run", config, resume=False)
    with pytest.raises(UserError, match=re.escape(f"add --data.dir {wanted}")):
        replay(tmp_path / "run", 1, 0)
    with pytest.raises(UserError, match="is not there"):
        replay(tmp_path / "run", 1, 0, named=[str(wanted)])
    assert not wanted.exists()
