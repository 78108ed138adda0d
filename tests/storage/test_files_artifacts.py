"""Files that are never half-written, files that others may have made, and the store of artifacts built on them."""

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcommons.cli import parse
from fedcommons.config import presets
from fedcommons.config.dotted import override
from fedcommons.errors import UserError, clean
from fedcommons.runs.replay import replay
from fedcommons.storage import safe_read
from fedcommons.storage.artifact_store import Store, key_of
from fedcommons.storage.atomic_files import read_tensors, sha256, write_bytes, write_json, write_tensors, write_text
from fedcommons.tracking.run_folder import RunFolder, read_config

TENSORS = {"images": torch.arange(24, dtype=torch.uint8).view(2, 3, 4), "labels": torch.tensor([1, 0])}

KEY = key_of({})


def require_same(actual: dict[str, Tensor] | None, wanted: dict[str, Tensor]) -> None:
    """Check that names, types, shapes and numbers are equal."""
    assert actual is not None
    assert {name: x.dtype for name, x in actual.items()} == {name: x.dtype for name, x in wanted.items()}
    assert all(torch.equal(actual[name], x) for name, x in wanted.items())


@dataclass
class Shelf:
    """A store and its messages."""

    folder: Path
    messages: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return Store(self.folder, self.messages.append)

    def path(self, key: str = KEY) -> Path:
        return self.folder / "images" / f"{key}.safetensors"

    def tensors(self) -> dict[str, Tensor] | None:
        return None if (artifact := self.store.get("images", KEY)) is None else artifact.tensors

    def require_lost(self, key: str = KEY) -> None:
        """Check that the artifact counts as absent, which is reported once."""
        assert self.store.get("images", key) is None
        (message,) = self.messages
        assert str(self.path(key)) in message
        assert "built again" in message
        self.messages.clear()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def sidecar(path: Path) -> Path:
    """The file with the facts and the checksum."""
    return path.with_name(path.name + ".json")


def not_tensors(path: Path) -> None:
    facts = json.loads(sidecar(path).read_text())
    path.write_bytes(b"not tensors")
    write_json(sidecar(path), {**facts, "sha256": sha256(b"not tensors")})


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"), "was truncated or altered"),
    "no sidecar": (lambda path: sidecar(path).unlink(), "is missing"),
    "no tensors": (lambda path: path.unlink(), "is missing"),
    "sidecar truncated": (lambda path: sidecar(path).write_text(sidecar(path).read_text()[:20]), "is incomplete"),
    "no checksum of facts": (lambda path: write_json(sidecar(path), {"sha256": "0"}), "checksum 'facts_sha256'"),
    "no tensors with a right checksum": (not_tensors, "was truncated or altered"),
    "other facts": (lambda path: write_json(sidecar(path), {**json.loads(sidecar(path).read_text()), "x": 1}),
                    "altered"),
}  # fmt: skip


def test_written_content_replaces_what_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / f".file.{os.getpid()}.tmp").symlink_to("elsewhere")  # the temporary name is not written through
    write_text(path, "old")
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_content_is_on_disk_before_its_name_and_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash leaves neither a name on an empty file nor a checksum of tensors that are not there."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(Path(b).name), replace(a, b))[1])
    write_tensors(tmp_path / "x", TENSORS, {})
    assert calls == ["fsync", "x", "fsync", "x.json"]


def test_json_has_finite_numbers_only(tmp_path: Path) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 309):
        with pytest.raises(ValueError, match="number"):
            safe_read.parsed(f"[{number}]".encode())
        with pytest.raises(ValueError, match="JSON"):
            write_json(tmp_path / "x.json", {"loss": float(number)})
    assert list(tmp_path.iterdir()) == []
    assert safe_read.parsed(b"[-1.7976931348623157e308]") == [-sys.float_info.max]


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_detected_and_the_artifact_is_built_again(how: str, shelf: Shelf) -> None:
    damage, words = DAMAGES[how]
    for _ in range(2):
        shelf.store.put("images", TENSORS, {}, {"receipt": {"sigma": 1.5}})
        require_same(shelf.tensors(), TENSORS)
        assert shelf.messages == []
        damage(shelf.path())
        with pytest.raises(ValueError, match=words):
            read_tensors(shelf.path())
        shelf.require_lost()


def test_the_store_returns_what_was_put_also_to_a_later_process(tmp_path: Path) -> None:
    """Also tensors that are not contiguous or have a graph."""
    tensors = {**TENSORS, "t": torch.arange(6.0).view(2, 3).t(), "g": torch.ones(2, requires_grad=True)}
    Store(tmp_path / "a" / "b").put("images", tensors, {"seed": 0}, {"steps": 20})
    later = Store(tmp_path / "a" / "b", pytest.fail)
    artifact = later.get("images", key_of({"seed": 0}))
    assert artifact is not None
    require_same(artifact.tensors, {name: t.detach() for name, t in tensors.items()})
    assert (artifact.facts, artifact.findings) == ({"seed": 0}, {"steps": 20})
    assert later.get("generators", key_of({"seed": 0})) is later.get("images", key_of({"seed": 1})) is None


def test_an_artifact_whose_facts_are_malformed_is_none(shelf: Shelf) -> None:
    (shelf.folder / "images").mkdir()
    facts: Any
    for facts in (None, [], "text", {"of": "another key"}):
        key = KEY if isinstance(facts, dict) else key_of(facts)
        write_tensors(shelf.path(key), TENSORS, {"facts": facts})
        shelf.require_lost(key)
    assert shelf.store.get("images", "0" * 24) is None  # what was never there is no damage
    assert shelf.messages == []


def test_a_key_depends_on_every_fact_and_on_no_order() -> None:
    facts: dict[str, Any] = {"seed": 0, "fitting": {"lr": 0.1, "channels": (8, 16)}}
    assert key_of(facts) == key_of({"fitting": {"channels": [8, 16], "lr": 0.1}, "seed": 0})
    for other in ({"seed": 1}, {"fitting": {"lr": 0.1, "channels": (8, 32)}}, {"more": None}):
        assert key_of(facts) != key_of({**facts, **other})


@pytest.mark.parametrize("fails_at", [1, 2], ids=["tensors", "sidecar"])
def test_putting_is_atomic(fails_at: int, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.store.put("images", old := {"images": torch.zeros(3)}, {})
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
    assert len(list((shelf.folder / "images").iterdir())) == 2
    if fails_at == 1:
        require_same(shelf.tensors(), old)
    else:
        assert shelf.tensors() is None  # never something in between
    shelf.store.put("images", TENSORS, {})
    require_same(shelf.tensors(), TENSORS)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file" / "artifacts", tmp_path / "file"):
        with pytest.raises(UserError, match=f"{re.escape(str(folder))}.* cannot be written"):
            Store(folder).require_writable()


ALIASES = "a: &a [" + "1," * 999 + "1]\n" + "".join(f"b{i}: *a\n" for i in range(200))
VALUES, DEEP, LONG = "a: [" + "1," * 200_000 + "1]", "a: " + "[" * 300_000, "x" * 1_000_001
TOO_DEEP = "nested too deeply|nesting depth"
"""Our words, and PyYAML's from 6.0.4."""
LARGE = {
    "aliases": (ALIASES, "aliases", "more than 100,000 values"), "values": (VALUES, "100,000 val", "100,000 values"),
    "deep": (DEEP, TOO_DEEP, TOO_DEEP), "long": (LONG, "at most 1,000,000", "1,000,000"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_a_config_file_is_bounded(kind: str, tmp_path: Path) -> None:
    """That of a run folder, and that of the user, which may have aliases."""
    text, of_run, of_user = LARGE[kind]
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=of_run):
        read_config(tmp_path)
    with pytest.raises(UserError, match=rf"config\.yaml.*({of_user})"):
        parse.read([f"--config={tmp_path / 'config.yaml'}"])


def test_a_message_is_written_to_a_plain_file_only(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "second").hardlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "second", "pipe"):
        with pytest.raises(OSError, match=r"."):
            safe_read.write_alone(tmp_path / name, "more")
    for text in ("one\n", "two\n"):
        safe_read.write_alone(tmp_path / "own", text)
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "own").read_text() == "one\ntwo\n"


def test_a_folder_in_a_run_that_links_elsewhere_or_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("{}")
    (tmp_path / "linked").symlink_to("real")
    assert safe_read.json_of(tmp_path / "linked" / "file", inner=1) == {}  # a run folder may be a link
    with pytest.raises(safe_read.UnreadableError, match="linked is a link"):
        safe_read.json_of(tmp_path / "linked" / "file", inner=2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(safe_read.UnreadableError, match="pipe"):
        safe_read.content(tmp_path / "pipe" / "file", 2)
    with pytest.raises(safe_read.UnreadableError, match="pipe"):
        safe_read.content(tmp_path / "pipe", 1)
    assert safe_read.content(tmp_path / "real" / "file", 2) == b"{}"  # the largest file that is allowed


def test_control_characters_are_escaped() -> None:
    assert clean("a\x1b[31m\u202e\ud800 \u00e9\n") == r"a\x1b[31m\u202e\ud800 é\n"
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
