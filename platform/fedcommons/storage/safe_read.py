"""Reading what somebody else may have put into a run folder: regular files inside it, up to a stated size.

A link, a pipe, a device or a folder in the place of a file is no file of a run. It is not followed and not waited for:
a file is opened without following links, and looked at once it is open, so that nobody can exchange it in between.
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
"""The most bytes of a JSON file: the partition of 10^5 clients over 62 classes has 40 MB."""

LARGEST_LINES = 2**30
"""The most bytes of a file with a line a round: 10^5 rounds of 10 kB."""

LONGEST_LINE = 16 * 2**20
"""The most bytes of such a line: four metrics of each of 10^5 clients."""

LARGEST_TEXT = 100_000
"""So many bytes are read of a file of words, such as error.txt."""

DEEPEST = 100
"""How deeply the values of a summary may be nested."""

_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}  # fmt: skip


class UnreadableError(ValueError):
    """What stands there is no regular file, too large, or cannot be read."""


@contextmanager
def opened(path: Path, most: float, inner: int = 1) -> Iterator[BufferedReader | None]:
    """The file for reading; None if there is nothing of this name.

    most: bytes that it may have. inner: how many of the last components of ``path`` must not be links: 1 for a file in
    a run folder, 2 for one in a folder in it, 0 where links are followed.

    Raises:
        UnreadableError: it is no regular file, larger than ``most``, or cannot be opened.
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
            raise UnreadableError(f"{path} has {status.st_size:,} bytes, and at most {most:,.0f} are read")
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
    """What is wrong with the first of the last components that is neither a folder nor, as the last one, a file."""
    for there in [*reversed(path.parents[: max(0, inner - 1)]), path]:
        try:
            mode = os.lstat(there).st_mode
        except OSError:
            return None
        if not (stat.S_ISREG(mode) if there == path else stat.S_ISDIR(mode)):
            return _is_no_file(there, mode)
    return None


def _is_no_file(path: Path, mode: int) -> str:
    return f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, and a run has regular files and folders only"


def content(path: Path, most: int, inner: int = 1) -> bytes | None:
    """All of the file; None if there is nothing of this name. Errors: see ``opened``."""
    try:
        with opened(path, most, inner) as file:
            return None if file is None else file.read(most + 1)[:most]
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror})") from None


def text_of(path: Path) -> str | None:
    """The beginning of a file of words; None if there is nothing of this name. Errors: see ``opened``."""
    try:
        with opened(path, LARGEST_JSON) as file:
            return None if file is None else file.read(LARGEST_TEXT).decode(errors="replace")
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror})") from None


def json_of(path: Path, inner: int = 1) -> Any:
    """What a JSON file holds, all its numbers finite; None if there is nothing of this name.

    Raises:
        UnreadableError: see ``opened``.
        ValueError: it is no such JSON.
    """
    found = content(path, LARGEST_JSON, inner)
    try:
        return None if found is None else parsed(found)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or JSON of very many brackets
        raise ValueError(f"{path} is not JSON ({error})") from None


def parsed(found: bytes) -> Any:
    """The value of this JSON.

    Raises:
        ValueError: it is not JSON, or has a number that is not finite or too large for a float.
        RecursionError: its brackets are nested too deeply.
    """
    return json.loads(found.decode(), parse_constant=_number, parse_float=_number, parse_int=_whole)


def _number(text: str) -> float:
    if not abs(value := float(text)) <= sys.float_info.max:
        raise ValueError(f"it has the number {text[:20]}")
    return value


def _whole(text: str) -> int:
    if abs(value := int(text)) > sys.float_info.max:
        raise ValueError(f"it has a number of {len(text)} digits")
    return value


def write_alone(path: Path, text: str) -> None:
    """Append to a file of ours; what stands there and is no regular file, or has a second name, is not written to.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(f"{path} is no file of ours alone")
        file.write(text)


def flaw(folder: Path, files: str, folders: Collection[str] = ()) -> str | None:
    """A part of a sentence on the first of these names in ``folder`` that is no regular file, or no folder; or None.

    files: a regular expression. folders: names.
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


def cleaned(value: Any, left: int = DEEPEST) -> Any:
    """A plain value in which all texts, those of keys too, are ``clean``.

    Raises:
        ValueError: it is nested more deeply than ``left``.
    """
    if not left:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        return {clean(name): cleaned(inner, left - 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [cleaned(inner, left - 1) for inner in value]
    return clean(value) if isinstance(value, str) else value
