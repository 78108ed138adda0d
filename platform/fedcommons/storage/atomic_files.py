"""Atomic writing of files, first under a temporary name in the same folder; tensors are stored with checksums."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcommons.storage import safe_read

if TYPE_CHECKING:
    from torch import Tensor


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically: even after a crash, the file has its old content or all new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # a killed process with the same process id may have left this file
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # the error of a full disk has no file name
        raise


def unfinished(name: str) -> str | None:
    """Return the final name that belongs to the temporary name ``name``; None if ``name`` is not a temporary name."""
    match = re.fullmatch(r"\.(.+)\.\d+\.tmp", name)
    return match[1] if match else None


def remove_unfinished(folder: Path, names: str) -> None:
    """Remove the temporary files of killed processes in ``folder`` whose final name matches ``names``.

    names: a regular expression. No other process may be writing to the folder at this time.
    """
    for path in folder.glob(".*.tmp"):
        if path.is_file() and re.fullmatch(names, unfinished(path.name) or ""):
            path.unlink()


def write_text(path: Path, content: str) -> None:
    """Write a text file atomically, in UTF-8."""
    write_bytes(path, content.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. NaN and infinity, which JSON does not have, raise a ``ValueError``."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def sha256(content: bytes) -> str:
    """Return the hexadecimal SHA-256 checksum of the content."""
    return hashlib.sha256(content).hexdigest()


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", facts: Mapping[str, Any]) -> None:
    """Write tensors to ``path`` (safetensors), then ``facts`` (plain values) and checksums to ``path``.json."""
    from safetensors.torch import save  # imported late, as torch takes seconds and few callers write tensors

    # The tensors are cloned because safetensors refuses tensors that share storage.
    content = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    write_bytes(path, content)
    checksums = {"sha256": sha256(content), "facts_sha256": checksum_of(facts)}
    write_json(path.with_name(path.name + ".json"), {**checksums, **facts})


def checksum_of(facts: Mapping[str, Any] | None) -> str:
    """Return the hexadecimal SHA-256 checksum of facts, a mapping of plain values, independent of their order."""
    return sha256(json.dumps(facts, sort_keys=True).encode())


def read_tensors(path: Path, inner: int = 0) -> "tuple[dict[str, Tensor], dict[str, Any]] | None":
    """Return the tensors and facts that ``write_tensors`` wrote; None if neither of the two files exists.

    The tensors are loaded only if the checksums match. A file larger than this machine's memory is not read.
    inner: number of last components of ``path`` that must not be links (see ``safe_read.open_file``).

    Raises:
        ValueError: a file or checksum is missing, a checksum does not match, or a path is not a regular file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    facts_path = path.with_name(path.name + ".json")
    try:
        facts = safe_read.json_of(facts_path, inner)
    except safe_read.UnreadableError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} is incomplete: {error}") from None
    with safe_read.open_file(path, memory(), inner) as file:
        if file is None and facts is None:
            return None
        if file is None or facts is None:
            raise ValueError(f"{path} is incomplete: {facts_path if facts is None else path} is missing")
        try:
            stated = facts["sha256"], facts["facts_sha256"]
            plain = {name: fact for name, fact in facts.items() if name not in ("sha256", "facts_sha256")}
            intact = _is_whole(file) and (_checksum(file), checksum_of(plain)) == stated
        except KeyError as error:
            raise ValueError(f"{path} is incomplete: its checksum {error} is missing") from error
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:  # e.g., the facts are a list
            raise ValueError(f"{path} is incomplete: {error}") from error
        if not intact:
            raise ValueError(f"{path} was truncated or altered: its checksum does not match")
        try:
            tensors = load_file(f"/dev/fd/{file.fileno()}")  # reads the checked file, even if ``path`` was replaced
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    # Clones have the memory alignment of torch's tensors. With another alignment, a kernel may round differently.
    return {name: t.clone() for name, t in tensors.items()}, plain


def memory() -> int:
    """Return the size of this machine's RAM in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_whole(file: BufferedReader) -> bool:
    """Return whether a safetensors file has the length that its header states. The tensors themselves are not read."""
    if (length := int.from_bytes(file.read(8), "little")) > safe_read.LARGEST_JSON:
        return False
    try:
        entries = [tensor for name, tensor in json.loads(file.read(length)).items() if name != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in entries), default=0)
        return 8 + length + end == os.fstat(file.fileno()).st_size
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # the header has another structure
        return False


def _checksum(file: BufferedReader) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
