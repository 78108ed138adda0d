"""Hashes of code that is only in this process, such as a class of a notebook, which are equal in every process.

A hash covers the source of each function and, for each class, also its bases and attributes. It also covers what the
code uses: default arguments, variables of enclosing functions, global variables, and files of the user's modules.
Python keeps a function's compiled code, not its source. So the file or notebook cell is compiled again, and its source
counts only if the result is the function's code. Names that are computed at run time are not covered.
"""

import ast
import copyreg
import dis
import functools
import linecache
import sys
import types
from collections.abc import Iterable, Iterator
from hashlib import sha256
from textwrap import dedent
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.config import registry, user_loader
from fedcommons.core.digests import OF_CLASSES, PLAIN_TYPES, is_users
from fedcommons.errors import UserError, is_user_code

Def = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

GENERATED = {
    *("__init__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__setattr__"),
    *("__delattr__", "__replace__"),
}
"""Methods that ``dataclass`` writes; they follow from annotations and default values."""


class NoSource(Exception):
    """The source of a function is unknown, as for code typed into Python's prompt or run by ``exec``."""


def hash_of(what: str, value: object) -> str:
    """Return the hash of a class, function or data; what: its name for messages.

    Raises:
        NoSource: a function's source is unknown.
        UserError: the code uses a value that cannot be hashed, or a module whose file has changed since its import.
    """
    reader = _Reader(what)
    try:
        reader.read(value, "")
    except RecursionError:
        raise UserError(f"{what} uses a value that is nested too deeply to be hashed.") from None
    return reader.whole.hexdigest()[:24]


class _Reader:
    """A hash of objects. what: name of the component. seen: id of an object -> its number, and the object."""

    def __init__(self, what: str) -> None:
        self.what, self.whole, self.seen = what, sha256(), dict[int, tuple[int, object]]()

    def read(self, x: object, name: str) -> None:
        """Add an object to the hash; name: the variable or attribute that holds it, for messages."""
        kind = type(x)
        if kind in PLAIN_TYPES:
            self.add(f"{kind.__name__} {x!r}")
        elif id(x) in self.seen:
            self.add(f"@{self.seen[id(x)][0]}")
        else:
            self.seen[id(x)] = len(self.seen), x
            self.add(f"{kind.__module__}.{kind.__qualname__}")
            try:
                parts = list(self.parts(x))
            except (NoSource, UserError):
                raise
            except Exception:  # the object's code may raise any exception
                raise UserError(
                    f"{self.what} uses {name or 'a value'}, a {kind.__name__} that cannot be hashed: pass numbers and "
                    "texts as constants, and create other objects in the code that uses them."
                ) from None
            self.add(f"{len(parts)}")
            for label, part in parts:
                self.add(label)
                self.read(part, label or name)

    def add(self, text: str) -> None:
        self.whole.update(f"{len(text)} {text};".encode(errors="backslashreplace"))

    def parts(self, x: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of the objects in ``x``; the name is empty for members of a container."""
        match x:
            case types.ModuleType():
                self.add(x.__name__)
                if is_user_code(getattr(x, "__file__", None) or "<>"):
                    loaded = {name: m for name, m in sys.modules.items() if name.startswith(f"{x.__name__}.")}
                    for name, module in sorted({**loaded, x.__name__: x}.items()):
                        self.module(name, [m for m in vars(module).values() if getattr(m, "__module__", "") == name])
            case types.FunctionType():
                yield from self.function(x)
            case type():
                yield from self.class_(x)
            case staticmethod() | classmethod() | types.MethodType():
                yield from (("", x.__func__), ("", getattr(x, "__self__", None)))
            case property():
                yield from (("", x.fget), ("", x.fset), ("", x.fdel))
            case functools.cached_property():
                yield "", x.func
            case Tensor():
                self.add(f"{x.dtype} {tuple(x.shape)}")
                self.whole.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            case np.ndarray() if not x.dtype.hasobject:
                self.add(f"{x.dtype} {x.shape}")
                self.whole.update(np.ascontiguousarray(x).view(np.uint8).data if x.size else b"")
            case list() | tuple():
                yield from (("", part) for part in x)
            case set() | frozenset() if all(type(part) in PLAIN_TYPES for part in x):
                yield from (("", part) for part in sorted(x, key=repr))
            case dict():
                yield from (("", part) for pair in dict.items(x) for part in pair)
            case _ if isinstance(x, type(functools.cache(len))):
                yield "", x.__wrapped__
            case _:
                yield from (("", part) for part in _state(x))

    def module(self, name: str, members: Iterable[Any]) -> bool:
        """Add the hash of a module's files; return False if no file of the user has the module's name.

        members: functions and classes of the module.

        Raises:
            UserError: a file has changed since its import, so that other processes would run other code.
        """
        code = user_loader.read(name, registry.base(), self.what) if name != "__main__" else None
        self.add(code.digest if code else name)
        for function in _functions(members) if code else ():
            try:
                source_of.__wrapped__(function.__code__)
            except NoSource:
                assert code is not None
                raise UserError(
                    f"{self.what}: {code.file.name} has changed since this process imported it: restart Python, or "
                    "import it again by importlib.reload."
                ) from None
        return code is not None

    def function(self, f: types.FunctionType) -> Iterator[tuple[str, Any]]:
        code = f.__code__
        is_generated = str(f.__globals__.get("__name__")).startswith("namedtuple_")  # by Python, for a NamedTuple
        if is_generated or not (is_user_code(code.co_filename) or code.co_filename.startswith("<")):
            self.add(f"{f.__module__}.{f.__qualname__}")  # a library's function, which may wrap the user's
            yield "", getattr(f, "__wrapped__", None)
            return
        if self.module(f.__module__, [f]):
            self.add(f.__qualname__)
            return
        self.add(source_of(code))
        for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
            yield name, cell.cell_contents if cell != types.CellType() else None
        yield from (("", part) for part in (f.__defaults__, f.__kwdefaults__, vars(f)))
        yield from ((name, f.__globals__[name]) for name in sorted(set(_global_names(code))) if name in f.__globals__)

    def class_(self, cls: type) -> Iterator[tuple[str, Any]]:
        self.add(f"{cls.__module__}.{cls.__qualname__}")
        if not is_users(cls) or self.module(cls.__module__, [cls]):
            return
        yield from (("", base) for base in (type(cls), *cls.__bases__))
        self.add(repr(vars(cls).get("__annotations__", {})))
        for name, value in sorted(vars(cls).items()):
            inner = getattr(value, "__func__", value)
            is_function = isinstance(inner, types.FunctionType)
            is_generated = "__dataclass_fields__" in vars(cls) and name in GENERATED and (
                not is_function or not is_user_code(inner.__code__.co_filename)
            )  # fmt: skip
            is_pythons = name in OF_CLASSES or (name.startswith("__") and name.endswith("__") and not is_function)
            if not (is_pythons or is_generated or isinstance(value, types.MemberDescriptorType)):
                yield f"{cls.__name__}.{name}", value


@functools.lru_cache(maxsize=4096)  # of the code as it was first seen, whatever becomes of its file
def source_of(code: types.CodeType) -> str:
    """Return the source of a function, without the lines around it.

    Raises:
        NoSource: the source is unknown, or has changed since the function was compiled.
    """
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    codes, functions = _compiled(text, code.co_filename, code.co_flags & _FUTURES)
    if code not in codes:
        raise NoSource(code.co_name)
    found = [f for f in functions if (_first_line(f), _name(f)) == (code.co_firstlineno, code.co_name)]
    spans = [span for span in code.co_positions() if None not in span and span[2:] != (0, 0)]
    # Several lambdas may begin in one line. The code's own lambda is the innermost that contains the whole code.
    around = [f for f in found if not isinstance(f, ast.Lambda) or all(_contains(f.body, span) for span in spans)]
    node = max(around, key=lambda f: (f.lineno, f.col_offset))
    if isinstance(node, ast.Lambda):  # other code may stand in the same line
        return ast.get_source_segment(text, node) or ""
    return dedent("".join(text.splitlines(keepends=True)[_first_line(node) - 1 : node.end_lineno]))


_FUTURES = functools.reduce(lambda flags, name: flags | getattr(__import__("__future__"), name).compiler_flag,
                            __import__("__future__").all_feature_names, 0)  # fmt: skip
"""Flags of a code object that say which ``from __future__`` imports applied when it was compiled."""


@functools.lru_cache(maxsize=256)
def _compiled(text: str, file: str, flags: int) -> tuple[frozenset[types.CodeType], tuple[Def, ...]]:
    """Return the code of all functions in a file or cell, and their syntax trees; both are empty on a syntax error."""
    try:
        tree = ast.parse(text)
        code = compile(text, file, "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):
        return frozenset(), ()
    return frozenset(_inner(code)), tuple(node for node in ast.walk(tree) if isinstance(node, Def))


def _functions(members: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield the functions among ``members`` and among the attributes of classes, except those of libraries."""
    for member in members:
        inner = vars(member).values() if isinstance(member, type) else [member]
        yield from (f for f in inner if isinstance(f, types.FunctionType) and is_user_code(f.__code__.co_filename))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inner(constant)


def _global_names(code: types.CodeType) -> Iterator[str]:
    for inner in _inner(code):
        for step in dis.get_instructions(inner):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield step.argval


def _first_line(node: Def) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _name(node: Def) -> str:
    return getattr(node, "name", "<lambda>")


def _contains(node: ast.expr, span: Any) -> bool:
    line, end_line, column, end_column = span
    ends = node.end_lineno or 0, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= (line, column) and (end_line, end_column) <= ends


def _state(x: Any) -> list[Any]:
    """Return the state that ``pickle`` would store for an object."""
    reduce = copyreg.dispatch_table.get(type(x))
    reduced: Any = reduce(x) if reduce else x.__reduce_ex__(2)
    if isinstance(reduced, str):  # a global variable of a library, such as a function written in C
        return [getattr(x, "__module__", ""), reduced]
    return [list(part) if index > 2 and part is not None else part for index, part in enumerate(reduced)]
