"""Errors of user requests and of user code, each with a message of one sentence."""

import re
import sys
import sysconfig
import traceback
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from errno import EAGAIN, ENOMEM
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

SHOWN = 80
"""Maximum number of characters of a value in a message; longer values are cut."""

FEW = 5
"""Maximum number of names that a message suggests."""

LONGEST = 190
"""Maximum length of a sentence about user code: with ``error: `` before it, a line has at most 200 characters."""

_HERE = Path(__file__).resolve().parent
_NOT_USER_CODE = tuple(
    f"{path}/"
    for path in (
        _HERE,
        _HERE.parent.parent / "lightning_modules",
        *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)

RUN = "python sweeps/run.py" if (_HERE.parent.parent / "sweeps" / "run.py").is_file() else "fedcommons run"
"""Command that runs one experiment: the script in a clone of the repository, else the installed command."""

_TEXT_DIRECTION = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of the text after them."""

T = TypeVar("T")


class UserError(Exception):
    """A user request that cannot be met; the message names field, value, allowed values and the nearest valid name.

    The error is raised before any work. In the sentence, words longer than ``SHOWN`` characters are cut, and so are
    paths longer than four times ``SHOWN``. Control characters are escaped, because file names are not trusted.
    """

    def __init__(self, sentence: str) -> None:
        long = rf"(?<!\S)[^\s/]{{{SHOWN + 1},}}(?!\S)|\S{{{4 * SHOWN + 1},}}"
        super().__init__(clean(re.sub(long, lambda word: _cut(word[0]), sentence)))


class ClientError(RuntimeError):
    """A failure of user code, usually in a client's job; ``sentence`` names file, method, client and round if known.

    client, round: set if this client can be run again alone. trace: the traceback as text, because an exception loses
    its traceback when it is sent from another process.
    """

    def __init__(self, sentence: str, client: int | None = None, round: int | None = None, trace: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.client, self.round, self.trace = sentence, client, round, trace

    @classmethod
    def from_exception(cls, error: BaseException, where: str, part: str = "", doing: Sequence[str] = ()) -> Self:
        """Return the error that reports what user code has raised.

        where: the code that was called. doing: what the code was doing. part: name of the component, which the message
        quotes if the failing line is not in the user's file.
        """
        trace = "" if lacks_memory(error) else "".join(traceback.format_exception(error))  # user code is not the cause
        return cls(_describe(error, where, part, doing), trace=trace)


class Warned(str):
    """A warning about a problem that does not stop the run; it is also printed with ``--quiet``."""


class Ended(SystemExit):
    """The exit of this process after a signal; unlike a ``SystemExit`` of user code, it is not turned into an error."""


class user_code_context:
    """Context around a call of user code that turns every exception into a ``ClientError`` with one sentence.

    Checks of what user code returns stand in the same context. ``UserError``, ``ClientError``, Ctrl-C and the end of
    the process pass unchanged. The context is no generator, because contextlib lets a ``StopIteration`` through.

    Args:
        part: an object, class or function, which the message names by file and name; or the name itself.
        method: name of the called method; empty if the part itself is called.
        at: the time of the call, such as ``round 3``.

    Raises:
        ClientError: another exception was raised; ``SystemExit`` counts.
    """

    def __init__(self, part: object, method: str = "", *at: str) -> None:
        self.part, self.method, self.at = part, method, at

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, UserError | ClientError) or is_exit(error):
            return
        part = self.part if isinstance(self.part, str) else name_of(self.part)
        called = f"{part}.{self.method}" if self.method else part
        raise ClientError.from_exception(error, ", ".join([called, *self.at])) from error


def is_exit(error: BaseException) -> bool:
    """Return whether the user or a signal, not user code, ends this process."""
    return isinstance(error, KeyboardInterrupt | Ended) or hasattr(error, "ray_terminate_msg")  # Ray's own SystemExit


@contextmanager
def before_any_work() -> Iterator[None]:
    """Turn a failure of user code in this context into a request that cannot be met.

    Raises:
        UserError: a ``ClientError`` was raised; the sentence is the same.
    """
    try:
        yield
    except ClientError as error:
        raise UserError(error.sentence) from error


def require_type(kind: type[T], value: object, what: str = "") -> T:
    """Return the value that user code returned, if the value has this type. what: the type in words.

    Raises:
        ValueError: the value has another type.
    """
    if isinstance(value, kind):
        return value
    raise ValueError(f"it must give {what or f'a {kind.__name__}'}, got {type(value).__name__}")


def name_of(part: Any) -> str:
    """Return file and name of a class, a function or an object's class, such as ``my_lab.py:FedAvgM``."""
    kind = part if hasattr(part, "__qualname__") else type(part)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _cut(f"{Path(file).name if file else kind.__module__}:{kind.__name__}")


def quote(value: object) -> str:
    """Return a value for a message: text in quotes, control characters escaped, cut at ``SHOWN`` characters."""
    return _cut(f"{value:g}" if isinstance(value, float) else repr(value))


def clean(text: str) -> str:
    """Return text for display; control characters, surrogates and changes of text direction are escaped."""
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(c: str) -> str:
    is_odd = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _TEXT_DIRECTION
    return c.encode("unicode_escape").decode() if is_odd else c


def _cut(text: str, length: int = SHOWN) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def sentence(error: BaseException) -> str:
    """Return the error's message in one line."""
    cause = getattr(error, "cause", None)  # Ray wraps the error of another process in its own error
    cause = cause if isinstance(cause, BaseException) else error
    if isinstance(cause, ClientError):
        return cause.sentence
    message = message_of(cause)
    if isinstance(cause, UserError):
        return message
    if lacks_memory(cause):
        return f"out of memory: {_cut(message) or 'none is left'}"
    return f"{type(cause).__name__}: {message}" if message else type(cause).__name__


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error reports a lack of memory, or of resources for one more thread or process."""
    if isinstance(error, OSError):
        return error.errno in (ENOMEM, EAGAIN)
    matches = isinstance(error, RuntimeError | ImportError) and any(words in message_of(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or matches


_NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "bad_alloc", "new thread", "map segment",
    "create a primitive",
)  # fmt: skip
"""Words for a lack of memory in the errors of torch, oneDNN, threading and the loader of shared libraries."""


def message_of(error: BaseException) -> str:
    """Return the error's message in one line; ``str`` of an error class of the user may itself fail."""
    try:
        return clean(" ".join(str(error).split()))
    except BaseException:
        return "it cannot say why"


def _describe(error: BaseException, where: str, part: str, doing: Sequence[str]) -> str:
    """Return ``where: message (line in the user's file; doing)``; the message is cut first if the text is too long."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_frames = [(code, line) for code, line in frames if is_user_code(code.co_filename)]
    place = [f"{Path(code.co_filename).name}, line {line} in {code.co_name}" for code, line in user_frames[-1:]]
    behind = "; ".join(filter(None, [*(place or [part]), *doing]))
    behind = f" ({_cut(behind, LONGEST // 2)})" if behind else ""
    message = sentence(error)
    if type(error) is ValueError and not user_frames:  # raised by the package, so the type says nothing
        message = message.removeprefix("ValueError: ")
    where = _cut(where, LONGEST // 2)
    return f"{where}: {_cut(message, max(LONGEST - len(where) - len(behind) - 2, 20))}{behind}"


@lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: not installed, not part of Python and not part of this package."""
    path = Path(file).resolve()
    installed = str(path).startswith(_NOT_USER_CODE) or {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not file.startswith("<")


def unknown(what: str, name: str, names: Iterable[str], besides: str = "") -> UserError:
    """Return the error for a name that is not in ``known``; its message suggests the nearest name.

    besides: what else is allowed, listed after the known names.
    """
    names = sorted(names)
    listing = f" Known: {', '.join([*names, *([besides] if besides else [])])}." if len(names) <= 16 else " See --help."
    return UserError(f"unknown {what} {quote(name)}{nearest(name, names)}{listing}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?``, or a full stop if no name is near.

    A name that differs only in dots, dashes and capitals is nearest. Next come names that start with ``name``, if they
    are few. Else dotted names are compared by their last component first: ``--alpha`` is near ``--partition.alpha``.
    """
    names, letters = sorted(names), re.sub(r"[-_.]", "", name).lower()
    same = [candidate for candidate in names if re.sub(r"[-_.]", "", candidate).lower() == letters]
    starting = [candidate for candidate in names if len(letters) > 2 and candidate.startswith(name)]
    if (near := same[:1] or starting) and len(near) <= FEW:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    leaves: dict[str, list[str]] = {}
    for candidate in names:
        leaves.setdefault(_leaf(candidate), []).append(candidate)
    if leaf := get_close_matches(_leaf(name), list(leaves), n=1, cutoff=0.6):
        return f"; did you mean {get_close_matches(name, leaves[leaf[0]], n=1, cutoff=0)[0]!r}?"
    return "."


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")
