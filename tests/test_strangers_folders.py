"""Run folders that somebody else made: they are read in bounded memory and time, or what is wrong is told.

Each case runs in a fork with a limit of memory and of processor time, which a reader that waits, follows a link or
reads without end would reach.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedcommons import load_clients, load_rounds, load_runs, locks, means
from fedcommons.config import presets
from fedcommons.config.flat import override
from fedcommons.errors import ClientError, UserError, left_in
from fedcommons.reports import plots
from fedcommons.runs import experiment, replay
from fedcommons.tracking.run_folder import read_finished

MEMORY = 1_500_000_000
"""Bytes that a reader may take beyond what its process has."""

SECONDS = 30
"""Of processor time; a reader that waits is ended after three times as long."""

TINY = override(
    presets.experiment("smoke", "digits"),
    {
        "algorithm": "scaffold", "data.limit": 40, "client.epochs": 1, "measure.every": 0, "federation.rounds": 2,
        "federation.checkpoint_every": 1, "tracking.wandb": "off", "model.channels": (2, 2), "measure.clients": True,
        "federation.memory_mb": 0.001,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with clients' memories in files."""
    folder = tmp_path_factory.mktemp("good") / "run"
    experiment.run(TINY, folder, say=lambda text: None)
    plots.partition_of(folder)
    (folder / "messages.log").write_text("said\n")
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of it, beside an intact one."""
    shutil.copytree(good, tmp_path / "all" / "good")
    shutil.copytree(good, tmp_path / "all" / "odd")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine.txt").write_text("mine")
    return tmp_path / "all" / "odd"


def alone(work: Callable[[], object], seconds: int = SECONDS) -> tuple[str, str]:
    """How the work ended in a fork with limits: ``done``, ``sentence``, or what went wrong; and what it printed."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        said = io.StringIO()
        try:
            os.close(reading)
            used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            signal.alarm(3 * seconds)
            with contextlib.redirect_stdout(said):
                try:
                    work()
                    how = "done"
                except (UserError, ClientError) as error:
                    how = "sentence"
                    print(error)
                except BaseException:
                    how = traceback.format_exc()
            os.write(writing, json.dumps([how[-3000:], said.getvalue()[-20000:]]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        told = file.read()
    ended = os.waitpid(process, 0)[1]
    if not told:
        return f"ended by {ended}", ""
    how, said = json.loads(told)
    return how, said


# --- readers


def _frames(folder: Path) -> None:
    for load in (load_runs, load_rounds, load_clients):
        found = load(folder.parent)
        assert str(folder.parent / "good") in set(found["run"]), "the intact run is lost"
        found.to_csv()


def _resume(folder: Path) -> None:
    experiment.run(TINY, folder, resume=True)


def _replay(folder: Path) -> None:
    replay.replay(folder, 2, 0)


def _looks(folder: Path) -> None:
    """What sweeps look at, and what is drawn from a folder."""
    locks.holder(folder)
    locks.strangers(folder)
    print(left_in(folder))
    for look in (lambda: read_finished(folder, TINY), lambda: plots.partition_of(folder)):
        with contextlib.suppress(UserError):
            look()


READERS: Mapping[str, Callable[[Path], None]] = {
    "frames": _frames, "resume": _resume, "replay": _replay, "looks": _looks,
}  # fmt: skip


def right(ended: tuple[str, str], folder: Path) -> None:
    """It ended as it should, showed nothing that a terminal obeys, and left alone what is outside."""
    how, said = ended
    assert how in ("done", "sentence"), how
    assert not [c for c in said if not c.isprintable() and c != "\n"]
    outside = folder.parent.parent / "outside"
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"mine.txt": "mine"}
    intact = folder.parent / "good" / "rounds.jsonl"
    assert not intact.is_symlink()


# --- what may stand in the place of a file


def _put(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _outside(path: Path) -> Path:
    return next(p for p in path.parents if p.name == "all").parent / "outside"


def _sparse(path: Path) -> None:
    """Ten GB of holes after what was there."""
    with open(path, "ab") as file:
        file.truncate(10**10)


def _holes(path: Path) -> None:
    with open(_put(path), "wb") as file:
        file.truncate(10**10)


PLACES: Mapping[str, Callable[[Path], object]] = {
    "a link to nothing": lambda path: _put(path).symlink_to(_outside(path) / "new"),
    "a link": lambda path: _put(path).symlink_to(_outside(path) / "mine.txt"),
    "a link to zeros": lambda path: _put(path).symlink_to("/dev/zero"),
    "a link to a folder": lambda path: _put(path).symlink_to(_outside(path)),
    "a link to itself": lambda path: _put(path).symlink_to(path.name),
    "a pipe": lambda path: os.mkfifo(_put(path)),
    "a folder": lambda path: _put(path).mkdir(),
    "ten sparse GB": _sparse,
    "ten GB of holes": _holes,
    "nothing": lambda path: _put(path),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "random": lambda path: path.write_bytes(bytes(range(256)) * 4),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe{}\n"),
    "brackets": lambda path: path.write_bytes(b"[" * 100_000),
    "closed brackets": lambda path: path.write_bytes(b"[" * 100_000 + b"]" * 100_000),
    "names": lambda path: path.write_bytes(b'{"a":' * 400 + b"1" + b"}" * 400),
}

FILES = (
    "config.yaml", "environment.json", "partition.json", "rounds.jsonl", "timing.jsonl", "clients.jsonl",
    "summary.json", "messages.log", "error.txt", ".lock", "checkpoints/round-000002.safetensors",
    "checkpoints/round-000002.safetensors.json", "checkpoints", "memory", "MEMORY", "wandb-id.txt",
)  # fmt: skip

EVERY = [(kind, name) for name in FILES for kind in PLACES]
SOME = [pair for number, pair in enumerate(EVERY) if number % 9 == 0]
"""Of each file some kinds, and of each kind some files; the others are slow."""


def _places(folder: Path, name: str) -> Iterator[Path]:
    """The file of this name; of the memories all."""
    yield from [*folder.glob("memory/*.safetensors")] if name == "MEMORY" else [folder / name]


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(*pair, marks=() if pair in SOME else pytest.mark.slow) for pair in EVERY]
)
@pytest.mark.long
def test_whatever_stands_in_the_place_of_a_file_no_reader_hangs_or_leaves_the_folder(
    kind: str, name: str, folder: Path
) -> None:
    (folder / "error.txt").write_text("ValueError: no\n\ntrace")
    (folder / "wandb-id.txt").write_text("abcd1234\n")
    if (folder / name).is_dir() and kind in ("ten sparse GB", "empty", "cut", "random", "no UTF-8", "brackets",
                                            "closed brackets", "names"):  # fmt: skip
        shutil.rmtree(folder / name)
        (folder / name).write_text("x")
    for path in _places(folder, name):
        PLACES[kind](path)
    if "check" in name or "MEM" in name.upper():  # these are read by a run that is not finished
        (folder / "summary.json").unlink()
    right(alone(lambda: _each(folder)), folder)


def _each(folder: Path) -> None:
    """All readers, the one that writes last; a sentence of one must not hide the others."""
    for reader in (_looks, _frames, _replay, _resume):
        try:
            reader(folder)
        except (UserError, ClientError) as error:
            print(error)


# --- odd values in whole files


ODD: Mapping[str, Any] = {
    "null": None, "a list": [5], "a text": "x", "a number": 5, "less than nothing": -1, "huge": 10**300,
    "no float": "OVERFLOW", "infinite": "INFINITY", "nan": "NAN", "true": True, "half a character": "\ud800",
    "an escape": "\x1b]0;owned\x07\x1b[31m\n$\\frac{", "deep": [[[[[1]]]]], "names": {"\x1b[2J": {"\ud800": 1}},
}  # fmt: skip


EACH = 5
"""Every so many of these are tried in a place; 1 tries all of them, in a minute."""


def _texts(value: Any) -> str:
    """JSON, with numbers that JSON does not have."""
    text = json.dumps(value)
    for word, number in (("OVERFLOW", "1" + "0" * 4000), ("INFINITY", "1e999"), ("NAN", "NaN")):
        text = text.replace(f'"{word}"', number)
    return text


def _with(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """The value with something odd in this place."""
    if not path:
        return odd
    if isinstance(value, dict):
        return {**value, path[0]: _with(value[path[0]], path[1:], odd)}
    return [*value[: path[0]], _with(value[path[0]], path[1:], odd), *value[path[0] + 1 :]]


def _paths(value: Any, depth: int = 2) -> Iterator[tuple[Any, ...]]:
    """Where its values stand; of a list the first."""
    names = value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    for name in names if depth else ():
        yield (name,)
        yield from ((name, *inner) for inner in _paths(value[name], depth - 1))


def _each_odd(file: Path, whole: Any, write: Callable[[Any], str], read: Callable[[], object]) -> None:
    """All readers at each odd value in each place; told: the first that ends otherwise than in a sentence."""
    for number, path in enumerate(_paths(whole)):
        for kind, odd in [*ODD.items()][number % EACH :: EACH]:
            file.write_text(write(_with(whole, path, odd)), encoding="utf-8")
            try:
                read()
            except (UserError, ClientError):
                continue
            except BaseException as error:
                error.add_note(f"{file.name}: {path} is {kind}")
                raise


@pytest.mark.parametrize("name", ["summary.json", "partition.json", ".lock", "environment.json"])
@pytest.mark.long
def test_odd_values_in_json_are_told_in_a_sentence(name: str, folder: Path) -> None:
    for other in folder.glob("checkpoints/*"):
        other.unlink()
    whole = json.loads((folder / name).read_text())
    readers: Mapping[str, Callable[[], object]] = {
        "summary.json": lambda: _drawn(folder), "environment.json": lambda: read_finished(folder, TINY, "x" * 24),
    }  # fmt: skip
    read = readers.get(name, lambda: _looks(folder))
    right(alone(lambda: _each_odd(folder / name, whole, _texts, read), 120), folder)


def _drawn(folder: Path) -> None:
    """Frames, means and a picture of the run and the intact one."""
    read_finished(folder, TINY)
    runs = load_runs(folder.parent)
    assert str(folder.parent / "good") in set(runs["run"])
    runs.to_csv()
    means(runs.assign(seed=range(len(runs))), ["last_accuracy", "MB"])
    for row in runs.to_dict("records"):
        assert not [c for value in row.values() if isinstance(value, str) for c in value if not c.isprintable()]


@pytest.mark.parametrize("name", ["rounds.jsonl", "clients.jsonl", "timing.jsonl"])
@pytest.mark.long
def test_odd_values_in_lines_are_told_in_a_sentence(name: str, folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]

    def written(line: Any) -> str:
        return "".join(_texts(one) + "\n" for one in (lines[0], line, *lines[2:]))

    right(alone(lambda: _each_odd(folder / name, lines[1], written, lambda: _frames(folder)), 120), folder)
