"""Exceptions for invalid input of the user and for failures of user code, each with a message of one sentence."""

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

WIDTH = 80
"""Maximum number of characters of a value that a message quotes; a longer value is cut."""

FEW = 5
"""Maximum number of names that a message suggests."""

LONGEST = 290
"""Maximum number of characters of a message about user code, in which the shapes of two tensors have room."""

_HERE = Path(__file__).resolve().parent
_PYTHON = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_USER_CODE = tuple(f"{path}/" for path in (_HERE, _HERE.parent.parent / "lightning_modules", *_PYTHON))

RUN = "python sweeps/run.py" if (_HERE.parent.parent / "sweeps" / "run.py").is_file() else "fedcommons run"
"""Command that runs one experiment: ``sweeps/run.py`` in a clone of the repository, else the installed command."""

_TEXT_DIRECTION = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Unicode characters that change the direction (left to right, right to left) of the text after them."""

T = TypeVar("T")


class UserError(Exception):
    """Error for invalid input of the user; the message names the field, the value, and the values that are allowed.

    The error is raised before training starts. In the message, words longer than ``WIDTH`` characters are cut, and so
    are paths longer than four times ``WIDTH``. Control characters are escaped, because a message may quote file names,
    which are not trusted.
    """

    def __init__(self, sentence: str) -> None:
        long = rf"(?<!\S)[^\s/]{{{WIDTH + 1},}}(?!\S)|\S{{{4 * WIDTH + 1},}}"
        super().__init__(clean(re.sub(long, lambda word: _cut(word[0]), sentence)))


class ClientError(RuntimeError):
    """Error for a failure of user code, usually while a worker process runs a client.

    sentence: the message, which names the file, method, client and round if they are known. client, round: numbers of
    the client and the round, set if this client's work can be repeated alone. trace: the traceback as text, because an
    exception loses the traceback when it is sent from another process.
    """

    def __init__(self, sentence: str, client: int | None = None, round: int | None = None, trace: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.client, self.round, self.trace = sentence, client, round, trace

    @classmethod
    def from_exception(cls, error: BaseException, where: str, part: str = "", doing: Sequence[str] = ()) -> Self:
        """Return a ``ClientError`` that reports the exception ``error`` of user code.

        Args:
            error: the exception, whose traceback is stored as ``trace``, unless memory is lacking.
            where: beginning of the message: the name of the called code, or the client, round and method.
            part: name of the component; the message quotes this name if the failing line is not in the user's file.
            doing: phrases at the end of the message that say what the code was doing.
        """
        # A lack of memory is not a fault of user code, so its traceback would not help the user.
        trace = "" if lacks_memory(error) else "".join(traceback.format_exception(error))
        return cls(_describe(error, where, part, doing), trace=trace)


class DivergenceError(ClientError):
    """Error that ends a run whose training diverged: all replies of a round, or the server's state, are not usable."""


class Warned(str):
    """Text of a warning about a problem that does not stop the run; the text is printed even with ``--quiet``."""


class Ended(SystemExit):
    """Exit of this process after a signal; unlike a ``SystemExit`` of user code, it is not turned into an error."""


class user_code_context:
    """Context for a call of user code: it turns an exception into a ``ClientError`` with a message of one sentence.

    Checks of the values that user code returns run in the same context. ``UserError``, ``ClientError``, Ctrl-C and
    ``Ended`` pass unchanged. The context is a class and not a generator function of contextlib, because contextlib does
    not convert a ``StopIteration``.

    Args:
        part: the called object, class or function, which the message names by file and name; or the name as a string.
        method: name of the called method; empty if ``part`` itself is called.
        at: when the code is called, for the message, such as ``round 3``.

    Raises:
        ClientError: the code raised any other exception, including ``SystemExit``.
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
    """Return whether the exception ends this process because of Ctrl-C, a signal or Ray."""
    # Ray raises a SystemExit with the attribute ray_terminate_msg.
    return isinstance(error, KeyboardInterrupt | Ended) or hasattr(error, "ray_terminate_msg")


@contextmanager
def before_any_work() -> Iterator[None]:
    """Context for user code that runs before training: it turns a ``ClientError`` into a ``UserError``.

    Raises:
        UserError: the code raised a ``ClientError``; the message is the same.
    """
    try:
        yield
    except ClientError as error:
        raise UserError(error.sentence) from error


def require_type(kind: type[T], value: object, what: str = "") -> T:
    """Check that a value that user code returned has the type ``kind``, and return the value.

    what: description of the type for the message; by default the type's name.

    Raises:
        ValueError: the value has another type.
    """
    if isinstance(value, kind):
        return value
    raise ValueError(f"it must return {what or f'a {kind.__name__}'}, got {type(value).__name__}")


def name_of(part: Any) -> str:
    """Return the file and name of a class or function, or of an object's class, such as ``my_lab.py:FedAvgM``."""
    kind = part if hasattr(part, "__qualname__") else type(part)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _cut(f"{Path(file).name if file else kind.__module__}:{kind.__name__}")


def quote(value: object) -> str:
    """Return a value as text for a message: strings in quotes, control characters escaped, at most ``WIDTH`` long."""
    return _cut(f"{value:g}" if isinstance(value, float) else repr(value))


def clean(text: str) -> str:
    """Return the text with control characters, surrogates and changes of text direction escaped, for the screen."""
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(c: str) -> str:
    is_odd = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _TEXT_DIRECTION
    return c.encode("unicode_escape").decode() if is_odd else c


def _cut(text: str, length: int = WIDTH) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def sentence(error: BaseException) -> str:
    """Return one line that describes the error: the name of the error's type, and the message.

    The name is omitted for ``UserError``, ``ClientError`` and a lack of memory.
    """
    cause = getattr(error, "cause", None)  # Ray wraps the error of another process in its own error
    cause = cause if isinstance(cause, BaseException) else error
    if isinstance(cause, ClientError):
        return cause.sentence
    message = message_of(cause)
    if isinstance(cause, UserError):
        return message
    if lacks_memory(cause):
        return f"out of memory: {_cut(message) or 'no memory is available'}"
    return f"{type(cause).__name__}: {message}" if message else type(cause).__name__


def lacks_memory(error: BaseException) -> bool:
    """Return whether the error reports that memory, or the resources for another thread or process, are missing."""
    if isinstance(error, OSError):
        return error.errno in (ENOMEM, EAGAIN)
    matches = isinstance(error, RuntimeError | ImportError) and any(words in message_of(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or matches


_NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "bad_alloc", "new thread", "map segment",
    "create a primitive",
)  # fmt: skip
"""Words with which torch, oneDNN, threading and the loader of shared libraries report a lack of memory."""


def message_of(error: BaseException) -> str:
    """Return the error's message in one line, or a fixed text if ``str`` of the user's exception class fails."""
    try:
        return clean(" ".join(str(error).split()))
    except BaseException:
        return "its message cannot be read"


def _describe(error: BaseException, where: str, part: str, doing: Sequence[str]) -> str:
    """Return the text ``where: message (line in the user's file; doing)``, cut to about ``LONGEST`` characters."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_frames = [(code, line) for code, line in frames if is_user_code(code.co_filename)]
    place = [f"{Path(code.co_filename).name}, line {line} in {code.co_name}" for code, line in user_frames[-1:]]
    behind = "; ".join(filter(None, [*(place or [part]), *doing]))
    behind = f" ({_cut(behind, LONGEST // 3)})" if behind else ""
    message = sentence(error)
    if type(error) is ValueError and not user_frames:  # this package raised the error: omit the type
        message = message.removeprefix("ValueError: ")
    where = _cut(where, LONGEST // 3)
    return f"{where}: {_cut(message, LONGEST - len(where) - len(behind) - 2)}{behind}"


@lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Return whether a file is the user's. Files of Python, libraries and this package are not the user's."""
    path = Path(file).resolve()
    installed = str(path).startswith(_NOT_USER_CODE) or {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not file.startswith("<")


def unknown(what: str, name: str, names: Iterable[str], besides: str = "") -> UserError:
    """Return the error for a name that is not in ``names``; the message suggests the nearest valid name.

    what: the noun before the name, such as ``field``. besides: another allowed value, listed after ``names``.
    """
    names = sorted(names)
    listing = f" Known: {', '.join([*names, *([besides] if besides else [])])}." if len(names) <= 16 else " See --help."
    return UserError(f"unknown {what} {quote(name)}{nearest(name, names)}{listing}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message: ``; did you mean 'x'?`` with the nearest of ``names``; a full stop if none is near.

    A candidate that differs from ``name`` only in dots, dashes, underscores and capitals is nearest. Candidates that
    start with ``name`` come next, if there are at most ``FEW``. Otherwise the last components of dotted names are
    compared first, so ``--alpha`` is near ``--partition.alpha``.
    """
    names, letters = sorted(names), re.sub(r"[-_.]", "", name).lower()
    same = [candidate for candidate in names if re.sub(r"[-_.]", "", candidate).lower() == letters]
    starting = [candidate for candidate in names if len(letters) > 2 and candidate.startswith(name)]
    if (near := same[:1] or starting) and len(near) <= FEW:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    if leaf := get_close_matches(_leaf(name), list(dict.fromkeys(map(_leaf, names))), n=1, cutoff=0.6):
        candidates = [candidate for candidate in names if _leaf(candidate) == leaf[0]]
        return f"; did you mean {get_close_matches(name, candidates, n=1, cutoff=0)[0]!r}?"
    return "."


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")
