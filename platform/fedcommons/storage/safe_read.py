"""Safe readers of files in a run folder, which another user may have written: only regular files of limited size.

A link, pipe, device or folder in the place of a file is rejected. The readers neither follow links nor wait for pipes.
They check the file after opening it, so that no other process can replace the file between the check and the reading.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from fedcommons.errors import clean

LARGEST_JSON = 64 * 2**20
"""Maximum bytes of a JSON file: partition.json of 10^5 clients and 62 classes has 40 MB."""

LARGEST_LINES = 2**30
"""Maximum bytes of a file with one line per round: 10^5 rounds of 10 kB."""

LONGEST_LINE = 16 * 2**20
"""Maximum bytes of a line of a file with one line per round: four metrics of each of 10^5 clients."""

LARGEST_TEXT = 100_000
"""Maximum bytes that are read from a text file, such as error.txt."""

DEEPEST = 100
"""Maximum nesting depth of the values of a summary."""

_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}  # fmt: skip


class UnreadableError(ValueError):
    """A path is not a regular file, or the file is too large or cannot be read."""


@contextmanager
def open_file(path: Path, most: float, inner: int = 1) -> Iterator[BufferedReader | None]:
    """Yield the file, opened for reading; None if ``path`` does not exist.

    most: maximum bytes of the file. inner: number of last components of ``path`` that must not be links: 1 for a file
    in a run folder, 2 for a file in a subfolder of a run folder, 0 to follow links.

    Raises:
        UnreadableError: the path is not a regular file, or the file is larger than ``most`` or cannot be opened.
    """
    try:
        descriptor = _descriptor(path, inner)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise UnreadableError(_refused(path, inner) or f"{path} cannot be read ({error.strerror})") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableError(_is_no_file(path, status.st_mode))
        if status.st_size > most:
            raise UnreadableError(f"{path} has {status.st_size:,} bytes, and at most {most:,.0f} are allowed")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _descriptor(path: Path, inner: int) -> int:
    parents, flags = path.parts[len(path.parts) - inner : -1], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not inner:
        return os.open(path, flags)
    folder = os.open(path.parents[inner - 1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in parents:
            outer = folder
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
            os.close(outer)
        return os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def _refused(path: Path, inner: int) -> str | None:
    """Describe the first component of ``path`` with a wrong file type, as part of a sentence; None if no type is wrong.

    Only the last ``inner`` components are checked: the last must be a regular file, the other components folders.
    """
    for component in [*reversed(path.parents[: max(0, inner - 1)]), path]:
        try:
            mode = os.lstat(component).st_mode
        except OSError:
            return None
        if not (stat.S_ISREG(mode) if component == path else stat.S_ISDIR(mode)):
            return _is_no_file(component, mode)
    return None


def _is_no_file(path: Path, mode: int) -> str:
    return f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, but a run has only regular files and folders"


def content(path: Path, most: int, inner: int = 1) -> bytes | None:
    """Return the content of a file of at most ``most`` bytes; None without a file. Errors, inner: see ``open_file``."""
    try:
        with open_file(path, most, inner) as file:
            return None if file is None else file.read(most + 1)[:most]
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror})") from None


def text_of(path: Path) -> str | None:
    """Return the first ``LARGEST_TEXT`` bytes of a file as text; None without a file. Errors: see ``open_file``."""
    text = content(path, LARGEST_JSON)
    return None if text is None else text[:LARGEST_TEXT].decode(errors="replace")


def json_of(path: Path, inner: int = 1) -> Any:
    """Return the value of a JSON file; None if ``path`` does not exist. inner: see ``open_file``.

    Raises:
        UnreadableError: see ``open_file``.
        ValueError: the content is not JSON, or has a number that is not finite.
    """
    json_bytes = content(path, LARGEST_JSON, inner)
    try:
        return None if json_bytes is None else parsed(json_bytes)
    except (ValueError, RecursionError) as error:  # the text is not JSON or UTF-8, or is nested too deeply
        raise ValueError(f"{path} is not JSON ({error})") from None


def parsed(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, or has a number that is not finite or too large for a float.
        RecursionError: the brackets are nested too deeply.
    """
    return json.loads(text.decode(), parse_constant=_number, parse_float=_number, parse_int=_number)


def _number(text: str) -> float:
    value = int(text) if text.removeprefix("-").isdecimal() else float(text)
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"it has the number {text[:20]}")
    return value


def write_alone(path: Path, text: str) -> None:
    """Append text to a regular file without further hard links. The file is created if it does not exist.

    Raises:
        OSError: the path is not a regular file, has a second hard link, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(f"{path} is not a regular file or has a second hard link")
        file.write(text)


def flaw(folder: Path, files: str, folders: Collection[str] = ()) -> str | None:
    """Describe the first entry of ``folder`` with a wrong file type, as a part of a sentence; None if all are right.

    files: regular expression of the names that must be regular files. folders: names that must be folders. Entries with
    other names are ignored.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for entry in entries:
        is_folder = entry.name in folders
        is_right = entry.is_dir(follow_symlinks=False) if is_folder else entry.is_file(follow_symlinks=False)
        if not is_right and (is_folder or re.fullmatch(files, entry.name)):
            return _is_no_file(folder / entry.name, entry.stat(follow_symlinks=False).st_mode)
    return None


def cleaned(value: Any, depth: int = DEEPEST) -> Any:
    """Return a plain value with the control characters in all strings and dictionary keys escaped (``errors.clean``).

    Raises:
        ValueError: the value is nested more deeply than ``depth`` levels.
    """
    if not depth:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        return {clean(name): cleaned(inner, depth - 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [cleaned(inner, depth - 1) for inner in value]
    return clean(value) if isinstance(value, str) else value
