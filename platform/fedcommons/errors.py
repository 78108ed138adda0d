"""Errors of requests and of clients, each told in one sentence."""

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
"""Longer values are cut to this many characters in a message."""

FEW = 5
"""Names that a message suggests at most."""

LONGEST = 190
"""Characters of a sentence about somebody's part: one line of at most 200 with ``error: `` before it."""

_HERE = Path(__file__).resolve().parent
_NOT_SOMEBODYS = tuple(
    f"{path}/"
    for path in (
        _HERE,
        _HERE.parent.parent / "lightning_modules",
        *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)

RUN = "python sweeps/run.py" if (_HERE.parent.parent / "sweeps" / "run.py").is_file() else "fedcommons run"
"""How one experiment is run: in a clone by the script, else by the command."""

_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of what follows them."""

T = TypeVar("T")


class UserError(Exception):
    """A request that cannot be met: field, value, what is allowed, the nearest valid name. Raised before any work.

    Words longer than ``SHOWN`` characters are cut in the sentence, and so are paths of four times that length. What a
    terminal would obey is escaped: names of files and folders may be anybody's.
    """

    def __init__(self, sentence: str) -> None:
        long = rf"(?<!\S)[^\s/]{{{SHOWN + 1},}}(?!\S)|\S{{{4 * SHOWN + 1},}}"
        super().__init__(clean(re.sub(long, lambda word: _cut(word[0]), sentence)))


class ClientError(RuntimeError):
    """Somebody's code failed, mostly a client's; ``sentence`` names file, method, client and round, where there are.

    client, round: set if this client can be run again alone. trace: its traceback as text, because an exception loses
    its traceback on the way from another process.
    """

    def __init__(self, sentence: str, client: int | None = None, round: int | None = None, trace: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.client, self.round, self.trace = sentence, client, round, trace

    @classmethod
    def of(cls, error: BaseException, where: str, part: str = "", doing: Sequence[str] = ()) -> Self:
        """The error for what code of somebody's has raised. where: which code; doing: what it did.

        part: its name, said where the line that raised it is ours.
        """
        trace = "" if lacks_memory(error) else "".join(traceback.format_exception(error))  # no fault of its code
        return cls(_told(error, where, part, doing), trace=trace)


class Warned(str):
    """A sentence about something that went wrong and stops nothing: also ``--quiet`` shows it."""


class Ended(SystemExit):
    """A signal ends this process: it passes through somebody's code, and a ``SystemExit`` of that code does not."""


class somebodys:
    """Turn whatever somebody's code raises in this context, or a check of what it returns, into one sentence.

    part: an object, class or function, which is called by its file and name; or how it is called. at: when, such as
    ``round 3``. ``UserError`` and ``ClientError`` pass, as do Ctrl-C and what ends the process. It is no generator, as
    contextlib lets a ``StopIteration`` through.

    Raises:
        ClientError: anything else was raised, ``SystemExit`` too.
    """

    def __init__(self, part: object, method: str = "", *at: str) -> None:
        self.part, self.method, self.at = part, method, at

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, UserError | ClientError) or ends(error):
            return
        part = self.part if isinstance(self.part, str) else name_of(self.part)
        called = f"{part}.{self.method}" if self.method else part
        raise ClientError.of(error, ", ".join([called, *self.at])) from error


def ends(error: BaseException) -> bool:
    """Whether the user or a signal ends this process, and not somebody's code."""
    return isinstance(error, KeyboardInterrupt | Ended) or hasattr(error, "ray_terminate_msg")  # Ray's own SystemExit


@contextmanager
def before_any_work() -> Iterator[None]:
    """In this context failing code of somebody's is a request that cannot be met.

    Raises:
        UserError: in the place of a ``ClientError``.
    """
    try:
        yield
    except ClientError as error:
        raise UserError(error.sentence) from error


def given(kind: type[T], value: object, what: str = "") -> T:
    """What somebody's code has given, if it is of this type; what: the type in words.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, kind):
        return value
    raise ValueError(f"it must give {what or f'a {kind.__name__}'}, got {type(value).__name__}")


def name_of(part: Any) -> str:
    """``my_lab.py:FedAvgM``: the file of an object's class, or of a class or function, and its name."""
    kind = part if hasattr(part, "__qualname__") else type(part)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _cut(f"{Path(file).name if file else kind.__module__}:{kind.__name__}")


def shown(value: object) -> str:
    """A value for a message: text in quotes, control characters escaped, cut at ``SHOWN`` characters."""
    return _cut(f"{value:g}" if isinstance(value, float) else repr(value))


def clean(text: str) -> str:
    """Text for a screen, a table or a picture: control characters, halves of characters and turns are escaped."""
    return text if text.isascii() and text.isprintable() else "".join(map(_escaped, text))


def _escaped(c: str) -> str:
    is_odd = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _TURNING
    return c.encode("unicode_escape").decode() if is_odd else c


def _cut(text: str, length: int = SHOWN) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def sentence(error: BaseException) -> str:
    """The error's message in one line."""
    cause = getattr(error, "cause", None)  # Ray raises an error of its own around that of another process
    cause = cause if isinstance(cause, BaseException) else error
    if isinstance(cause, ClientError):
        return cause.sentence
    said = message_of(cause)
    if isinstance(cause, UserError):
        return said
    if lacks_memory(cause):
        return f"out of memory: {_cut(said) or 'none is left'}"
    return f"{type(cause).__name__}: {said}" if said else type(cause).__name__


def lacks_memory(error: BaseException) -> bool:
    """Whether this process, or its limits, had no memory left, or none for one more thread or process."""
    if isinstance(error, OSError):
        return error.errno in (ENOMEM, EAGAIN)
    told = isinstance(error, RuntimeError | ImportError) and any(words in message_of(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or told


_NO_MEMORY = (
    "allocate memory", "not enough memory", "out of memory", "bad_alloc", "new thread", "map segment",
    "create a primitive",
)  # fmt: skip
"""In the errors of torch, oneDNN and threading, and of the loader of libraries."""


def message_of(error: BaseException) -> str:
    """What the error says, in one line; somebody's own may be one that cannot be told."""
    try:
        return clean(" ".join(str(error).split()))
    except BaseException:
        return "it cannot say why"


def _told(error: BaseException, where: str, part: str, doing: Sequence[str]) -> str:
    """``where: what was raised (the place in somebody's file; doing)``; what was raised is cut first."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    mine = [(code, line) for code, line in frames if is_user_code(code.co_filename)]
    place = [f"{Path(code.co_filename).name}, line {line} in {code.co_name}" for code, line in mine[-1:]]
    behind = "; ".join(filter(None, [*(place or [part]), *doing]))
    behind = f" ({_cut(behind, LONGEST // 2)})" if behind else ""
    said = sentence(error)
    if type(error) is ValueError and not mine:  # our own words
        said = said.removeprefix("ValueError: ")
    where = _cut(where, LONGEST // 2)
    return f"{where}: {_cut(said, max(LONGEST - len(where) - len(behind) - 2, 20))}{behind}"


@lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Return whether a file is the user's: neither installed, nor Python's or the package's own."""
    path = Path(file).resolve()
    installed = str(path).startswith(_NOT_SOMEBODYS) or {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and not file.startswith("<")


def unknown(what: str, name: str, known: Iterable[str], besides: str = "") -> UserError:
    """The error for a name that is not in ``known``; it suggests the nearest name.

    besides: what else is allowed, told after the known names.
    """
    known = sorted(known)
    listing = f" Known: {', '.join([*known, *([besides] if besides else [])])}." if len(known) <= 16 else " See --help."
    return UserError(f"unknown {what} {shown(name)}{nearest(name, known)}{listing}")


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or a full stop if no name is near.

    A name that differs in its dots, dashes and capitals only is the nearest, or the few that begin so. Else dotted
    names are compared by their last component first: ``--alpha`` is near ``--partition.alpha``.
    """
    known, letters = sorted(known), re.sub(r"[-_.]", "", name).lower()
    same = [one for one in known if re.sub(r"[-_.]", "", one).lower() == letters]
    begun = [one for one in known if len(letters) > 2 and one.startswith(name)]
    if (near := same[:1] or begun) and len(near) <= FEW:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    leaves: dict[str, list[str]] = {}
    for one in known:
        leaves.setdefault(_leaf(one), []).append(one)
    if leaf := get_close_matches(_leaf(name), list(leaves), n=1, cutoff=0.6):
        return f"; did you mean {get_close_matches(name, leaves[leaf[0]], n=1, cutoff=0)[0]!r}?"
    return "."


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")
