"""What a stranger may have put into a run's folder: links, FIFOs, devices, odd sizes, and values of odd types."""

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from faults.yamls import BOMB

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, -(10**400), 2**63, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "1e999",
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\nb", "a\0b", "\ud800", "‮txt", "../../outside/notes.txt", "/dev/zero",
    "~", "x" * 5000, [], [1], [[]], ["x", None], {}, {"a": 1}, {"a": {"b": []}}, "2020-01-01", "null", "part.py:Mine",
    "builtins:exit", "%s%n", "<script>alert(1)</script>", "=cmd()", "|", "a,b",
)  # fmt: skip
"""In place of another value."""

LINES = (
    b"", b"\n", b"{}", b"[]", b"3", b"null", b'"x"', b"NaN", b"{", b'{"round": 1e999}', b'{"round": null}',
    b'{"round": "1"}',
    b'{"round": -1}', b'{"round": 1.5}', b'{"round": true}', b'{"round": 1, "round": 2}', b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"round": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"\0" * 100, b'{"round": 1, "test/accuracy": "x"}',
    b'{"round": 1, "test/accuracy": NaN}', b'{"round": 1, "test/accuracy": Infinity}',
    b'{"round": 1, "\\u001b[31m": 1}',
    b'{"round": 1, "test/accuracy": [1]}', b'{"round": 1, "test/accuracy": 1e400}', b'{"round": 1, "late": 3}',
)  # fmt: skip
"""Lines of rounds.jsonl and other files."""

LOCKS = (
    "pid 1e999", "1e999", "-1", "0", "1", "99999999999999999999", "{}", '{"pid": 1e999}', '{"pid": "x", "host": 3}',
    "\x1b[31m",
    "process 1 on \x1b[31mhost", "a\nb\nc", "", "\0", "x" * 100_000, '{"pid": [1], "host": null}', "³", "nan",
)  # fmt: skip

MODULE = "open(__import__('os').environ['PWNED'], 'w').close()\nclass Mine: pass\n"
"""A file that says that it was run."""


def _put(path: Path, make: Callable[[Path], object]) -> None:
    """Something in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def _outside(path: Path, rng: random.Random) -> None:
    """A link to a file or folder of the same content outside."""
    target = path.parents[len(path.parts) - path.parts.index("here") - 1] / "outside" / "put" / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        shutil.move(path, target)
    else:
        target.write_text("of others\n")
    path.symlink_to(target)


def _victim(path: Path, rng: random.Random) -> None:
    """A link to somebody's file."""
    victim = (
        path.parents[len(path.parts) - path.parts.index("here") - 1]
        / "outside"
        / rng.choice(("notes.txt", "messages.log"))
    )
    _put(path, lambda p: p.symlink_to(victim))


def _device(path: Path, rng: random.Random) -> None:
    _put(
        path,
        lambda p: p.symlink_to(rng.choice(("/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", "/proc/self/mem"))),
    )


def _fifo(path: Path, rng: random.Random) -> None:
    _put(path, lambda p: os.mkfifo(p))


def _linked_fifo(path: Path, rng: random.Random) -> None:
    os.mkfifo(path.parent / ".fifo")
    _put(path, lambda p: p.symlink_to(path.parent / ".fifo"))


def _socket(path: Path, rng: random.Random) -> None:
    def bind(p: Path) -> None:
        here = os.getcwd()
        os.chdir(p.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(p.name)
        os.chdir(here)

    _put(path, bind)


def _folder(path: Path, rng: random.Random) -> None:
    _put(path, lambda p: p.mkdir())


def _loop(path: Path, rng: random.Random) -> None:
    _put(path, lambda p: p.symlink_to(p.name))


def _dangling(path: Path, rng: random.Random) -> None:
    victim = path.parents[len(path.parts) - path.parts.index("here") - 1] / "outside" / "new.txt"
    _put(path, lambda p: p.symlink_to(victim))


def _sparse(path: Path, rng: random.Random) -> None:
    size = rng.choice((2**30, 20 * 2**30, 2**42))
    if path.is_dir():
        shutil.rmtree(path)
    with open(path, "ab") as file:
        file.truncate(size)


def _gone(path: Path, rng: random.Random) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _bytes(path: Path, rng: random.Random) -> None:
    content = path.read_bytes() if path.is_file() else b""
    i = rng.randrange(len(content) + 1)
    made = rng.choice((
        b"", b"\0" * len(content), content[:i], content[:i] + b"\xff" + content[i + 1 :], b"\xef\xbb\xbf" + content,
        content.replace(b"\n", b"\r\n"), content + b"\n\n", content.decode(errors="replace").encode("utf-16"),
        content * 2,
        content[:i] + bytes([rng.randrange(256)]) + content[i + 1 :], b"\x1f\x8b" + content, content[::-1],
    ))  # fmt: skip
    _put(path, lambda p: p.write_bytes(made))


ANY = (_outside, _victim, _device, _fifo, _linked_fifo, _socket, _folder, _loop, _dangling, _sparse, _gone, _bytes)
"""Of any file or folder."""


def altered(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """The value with one thing in it replaced, dropped or added."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or rng.random() < (0.0 if depth == 0 else 0.4):
        return rng.choice(VALUES)
    key, made = rng.choice(keys), (dict(value) if isinstance(value, dict) else list(value))
    way = rng.random()
    if way < 0.1:
        del made[key]
    elif way < 0.2 and isinstance(made, dict):
        made[rng.choice(("", "x", "\x1b[31m", "a\nb", "x" * 300, "config"))] = rng.choice(VALUES)
    else:
        made[key] = altered(value[key], rng, depth + 1)
    return made


def _json(path: Path, rng: random.Random) -> None:
    facts = altered(json.loads(path.read_text(encoding="utf-8")), rng)
    path.write_text(json.dumps(facts), encoding="utf-8")


def _lines(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines() or [b"{}"]
    i = rng.randrange(len(lines))
    if rng.random() < 0.6 and lines[i].startswith(b"{"):
        lines[i] = json.dumps(altered(json.loads(lines[i]), rng)).encode()
    else:
        lines[i : i + rng.randrange(2)] = [rng.choice(LINES)]
    path.write_bytes(b"\n".join(lines) + b"\n")


def _yaml(path: Path, rng: random.Random) -> None:
    text = path.read_text(encoding="utf-8")
    way = rng.random()
    if way < 0.6:
        text = yaml.safe_dump(altered(yaml.safe_load(text), rng), allow_unicode=rng.random() < 0.5)
    else:
        text = rng.choice((
            text + BOMB, BOMB, text + "<<: *a\n", text + "x: " + "[" * 5000,
            text + "seed: !!python/object/apply:os.system [x]\n",
            text + "data: {name: mnist, download: true, dir: ../outside}\n", text.replace("seed:", "seed: 1\nseed:"),
            text + "a: &a {b: *a}\n", text.replace("download: false", "download: true").replace("name: digits",
            "name: mnist"),
            text + "algorithm: evil.py:Mine\n", text.replace("algorithm: ", "algorithm: evil.py:Mine #"),
            "\ufeff" + text,
            text + "tracking: {tracker: evil.py:Mine}\n", text + "artifacts: ../outside\n", text + "? [1]\n: 2\n",
            text + "data: {dir: ../outside/new, name: cifar10, download: true}\n", text + "config: c.yaml\n",
            text.replace("dir: ", "dir: ../outside #"), text + "federation: {executor: ray_actors}\n",
            text + "out: ../outside/x\n",
        ))  # fmt: skip
    path.write_text(text, encoding="utf-8")


def _long(path: Path, rng: random.Random) -> None:
    """A true file that goes on for 80 MB."""
    ends = {".json": b" ", ".jsonl": b"{}\n", ".yaml": b"# x\n", ".log": b"x\n"}
    with open(path, "ab") as file:
        file.write(ends.get(path.suffix, b"\0") * (80 * 2**20 // len(ends.get(path.suffix, b"\0"))))


def _lock(path: Path, rng: random.Random) -> None:
    path.write_text(rng.choice(LOCKS), encoding="utf-8")


WAYS: Mapping[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    ".json": (_json,) * 12 + (_long,), ".jsonl": (_lines,) * 12 + (_long,), ".yaml": (_yaml,) * 12 + (_long,),
    ".lock": (_lock,) * 12, ".safetensors": (_bytes,) * 4, ".log": (_bytes, _long),
}  # fmt: skip
"""More ways, by a file's last suffix."""

MADE = (".lock", "messages.log", "error.txt", "stopped.json", "noise.json", "audit.json", "clients.jsonl", "memory",
"wandb",
        "STOPPED", ".draft.tmp", "checkpoints/round-000009.safetensors", "checkpoints/round-000009.safetensors.json",
        "partition.png", "replay.json")  # fmt: skip
"""Files that a run may not have and a stranger may add."""


def _small(path: Path) -> bool:
    """Whether it can be read to be damaged again: an earlier damage may have made it a device or terabytes of zeros."""
    return not path.is_symlink() and path.lstat().st_size < 2**28


def damage(run: Path, rng: random.Random) -> str:
    """Damage something in a run's folder; what and how."""
    names = [str(p.relative_to(run)) for p in sorted(run.rglob("*")) if p.suffix not in (".png", ".py") and _small(p)]
    weights = {"summary.json": 9, "rounds.jsonl": 8, "config.yaml": 9, "partition.json": 3, "environment.json": 2}
    names += [name for name, times in weights.items() for _ in range(times) if name in names]
    names += [*MADE, ".lock", "messages.log"]
    path = run / rng.choice(names)
    ways = [*ANY, *(WAYS.get(path.suffix or path.name, ()) if path.is_file() else ())]
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        if path.name == ".lock":
            ways += [_lock] * 12
    way = rng.choice(ways)
    if way in (_json, _lines, _yaml):
        before = path.read_bytes()
        try:
            way(path, rng)
        except (ValueError, RecursionError):
            path.write_bytes(before + b"{")
    else:
        way(path, rng)
    return f"{path.relative_to(run)}{way.__name__}"
