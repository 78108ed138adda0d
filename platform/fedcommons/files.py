"""Files that are never half-written: a temporary name in the same folder, then a rename."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` holds all of it or what it held before, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed while they wrote have left here; only for a folder that nobody writes."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_text(path: Path, content: str) -> None:
    """``write_bytes`` for text."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """``write_bytes`` for JSON; refuses nan and infinity, which JSON has no word for."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def sha256(content: bytes) -> str:
    """Hexadecimal checksum."""
    return hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors as PATH (safetensors), ``facts`` and the checksum as PATH.json; the second is written last."""
    # cloned, because safetensors refuses tensors that share their numbers
    content = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    write_bytes(path, content)
    write_json(path.with_name(path.name + ".json"), {"sha256": sha256(content), **facts})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What ``write_tensors`` wrote; None where there is nothing.

    Raises:
        ValueError: the pair is incomplete, or the tensors are not those that were written.
    """
    facts_path = path.with_name(path.name + ".json")
    if not path.exists() and not facts_path.exists():
        return None
    try:
        facts = json.loads(facts_path.read_text())
        intact = sha256(path.read_bytes()) == facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is incomplete: {error}") from error
    if not intact:
        raise ValueError(f"{path} was truncated or altered: its checksum is not the one it was written with")
    # copied to where torch puts its tensors: how a kernel rounds can depend on the alignment of its operands
    return {name: t.clone() for name, t in load_file(path).items()}, facts
