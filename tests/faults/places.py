"""What a command finds in its folder: other people's files, runs, stores and images, whole or damaged."""

import gzip
import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from papers.fedssyn.published import fedssyn_table1

TINY = {
    "preset": "smoke", "data.limit": "40", "client.epochs": "1", "federation.rounds": "2", "tracking.wandb": "off",
    "artifacts": "store", "out": "out",
}  # fmt: skip
"""Options of a run of a second."""

GENERATES = {"generator.epochs": "1", "generator.sampling_steps": "2"}
"""Those of one with generators besides."""

RUNS: Mapping[str, Mapping[str, str]] = {
    "plain": {"federation.rounds": "3"},
    "memory": {"federation.rounds": "3", "algorithm": "scaffold", "federation.memory_mb": "0.12"},
    "pool": {**GENERATES, "sharing.setting": "shuffled_synthetic", "sharing.p": "0.3", "measure.every": "0"},
}
"""Runs that were made once: a line may find a copy of one, and go on with it."""

DECOYS = (
    "notes.txt", ".draft.tmp", "deep/.paper.tex.7.tmp", "deep/error.txt", "checkpoints/mine.bin",
    "memory/photo.jpg", "error.txt", "messages.log", "data/mine.csv", "wandb/mine.txt",
    "deep/checkpoints/round-000001.safetensors", "checkpoints/old/round.bin", ".mine.lock",
)  # fmt: skip
"""Files of the user's, where the product has, or might look for, some of its own."""

NAMESAKES = (
    "rounds.jsonl", "summary.json", "config.yaml", "partition.png", "timing.jsonl", "environment.json",
    "table1.md", "tune.csv", "quadratics.md", "mnist_softmax.png", "communication_saved.csv", ".writable",
    "advise.md", "checkpoints/round-000009.safetensors", "memory/client-0000001-round-000001.safetensors",
)  # fmt: skip
"""And files that the product would write itself."""

PLACES_OF_OTHERS = ("users", ".", "", "users/../users", "whole/..")
"""Folders with others' files: no run may begin there."""

Content = Mapping[Path, bytes]


def furnish(folder: Path, templates: Path) -> None:
    """Everything that a line may name: a home, loops, files where folders are expected, a whole run, users' folders."""
    for name in ("home", "users/inner", "sp ace"):
        (folder / name).mkdir(parents=True)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere/at/all")
    (folder / "file.txt").write_text("mine")
    decoys(folder, DECOYS)
    decoys(folder / "users", [*DECOYS, *random.Random(folder.name).sample(NAMESAKES, 3)])
    shutil.copytree(templates / "plain", folder / "whole")


def copy(there: Path, here: Path) -> None:
    """A folder with all that is in it."""
    shutil.copytree(there, here)


def copy_run(here: Path, run: Path, store: Path, *, finished: bool) -> None:
    """A run and the store beside it; or as if it had been killed before its summary was written."""
    copy(run, here)
    copy(store, here.parent / "store")
    if not finished:
        (here / "summary.json").unlink()


def decoys(folder: Path, names: Sequence[str]) -> None:
    """Put files of these names there."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"mine": name}))


def contents(folder: Path) -> Content:
    """All files below ``folder``."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and not p.is_symlink()}


def lost(before: Content) -> list[Path]:
    """Those of the files that are gone or altered."""
    return [p for p, content in before.items() if not p.is_file() or p.read_bytes() != content]


# Damages of any file.


def _cut(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(1, len(content)))])


def _zeroed(path: Path, rng: random.Random) -> None:
    """As a power cut leaves a file whose length was written before its bytes."""
    path.write_bytes(b"\0" * path.stat().st_size)


def _flipped(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    content[rng.randrange(len(content))] ^= 0xFF
    path.write_bytes(content)


def _emptied(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def _removed(path: Path, rng: random.Random) -> None:
    path.unlink()


def _a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _a_loop(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _longer(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.choice([b"\n", b"garbage", b"\xff\xfe\n", b"{}\n", b"[]", b"\0"]))


# Damages of a file of lines or of JSON.


NOT_LINES = ("3", "[]", "{}", "null", '"x"', "nan", "{", '{"round": "x"}', '{"round": 1e99}')


def _lines(path: Path, rng: random.Random) -> None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    i = rng.randrange(len(lines))
    changed = (
        lines[:i] + lines[i + 1 :],
        [*lines, lines[i]],
        [*lines[:i], lines[i], *lines[i:]],
        lines[::-1],
        [*lines[:i], lines[i][: len(lines[i]) // 2], *lines[i + 1 :]],
        [*lines[:i], rng.choice(NOT_LINES), *lines[i + 1 :]],
        [*lines[:i], '{"round": ' + "9" * 5000 + "}", *lines[i + 1 :]],
        [*lines[:i], "[" * 5000, *lines[i + 1 :]],
    )  # fmt: skip
    path.write_text("\n".join(rng.choice(changed)) + "\n", encoding="utf-8")


def _json(path: Path, rng: random.Random) -> None:
    """Facts that can be read and are not what they were: a key is gone, or its value of another type."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        key = rng.choice([k for k in facts if k != "sha256"])
    except (ValueError, IndexError, TypeError):
        return _lines(path, rng)
    if rng.random() < 0.3:
        del facts[key]
    else:
        facts[key] = rng.choice([None, 3, "x", [], {}, [1, 2], {"a": 1}, -1, 10**30, 0.5, True])
    path.write_text(json.dumps(facts), encoding="utf-8")
    return None


WHOLE_FILE = (_cut, _zeroed, _emptied, _removed, _a_folder, _a_loop, _longer)


def damage_run(folder: Path, rng: random.Random) -> str:
    """Damage a file of a run, in one of the ways that can be noticed; which and how."""
    names = ["rounds.jsonl"] * 3 + ["timing.jsonl", "summary.json", "config.yaml", "partition.json", "environment.json"]
    names += [str(p.relative_to(folder)) for p in sorted(folder.glob("*/*.safetensors*"))]
    path = folder / rng.choice([name for name in names if (folder / name).is_file()])
    ways: list[Callable[[Path, random.Random], None]] = [*WHOLE_FILE]
    if path.suffix == ".safetensors":
        ways.append(_flipped)
    elif path.name == "rounds.jsonl" or path.name == "timing.jsonl":
        ways += [_lines] * 5
    elif path.suffixes == [".safetensors", ".json"]:
        ways += [_json] * 4
    way = rng.choice(ways)
    way(path, rng)
    return f"{path.name}{way.__name__}"


def damage_store(folder: Path, rng: random.Random) -> str:
    """Damage an artifact, exchange two of a kind, or put a file in the folder's place."""
    kind = rng.choice(sorted(p for p in folder.iterdir() if p.is_dir()))
    way = rng.choice(("exchange", "file", "damage", "damage", "facts"))
    if way == "exchange":
        for end in (".safetensors", ".safetensors.json"):
            a, b = sorted(p for p in kind.iterdir() if "".join(p.suffixes) == end)[:2]
            a.rename(kind / "x")
            b.rename(a)
            (kind / "x").rename(b)
    elif way == "file":
        shutil.rmtree(kind)
        kind.write_text("mine")
    else:
        path = rng.choice(sorted(p for p in kind.iterdir() if (p.suffix == ".json") == (way == "facts")))
        (_json if way == "facts" else rng.choice((*WHOLE_FILE, _flipped)))(path, rng)
    return f"{kind.name}, {way}"


# Images in MNIST's format.


def write_images(folder: Path) -> None:
    """300 training and 60 test images that look like MNIST, in torchvision's layout."""
    rng = np.random.default_rng(7)
    for part, n in (("train", 300), ("t10k", 60)):
        labels = np.arange(n) % 10
        images = rng.integers(0, 60, (n, 28, 28)) + 19 * labels[:, None, None]
        write_idx(folder, f"{part}-images-idx3-ubyte", images)
        write_idx(folder, f"{part}-labels-idx1-ubyte", labels)


def write_idx(folder: Path, name: str, array: np.ndarray, kind: int = 8) -> None:
    """An array in idx format; kind: 8 for bytes, 0x0D for floats, 0x0C for ints."""
    path = folder / "MNIST" / "raw" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = array.astype({8: ">u1", 0x0C: ">i4", 0x0D: ">f4"}[kind]).tobytes()
    path.write_bytes(struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + content)


def _write(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = _raw(folder, name)
    path.write_bytes(change(path.read_bytes()))


def damage_images(folder: Path, rng: random.Random) -> str:
    """Damage the images so that nobody can train on them as if nothing were; how."""
    part = rng.choice(("train", "t10k"))
    images, labels = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    n = 300 if part == "train" else 60
    ways: Mapping[str, Callable[[], object]] = {
        "fewer labels": lambda: write_idx(folder, labels, np.arange(n - 7) % 10),
        "more labels": lambda: write_idx(folder, labels, np.arange(n + 7) % 10),
        "labels above 9": lambda: write_idx(folder, labels, np.arange(n) % 12),
        "label 255": lambda: write_idx(folder, labels, np.where(np.arange(n) == 5, 255, np.arange(n) % 10)),
        "labels in 2-D": lambda: write_idx(folder, labels, np.zeros((n, 2))),
        "other side": lambda: write_idx(folder, images, np.zeros((n, 20, 20))),
        "not square": lambda: write_idx(folder, images, np.zeros((n, 28, 14))),
        "no side": lambda: write_idx(folder, images, np.zeros((n, 28, 0))),
        "1-D images": lambda: write_idx(folder, images, np.zeros(n)),
        "4-D images": lambda: write_idx(folder, images, np.zeros((n, 28, 28, 3))),
        "floats": lambda: write_idx(folder, images, np.full((n, 28, 28), 0.5), 0x0D),
        "float labels": lambda: write_idx(folder, labels, np.arange(n) % 10 + 0.5, 0x0D),
        "negative labels": lambda: write_idx(folder, labels, -(np.arange(n) % 10), 0x0C),
        "no images": lambda: write_idx(folder, images, np.zeros((0, 28, 28))),
        "nothing": lambda: [write_idx(folder, n, np.zeros((0, *s))) for n, s in ((images, (28, 28)), (labels, ()))],
        "exchanged": lambda: write_idx(folder, images, np.arange(n) % 10),
        "gzip": lambda: _write(folder, images, gzip.compress),
        "huge count": lambda: _write(folder, images, lambda _: struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**15, 2**15)),
    }  # fmt: skip
    name = rng.choice([*ways, "file", "file", "file"])
    if name == "file":
        path, way = _raw(folder, rng.choice((images, labels))), rng.choice(WHOLE_FILE)
        way(path, rng)
        return f"{path.name}{way.__name__}"
    ways[name]()
    return f"{part}, {name}"


def _raw(folder: Path, name: str) -> Path:
    return folder / "MNIST" / "raw" / name


# What communication_saved reads.


def write_csv(path: Path) -> None:
    """The first of the paper's rounds."""
    published = Path(fedssyn_table1.__code__.co_filename).parent / "fedssyn_table1_rounds.csv"
    path.write_text("".join(published.read_text().splitlines(keepends=True)[:8]), encoding="utf-8")


def damage_csv(path: Path, rng: random.Random) -> str:
    """Another value in a cell, or a damage of the whole."""
    values = (
        "nan",
        "inf",
        "-1",
        "0",
        "",
        "x",
        "1e400",
        "9" * 5000,
        ">",
        ">>5",
        "0.5",
        "1e308",
        "½",
        "a\0b",
        '"',
        "10,4",
        "1e-320",
    )
    way = rng.choice((*WHOLE_FILE, None, None, None, None, None, None))
    if way is not None:
        way(path, rng)
        return way.__name__
    lines = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    row, value = rng.randrange(len(lines)), rng.choice(values)
    lines[row][rng.randrange(len(lines[row]))] = value
    path.write_text("\n".join(",".join(line) for line in lines) + "\n", encoding="utf-8")
    return value[:20]


def write_sweep(folder: Path, run: Path, rng: random.Random) -> str:
    """A sweep of two runs, one value in the summary of one of them altered; which."""
    whole = json.loads((run / "summary.json").read_text())
    key = rng.choice([k for k, v in whole.items() if not isinstance(v, list | dict)])
    value = rng.choice([None, "x", -1, 0, 1e308, float("nan"), float("inf"), [], {}, 10**30, 0.5, True, "9" * 5000])
    altered = rng.randrange(2)
    for number, setting in enumerate(("real", "shuffled_synthetic")):
        here = folder / setting
        shutil.copytree(run, here)
        summary = {**whole, "setting": setting, "config": {**whole["config"], "sharing.setting": setting}}
        summary |= {key: value} if number == altered else {}
        (here / "summary.json").write_text(json.dumps(summary))
    if rng.random() < 0.3:
        rng.choice((*WHOLE_FILE, _lines))(folder / "real" / "summary.json", rng)
    return f"{key}: {str(value)[:20]}"
