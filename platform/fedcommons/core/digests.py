"""Digests of Python objects, by which two looks at one object tell whether anything in it has changed.

A digest follows numbers, texts, tensors, arrays, containers, attributes, slots, closures, default arguments, what
iterators, generators and caches hold, and what weak references and context variables point to. Modules and code count
as nothing. An object that C code keeps is taken from what it gives to ``pickle`` or as bytes; where it gives neither,
the digest says that it cannot tell.
"""

import copyreg
import functools
import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from hashlib import blake2b
from logging import Logger
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcommons.errors import is_user_code
from fedcommons.tensors import Flat

PLAIN = (bool, int, float, complex, str, bytes)
PLAIN_TYPES = frozenset({*PLAIN, type(None), type(Ellipsis), type(NotImplemented)})

NOT_USERS = frozenset({*sys.stdlib_module_names, "fedcommons", "lightning_modules"}) - {"__main__"}
"""Packages that are not the user's, wherever they lie."""

CODE = (
    types.ModuleType, types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
"""What holds no data."""

LOCKS = (type(threading.Lock()), type(threading.RLock()))
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
CACHE = type(functools.cache(len))

OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "_abc_impl", "__slotnames__"}
"""Names in a class that Python itself writes."""

OF_LOGGERS = {*vars(Logger("")), "_cache"}


class Digest(NamedTuple):
    """The digest of a value; unknown: the first type in it of which nothing can be told, or nothing."""

    of: bytes
    unknown: str = ""


class _Unknown(Exception):
    """Nothing can be told of an object."""


class Looks:
    """Digests of several values, in which an object that several of them hold is looked at once.

    Args:
        known: objects that count as nothing, by a name under which they are referred to.
    """

    def __init__(self, known: Mapping[str, object]) -> None:
        self._seen = {id(value): (name, value) for name, value in known.items()}  # held, so that an id stays its own
        self._memory: dict[tuple[str, int], str] = {}  # device and address of the tensors' memory -> its name

    def at(self, name: str, value: object) -> Digest:
        """Return the digest of the value with this name, each name once."""
        whole, unknown, left, number = blake2b(digest_size=16), "", [value], 0
        while left:
            x = left.pop()
            kind = type(x)
            if kind in PLAIN_TYPES:
                _add(whole, f"{kind.__name__} {x!r};")
                continue
            if id(x) in self._seen:
                _add(whole, f"@{self._seen[id(x)][0]};")
                continue
            self._seen[id(x)] = f"{name} {(number := number + 1)}", x
            _add(whole, f"{kind.__module__}.{kind.__qualname__};")
            try:
                parts = list(_parts(x, whole)) if not isinstance(x, Tensor) else self._of_tensor(x, whole, name)
            except Exception:  # whatever the object's own code raises
                unknown, parts = unknown or kind.__name__, []
            _add(whole, f"{len(parts)};")
            left += reversed(parts)
        return Digest(whole.digest(), unknown)

    def _of_tensor(self, x: Tensor, whole: Any, name: str) -> list[Any]:
        """Return what a tensor holds; the memory in which its numbers are is added to ``whole`` once.

        Raises:
            _Unknown: its numbers cannot be read.
        """
        _add(whole, f"{x.dtype} {x.layout} {x.device} {x.requires_grad} {x.is_conj()} {x.is_neg()};")
        held, numbers = of_tensor(x), x.detach()
        if x.is_nested:
            return [*numbers.unbind(), *held]
        _add(whole, f"{tuple(x.shape)};")
        if x.layout == torch.sparse_coo:
            return [numbers._indices(), numbers._values(), x.is_coalesced(), *held]
        if x.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [numbers.crow_indices(), numbers.col_indices(), numbers.values(), *held]
        if x.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [numbers.ccol_indices(), numbers.row_indices(), numbers.values(), *held]
        if x.layout != torch.strided:
            return [numbers.to_dense(), *held]
        if x.is_quantized:
            _add(whole, f"{x.qscheme()} {x.q_scale()} {x.q_zero_point()};")
        if x.device.type != "meta":
            memory = x.untyped_storage()
            at, size = (str(x.device), memory.data_ptr()), len(self._memory)
            _add(whole, f"{x.storage_offset()} {x.stride()} {self._memory.setdefault(at, f'{name} {size}')};")
            if len(self._memory) > size:  # all of it, as a view shows a part only
                whole.update(torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory).cpu().numpy().data)
        return held


def own(variables: Mapping[str, Any], hidden: Iterable[str] = OF_CLASSES) -> dict[str, Any]:
    """Return the variables that Python itself does not write."""
    return {name: value for name, value in variables.items() if name not in hidden}


def attributes(x: object) -> list[Any]:
    """Return what an object's ``__dict__`` and slots hold, whatever its class says that they are."""
    found: list[Any] = []
    for kind in type(x).__mro__:
        variables = vars(kind)
        if isinstance(of := variables.get("__dict__"), types.GetSetDescriptorType):
            found.append(of.__get__(x))
        for name, slot in variables.items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found += [name, slot.__get__(x)]
                except AttributeError:  # it has no value yet
                    found.append(name)
    return found


def of_tensor(x: Tensor) -> list[Any]:
    """Return what a tensor holds besides its numbers: attributes, hooks and its gradient."""
    graph = [_Hidden()] if x.grad_fn is not None else []
    return [vars(x), x._backward_hooks, x.grad if x.is_leaf else None, *graph]


class _Hidden:
    """Stands for something that cannot be looked at."""


def _parts(x: Any, whole: Any) -> Iterable[Any]:
    """Return what an object holds, in an order of its own; what are no objects are added to ``whole``.

    Raises:
        _Unknown: nothing can be told.
    """
    kind = type(x)
    if isinstance(x, Flat):
        return [x.layout.names, x.buffer]
    if isinstance(x, CODE) or _is_stream(x):
        return []
    if isinstance(x, type):
        return [part for pair in own(vars(x)).items() for part in pair] if is_users(x) else []
    if isinstance(x, np.ndarray | np.generic):
        _add(whole, f"{x.dtype.descr} {x.shape};")
        held = x.ravel().tolist() if x.dtype.hasobject else []
        whole.update(b"" if x.dtype.hasobject else x.tobytes())
        return [*held, *attributes(x)]
    for plain in PLAIN:
        if isinstance(x, plain):
            _add(whole, f"{plain.__repr__(x)};")
            return attributes(x)
    if (held := _contents(x, kind)) is not None:
        return held
    if isinstance(x, _Hidden) or (isinstance(x, BaseException) and x.__traceback__):
        raise _Unknown
    is_pickled = (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__)
    if not is_users(kind) and (_hides(kind) or is_pickled):
        return _pickled(x, kind)
    if _hides(kind):
        raise _Unknown
    return attributes(x)


def _contents(x: Any, kind: type) -> list[Any] | None:
    """Return what an object of one of Python's own types holds; None: it is of another type."""
    match x:
        case dict():
            items = OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x)
            return [*(part for pair in items for part in pair), *attributes(x)]
        case list() | tuple() | deque():
            base = next(base for base in (list, tuple, deque) if isinstance(x, base))
            return [*base.__iter__(x), *([x.maxlen] if base is deque else []), *attributes(x)]
        case set() | frozenset():
            base = set if isinstance(x, set) else frozenset
            return [*sorted(base.__iter__(x), key=_place), *attributes(x)]
        case types.MappingProxyType():
            return [part for pair in x.items() for part in pair]
        case types.FunctionType():
            return [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
        case types.CellType():
            return [x.cell_contents] if _has_value(x) else []
        case types.MethodType() | types.MethodWrapperType():
            return [x.__self__, x.__name__, getattr(x, "__func__", None)]
        case property():
            return [x.fget, x.fset, x.fdel, *attributes(x)]
        case staticmethod() | classmethod():
            return [x.__func__, vars(x)]
        case functools.partial():
            return [x.func, x.args, x.keywords, vars(x)]
        case types.GeneratorType():
            frame = x.gi_frame
            return [] if frame is None else [frame.f_locals, frame.f_lasti, x.gi_yieldfrom]
        case weakref.ref():
            return [x(), *attributes(x)]
        case ContextVar():
            return [x.get(None)]
        case threading.local():  # of this thread
            return attributes(x)
        case Logger():
            return [own(vars(x), OF_LOGGERS)]
    if kind in VIEWS:
        return [x.mapping]
    if kind in LOCKS:
        return [repr(x)]
    if kind is CACHE:
        return [*sorted(gc.get_referents(x), key=_place)]
    return None


def _is_stream(x: object) -> bool:
    """Return whether it is a stream of the process, which is written to and not read."""
    return any(
        x is getattr(sys, name) for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    )


def is_users(kind: type) -> bool:
    """Return whether a class stands in code of the user's: neither installed, nor Python's or the package's own."""
    name = kind.__module__
    if name.partition(".")[0] in NOT_USERS:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or is_user_code(file)  # a notebook has no file


def _has_value(cell: types.CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _place(x: Any) -> tuple[str, str, int]:
    """Return a key by which equal objects, and the same ones, stand in the same order whenever they are looked at."""
    plain = type(x) in PLAIN_TYPES
    return type(x).__qualname__, repr(x) if plain else "", 0 if plain else id(x)


def _hides(kind: type) -> bool:
    """Return whether objects of a class are larger than their attributes and slots, so that C code keeps the rest."""
    slots = sum(isinstance(value, types.MemberDescriptorType) for base in kind.__mro__ for value in vars(base).values())
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return bool(kind.__itemsize__) or kind.__basicsize__ > object.__basicsize__ + 8 * pointers


def _pickled(x: Any, kind: type) -> list[Any]:
    """Return what an object of a library gives to ``pickle``, or its bytes.

    Raises:
        _Unknown: it gives neither.
    """
    try:
        reduce = copyreg.dispatch_table.get(kind)
        given = reduce(x) if reduce else x.__reduce_ex__(2)
    except TypeError:
        try:
            return [memoryview(x).tobytes()]
        except TypeError:
            raise _Unknown from None
    if isinstance(given, str):  # a variable of the library
        return [given]
    return [part if index < 3 else list(part or ()) for index, part in enumerate(given)]


def _add(whole: Any, text: str) -> None:
    whole.update(text.encode(errors="backslashreplace"))
