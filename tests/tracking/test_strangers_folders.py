"""Run folders of other users: they are read in bounded memory and time, or the damage is reported.

Each case runs in a fork with a limit of memory and of processor time, which a reader that waits, follows a link or
reads without end would reach.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from forked import SIZES, Ended, examine, files, forked, warm_up, write_mine
from hypothesis import strategies as st
from interrupted import small

from fedcommons import ClientError, UserError, load_clients, load_rounds, load_runs
from fedcommons.reports import plots
from fedcommons.runs import experiment, replay
from fedcommons.storage import file_lock
from fedcommons.storage.error_file import read_error
from fedcommons.tracking.run_folder import read_finished

TINY = small(
    Path("store"),
    {"federation.rounds": 2, "federation.checkpoint_every": 1, "model.channels": (2, 2), "measure.clients": True},
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with clients' memories in files."""
    warm_up()
    folder = tmp_path_factory.mktemp("good") / "run"
    experiment.run(TINY, folder, say=lambda text: None)
    plots.partition_of(folder)
    return write_mine(folder, "messages.log", "error.txt", "wandb-id.txt")


def laid_out(good: Path, root: Path) -> Path:
    """A copy of the run, beside an intact one and files of others."""
    shutil.copytree(good, root / "all" / "good")
    shutil.copytree(good, root / "all" / "odd")
    write_mine(root / "outside", "mine.txt")
    return root / "all" / "odd"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return laid_out(good, tmp_path)


def require_bounded(folder: Path, read: Callable[[], object], seconds: int = 30) -> Ended:
    """It ends within limits, with a sentence or well, prints no control characters, and changes nothing outside."""
    others = [folder.parent.parent / "outside", folder.parent / "good"]
    before = [files(other) for other in others]
    ended = forked(read, folder.parent, seconds=seconds, gigabytes=1.5)
    assert ended.code == 0, f"code {ended.code}: {ended.err}"
    assert not [c for c in ended.out if not c.isprintable() and c != "\n"]
    assert [files(other) for other in others] == before
    return ended


def frames(folder: Path) -> None:
    for load in (load_runs, load_rounds, load_clients):
        frame = load(folder.parent)
        assert str(folder.parent / "good") in set(frame["run"]), "the intact run is lost"
        frame.to_csv()
        for row in frame.to_dict("records"):
            assert not [c for value in row.values() if isinstance(value, str) for c in value if not c.isprintable()]


def looks(folder: Path) -> None:
    """What sweeps look at, and what is drawn from a folder."""
    file_lock.holder(folder)
    file_lock.strangers(folder)
    print(read_error(folder))
    for look in (lambda: read_finished(folder, TINY), lambda: plots.partition_of(folder)):
        with contextlib.suppress(UserError):
            look()


def read_in_all_ways(folder: Path) -> None:
    """The reader that writes comes last; a sentence of one must not hide the others."""
    for reader in (
        lambda: looks(folder), lambda: frames(folder), lambda: replay.replay(folder, 2, 0),
        lambda: experiment.run(TINY, folder, resume=True),
    ):  # fmt: skip
        try:
            reader()
        except (UserError, ClientError) as error:
            print(error)


def cleared(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def outside(path: Path) -> Path:
    return next(p for p in path.parents if p.name == "all").parent / "outside"


def sparse(path: Path) -> None:
    """Ten GB of zeros after what was there."""
    with open(path, "ab") as file:
        file.truncate(10**10)


PLACES: Mapping[str, Callable[[Path], object]] = {
    "a link to nothing": lambda path: cleared(path).symlink_to(outside(path) / "new"),
    "a link": lambda path: cleared(path).symlink_to(outside(path) / "mine.txt"),
    "a link to zeros": lambda path: cleared(path).symlink_to("/dev/zero"),
    "a link to a folder": lambda path: cleared(path).symlink_to(outside(path)),
    "a link to itself": lambda path: cleared(path).symlink_to(path.name),
    "a pipe": lambda path: os.mkfifo(cleared(path)), "a folder": lambda path: cleared(path).mkdir(), "nothing": cleared,
}  # fmt: skip
CONTENTS: Mapping[str, Callable[[Path], object]] = {
    "ten sparse GB": sparse,
    "ten GB of zeros": lambda path: sparse(cleared(path)),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "random": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}\n"),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000),
    "closed brackets": lambda path: path.write_bytes(b"[" * 100_000 + b"]" * 100_000),
    "names": lambda path: path.write_bytes(b'{"a":' * 400 + b"1" + b"}" * 400),
}  # fmt: skip
FILES = (
    "config.yaml", "environment.json", "partition.json", "rounds.jsonl", "timing.jsonl", "clients.jsonl",
    "summary.json", "messages.log", "error.txt", ".lock", "checkpoints/round-000002.safetensors",
    "checkpoints/round-000002.safetensors.json", "checkpoints", "memory", "memory/*.safetensors", "wandb-id.txt",
)  # fmt: skip
EVERY = [(kind, name) for name in FILES for kind in (*PLACES, *CONTENTS)]
SOME = EVERY[::13]
"""Every 13th pair: some kinds of each file and some files of each kind; the other pairs are marked slow."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*pair, marks=pytest.mark.long if pair in SOME else pytest.mark.slow) for pair in EVERY],
)
def test_whatever_replaces_a_file_no_reader_hangs_or_leaves_the_folder(kind: str, name: str, folder: Path) -> None:
    if (folder / name).is_dir() and kind in CONTENTS:
        shutil.rmtree(folder / name)
        (folder / name).write_text("x")
    paths = [*folder.glob(name)]
    assert paths
    for path in paths:
        {**PLACES, **CONTENTS}[kind](path)
    if name.startswith(("checkpoints", "memory")):  # these are read by a run that is not finished
        (folder / "summary.json").unlink()
    require_bounded(folder, lambda: read_in_all_ways(folder))


ODD = [
    10**400, -1, "x" * 5000, "../../outside/mine.txt", "/dev/zero", [5], [[[[[1]]]]], "\ud800",
    "\x1b]0;owned\x07$\\frac{", {"\x1b[2J": {"\ud800": 1}},
]  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
Damage = tuple[int, str, float, bytes, Any]
"""Number of a file, over all files; kind of damage; place in the file, as a share of its length; bytes; a value."""
DAMAGES: st.SearchStrategy[Damage] = st.tuples(
    st.integers(0, 200), st.sampled_from(["cut", "doubled", "flipped", "inserted", "line", *["value"] * 5]),
    st.floats(0, 1), st.binary(min_size=1, max_size=6), VALUES,
)  # fmt: skip


def altered(value: Any, at: float, new: Any) -> Any:
    """The value with another one in one place."""
    if isinstance(value, dict) and value and at < 0.9:
        name = sorted(value)[int(at * len(value))]
        return {**value, name: altered(value[name], (at * 7) % 1, new)}
    return new


def damage(path: Path, way: str, at: float, new: bytes, value: Any) -> None:
    content = path.read_bytes()
    lines = content.splitlines(keepends=True) if content and path.suffix == ".jsonl" else [content]
    j = int(at * (len(lines) - 1))
    line, i = lines[j], int(at * len(lines[j]))
    if way == "value":
        with contextlib.suppress(ValueError):  # it is no JSON, or was damaged before
            line = json.dumps(altered(json.loads(line), at, value)).encode() + b"\n"
    else:
        line = {
            "cut": line[:i], "doubled": line * 2, "line": new + b"\n", "inserted": line[:i] + new + line[i:],
            "flipped": line[:i] + bytes(b ^ 0xFF for b in line[i : i + 1]) + line[i + 1 :],
        }[way]  # fmt: skip
    path.write_bytes(b"".join([*lines[:j], line, *lines[j + 1 :]]))


def check(case: tuple[bool, list[Damage]], good: Path, root: Path) -> None:
    """One or two places are damaged. If only checkpoints are, a run that ends has the results of any other run."""
    is_finished, ways = case
    with tempfile.TemporaryDirectory(dir=root) as name:
        folder = laid_out(good, Path(name))
        if not is_finished:
            (folder / "summary.json").unlink()
        damaged = list[str]()
        for number, way, at, new, value in ways:
            able = sorted(path for path in folder.rglob("*") if path.is_file())
            damage(path := able[number % len(able)], way, at, new, value)
            damaged.append(path.suffix)
        require_bounded(folder, lambda: read_in_all_ways(folder))
        if {*damaged} == {".safetensors"} and (folder / "summary.json").is_file():
            for result in ("rounds.jsonl", "summary.json"):
                assert (folder / result).read_bytes() == (good / result).read_bytes()


@SIZES
def test_a_damaged_folder_is_read_or_refused(many: bool, good: Path, tmp_path: Path) -> None:
    cases = st.tuples(st.booleans(), st.lists(DAMAGES, min_size=1, max_size=2))
    examine(lambda case: check(case, good, tmp_path), cases, 20, many)
