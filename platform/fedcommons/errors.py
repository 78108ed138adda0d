"""What goes wrong by the user's or a client's doing, each said in one sentence."""

import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Self

from fedcommons.files import write_text

SHOWN = 80
"""The most characters of a value that a sentence echoes."""


class UserError(Exception):
    """A request that cannot be met: field, value, what is allowed, the nearest valid name. Raised before any work.

    Of a word that is longer than ``SHOWN`` the beginning stands in the sentence; of a path if it is four times as long.
    """

    def __init__(self, sentence: str) -> None:
        long = rf"(?<!\S)[^\s/]{{{SHOWN + 1},}}(?!\S)|\S{{{4 * SHOWN + 1},}}"
        super().__init__(re.sub(long, lambda word: _cut(word[0]), sentence))


class ClientError(RuntimeError):
    """A client's computation failed; ``sentence`` names client, round and algorithm.

    client, round: which, where one client can be played again. trace: its own traceback as text, because an exception
    that comes from another process has lost it.
    """

    def __init__(self, sentence: str, client: int | None = None, round: int | None = None, trace: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.client, self.round, self.trace = sentence, client, round, trace

    @classmethod
    def of(cls, error: Exception, client: int, round: int, algorithm: str, shape: Sequence[int]) -> Self:
        """What a client's code raised; ``shape``: of its training data. The exception's notes say what it was doing."""
        doing = "; ".join([f"training data {tuple(shape)}", *getattr(error, "__notes__", [])])
        where = f"client {client}, round {round}, {algorithm}"
        return cls(f"{where}: {sentence(error)} ({doing})", client, round, "".join(traceback.format_exception(error)))


def shown(value: object) -> str:
    """A value as a sentence echoes it: text in quotes and without control characters, cut at ``SHOWN``."""
    return _cut(f"{value:g}" if isinstance(value, float) else repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def sentence(error: BaseException) -> str:
    """What happened, in one line."""
    cause = getattr(error, "cause", error)  # Ray raises an error of its own around that of another process
    if isinstance(cause, ClientError):
        return cause.sentence
    if isinstance(cause, UserError):
        return str(cause)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


@contextmanager
def leaving_errors(folder: Path, own: Sequence[str] = ()) -> Iterator[None]:
    """Leave what goes wrong in ``folder/error.txt``: a sentence, then the traceback, and how to play a client again.

    own: options that name the run's parts of somebody's own.
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
    """The sentence that ``leaving_errors`` left, and where the rest is; None if it left none."""
    path = folder / "error.txt"
    if not path.is_file():
        return None
    first = path.read_text(errors="replace").partition("\n")[0]
    return f"{first} (traceback: {path})"


def unknown(what: str, name: str, known: Iterable[str], besides: str = "") -> UserError:
    """The error for a name that is not among ``known``, with the nearest valid one offered.

    besides: what else is allowed, after the list of the known ones.
    """
    known = sorted(known)
    listing = f" Known: {', '.join([*known, *([besides] if besides else [])])}." if len(known) <= 16 else " See --help."
    return UserError(f"unknown {what} {shown(name)}{nearest(name, known)}{listing}")


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or a full stop where nothing is near.

    Of dotted names the last component counts first: ``--alpha`` is near ``--partition.alpha``.
    """
    leaves: dict[str, list[str]] = {}
    for one in sorted(known):
        leaves.setdefault(_leaf(one), []).append(one)
    if leaf := get_close_matches(_leaf(name), list(leaves), n=1, cutoff=0.6):
        return f"; did you mean {get_close_matches(name, leaves[leaf[0]], n=1, cutoff=0)[0]!r}?"
    return "."


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")
