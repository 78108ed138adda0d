"""Errors of requests and of clients, each told in one sentence."""

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Self

from fedcommons.files import write_text
from fedcommons.files.stored import UnreadableError, clean, text_of

SHOWN = 80
"""Longer values are cut to this many characters in a message."""


class UserError(Exception):
    """A request that cannot be met: field, value, what is allowed, the nearest valid name. Raised before any work.

    Words longer than ``SHOWN`` characters are cut in the sentence, and so are paths of four times that length. What a
    terminal would obey is escaped: names of files and folders may be anybody's.
    """

    def __init__(self, sentence: str) -> None:
        long = rf"(?<!\S)[^\s/]{{{SHOWN + 1},}}(?!\S)|\S{{{4 * SHOWN + 1},}}"
        super().__init__(clean(re.sub(long, lambda word: _cut(word[0]), sentence)))


class ClientError(RuntimeError):
    """A client's computation failed; ``sentence`` names client, round and algorithm.

    client, round: set if this client can be run again alone. trace: its traceback as text, because an exception loses
    its traceback on the way from another process.
    """

    def __init__(self, sentence: str, client: int | None = None, round: int | None = None, trace: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.client, self.round, self.trace = sentence, client, round, trace

    @classmethod
    def of(cls, error: Exception, client: int, round: int, algorithm: str, shape: Sequence[int]) -> Self:
        """The error for an exception of a client's code. ``shape``: of its training data; the notes say what it did."""
        doing = "; ".join([f"training data {tuple(shape)}", *getattr(error, "__notes__", [])])
        where = f"client {client}, round {round}, {algorithm}"
        return cls(f"{where}: {sentence(error)} ({doing})", client, round, "".join(traceback.format_exception(error)))


def shown(value: object) -> str:
    """A value for a message: text in quotes, control characters escaped, cut at ``SHOWN`` characters."""
    return _cut(f"{value:g}" if isinstance(value, float) else repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def sentence(error: BaseException) -> str:
    """The error's message in one line."""
    cause = getattr(error, "cause", error)  # Ray raises an error of its own around that of another process
    if isinstance(cause, ClientError):
        return cause.sentence
    if isinstance(cause, UserError):
        return str(cause)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


@contextmanager
def leaving_errors(folder: Path, own: Sequence[str] = ()) -> Iterator[None]:
    """Write an error to ``folder/error.txt``: its sentence and traceback, and how to run the client again.

    own: options that name the user's own parts in the run.
    """
    path = folder / "error.txt"
    path.unlink(missing_ok=True)  # of the attempt before
    try:
        yield
    except Exception as error:
        if isinstance(error, ClientError) and error.client is not None:
            options = [f"--replay {quote(str(folder))} --round {error.round} --client {error.client}", *own]
            error.add_note(f"To run this client alone again: python sweeps/run.py {' '.join(options)}")
        with suppress(OSError):  # a full disk must not hide what happened
            write_text(path, f"{sentence(error)}\n\n{traceback.format_exc()}")
        raise


def left_in(folder: Path) -> str | None:
    """The sentence in ``folder/error.txt``, and where its traceback is; None if there is no such file."""
    path = folder / "error.txt"
    try:
        found = text_of(path)
    except UnreadableError as error:
        return f"{error}"
    return None if found is None else f"{clean(found.partition(chr(10))[0])} (traceback: {path})"


def unknown(what: str, name: str, known: Iterable[str], besides: str = "") -> UserError:
    """The error for a name that is not in ``known``; it suggests the nearest name.

    besides: what else is allowed, told after the known names.
    """
    known = sorted(known)
    listing = f" Known: {', '.join([*known, *([besides] if besides else [])])}." if len(known) <= 16 else " See --help."
    return UserError(f"unknown {what} {shown(name)}{nearest(name, known)}{listing}")


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or a full stop if no name is near.

    A name that differs in its dots and dashes only, or the only one that begins so, is the nearest. Else dotted names
    are compared by their last component first: ``--alpha`` is near ``--partition.alpha``.
    """
    known, letters = sorted(known), re.sub(r"[-_.]", "", name)
    same = [one for one in known if re.sub(r"[-_.]", "", one) == letters]
    begun = [one for one in known if len(letters) > 2 and one.startswith(name)]
    if same or len(begun) == 1:
        return f"; did you mean {(same or begun)[0]!r}?"
    leaves: dict[str, list[str]] = {}
    for one in known:
        leaves.setdefault(_leaf(one), []).append(one)
    if leaf := get_close_matches(_leaf(name), list(leaves), n=1, cutoff=0.6):
        return f"; did you mean {get_close_matches(name, leaves[leaf[0]], n=1, cutoff=0)[0]!r}?"
    return "."


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")
