"""Atomic files: written under a temporary name in the same folder, then renamed."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` so that ``path`` has either its old content or all of the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say what it had no room for
        raise


def unfinished(name: str) -> str | None:
    """The final name of a temporary file of this name; None if it is not a temporary name."""
    found = re.fullmatch(r"\.(.+)\.\d+\.tmp", name)
    return found[1] if found else None


def remove_unfinished(folder: Path, names: str) -> None:
    """Remove temporary files that killed processes left in ``folder``, if the final name matches ``names``.

    names: a regular expression. No process may be writing in the folder.
    """
    for path in folder.glob(".*.tmp"):
        if path.is_file() and re.fullmatch(names, unfinished(path.name) or ""):
            path.unlink()


def write_text(path: Path, content: str) -> None:
    """``write_bytes`` for text."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """``write_bytes`` for JSON; nan and infinity, which JSON does not have, are refused."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def sha256(content: bytes) -> str:
    """Hexadecimal checksum."""
    return hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", facts: Mapping[str, Any]) -> None:
    """Tensors as PATH (safetensors), ``facts`` and the checksum as PATH.json; the second is written last."""
    from safetensors.torch import save  # torch takes seconds to import, and not all who write files have tensors

    # cloned, because safetensors refuses tensors that share their numbers
    content = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    write_bytes(path, content)
    checksums = {"sha256": sha256(content), "facts_sha256": checksum_of(facts)}
    write_json(path.with_name(path.name + ".json"), {**checksums, **facts})


def checksum_of(facts: Mapping[str, Any]) -> str:
    """Hexadecimal checksum of facts, plain values."""
    return sha256(json.dumps(facts, sort_keys=True).encode())


def read_tensors(path: Path) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
    """What ``write_tensors`` wrote; None if neither file exists.

    Raises:
        ValueError: one of the two files is missing, or one is not what was written, or one of the two checksums is
            missing, so that nobody can tell.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    facts_path = path.with_name(path.name + ".json")
    if not path.exists() and not facts_path.exists():
        return None
    try:
        facts = json.loads(facts_path.read_text())
        stated = facts["sha256"], facts["facts_sha256"]
        plain = {name: fact for name, fact in facts.items() if name not in ("sha256", "facts_sha256")}
        intact = (sha256(path.read_bytes()), checksum_of(plain)) == stated
    except KeyError as error:
        raise ValueError(f"{path} is incomplete: its checksum {error} is missing") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:  # JSON of any kind
        raise ValueError(f"{path} is incomplete: {error}") from error
    if not intact:
        raise ValueError(f"{path} was truncated or altered: its checksum is not the one it was written with")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    # copied to where torch puts its tensors: how a kernel rounds can depend on the alignment of its operands
    return {name: t.clone() for name, t in tensors.items()}, plain
