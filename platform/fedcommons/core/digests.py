"""Hashes (digests) of Python objects: the hash of an object changes if anything in the object changes.

A hash covers numbers, strings, tensors, arrays, containers, attributes, slots, closures and default arguments. It also
covers the contents of iterators, generators and caches, and the targets of weak references and context variables. It
does not cover modules and code. The state of an object implemented in C is read through ``pickle`` or as bytes. If
neither is possible, the result names the object's type as unknown.
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

PLAIN = (bool, int, float, complex, str, bytes)
PLAIN_TYPES = frozenset({*PLAIN, type(None), type(Ellipsis), type(NotImplemented)})

NOT_USERS = frozenset({*sys.stdlib_module_names, "fedcommons", "lightning_modules"}) - {"__main__"}
"""Packages whose code is never user code, even if the files are not in an installation folder."""

CODE = (
    types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
"""Types of code and of attribute access, whose objects contain no data."""

VISITED = (
    list, tuple, deque, set, frozenset, types.MappingProxyType, types.CellType, types.MethodType,
    types.BuiltinMethodType, types.MethodWrapperType, types.GeneratorType, property, staticmethod, classmethod,
    functools.partial, type(functools.cache(len)), type({}.keys()), type({}.values()), type({}.items()),
)  # fmt: skip
"""Types implemented in C; ``gc.get_referents`` returns all objects that an object of such a type contains."""

UNORDERED = (set, frozenset, type(functools.cache(len)))
LOCKS = (type(threading.Lock()), type(threading.RLock()))

OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "_abc_impl", "__slotnames__"}
"""Attributes of a class that Python itself sets."""

OF_LOGGERS = {*vars(Logger("")), "_cache"}


class Digest(NamedTuple):
    """The hash of an object. unknown: first type in the object whose state cannot be read; empty if there is none."""

    value: bytes
    unknown: str = ""


class _Unknown(Exception):
    """Exception that reports that an object cannot be read."""


class Hasher:
    """Hash function for several objects; an object that several of these objects contain is hashed once.

    Args:
        skipped: name -> object whose contents are not hashed; the name enters the hash instead.
    """

    def __init__(self, skipped: Mapping[str, object]) -> None:
        # The reference to each object keeps the object alive, so that no later object gets the same id.
        self._seen = {id(value): (name, value) for name, value in skipped.items()}
        self._memory: dict[tuple[str, int], str] = {}  # (device, address) of a tensor's memory -> name in hashes

    def digest(self, name: str, value: object) -> Digest:
        """Return the hash of ``value``. name: name of the value, which must be unique within this ``Hasher``."""
        whole, unknown, todo, number = blake2b(digest_size=16), "", [value], 0
        while todo:
            x = todo.pop()
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
            except Exception:  # the object's code may raise any exception
                unknown, parts = unknown or kind.__name__, []
            _add(whole, f"{len(parts)};")
            todo += reversed(parts)
        return Digest(whole.digest(), unknown)

    def _of_tensor(self, x: Tensor, whole: Any, name: str) -> list[Any]:
        """Add the tensor's numbers to the hash ``whole``, and return the other objects in ``x``, such as attributes."""
        _add(whole, f"{x.dtype} {x.layout} {x.device} {x.requires_grad} {x.is_conj()} {x.is_neg()};")
        others, numbers = of_tensor(x), x.detach()
        if x.is_nested:
            return [*numbers.unbind(), *others]
        _add(whole, f"{tuple(x.shape)};")
        if x.layout == torch.sparse_coo:
            return [numbers._indices(), numbers._values(), x.is_coalesced(), *others]
        if x.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [numbers.crow_indices(), numbers.col_indices(), numbers.values(), *others]
        if x.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [numbers.ccol_indices(), numbers.row_indices(), numbers.values(), *others]
        if x.layout != torch.strided:
            return [numbers.to_dense(), *others]
        if x.is_quantized:
            _add(whole, f"{x.qscheme()} {x.q_scale()} {x.q_zero_point()};")
        if x.device.type != "meta":
            memory = x.untyped_storage()
            at, size = (str(x.device), memory.data_ptr()), len(self._memory)
            _add(whole, f"{x.storage_offset()} {x.stride()} {self._memory.setdefault(at, f'{name} {size}')};")
            # A storage is hashed once and as a whole, because several tensors may be views of parts of the storage.
            if len(self._memory) > size:
                whole.update(torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory).cpu().numpy().data)
        return others


def user_variables(variables: Mapping[str, Any], hidden: Iterable[str] = OF_CLASSES) -> dict[str, Any]:
    """Return the variables without those named in ``hidden``, which Python itself sets."""
    return {name: value for name, value in variables.items() if name not in hidden}


def attributes(x: object) -> list[Any]:
    """Return the values in an object's ``__dict__`` and slots, even if its class overrides attribute access."""
    dict_places, slots = _places(type(x))
    values: list[Any] = [place.__get__(x) for place in dict_places]
    for name, slot in slots:
        try:
            values += [name, slot.__get__(x)]
        except AttributeError:  # the slot has no value yet
            values.append(name)
    return values


@functools.lru_cache(maxsize=4096)
def _places(kind: type) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Return the descriptors of a class that read an object's ``__dict__``, and (name, descriptor) for each slot."""
    each = [pair for base in kind.__mro__ for pair in vars(base).items()]
    dict_places = [x for name, x in each if name == "__dict__" and isinstance(x, types.GetSetDescriptorType)]
    return dict_places, [(name, x) for name, x in each if isinstance(x, types.MemberDescriptorType)]


def of_tensor(x: Tensor) -> list[Any]:
    """Return the attributes, hooks and gradient of a tensor, and a placeholder if it has an autograd graph."""
    graph = [_Hidden()] if x.grad_fn is not None else []
    return [vars(x), x._backward_hooks, x.grad if x.is_leaf else None, *graph]


class _Hidden:
    """Placeholder for a tensor's autograd graph, which cannot be inspected."""


def _parts(x: Any, whole: Any) -> Iterable[Any]:
    """Return the objects in ``x``, in a fixed order, and add raw numbers and text in ``x`` to the hash ``whole``."""
    kind = type(x)
    match x:
        case type():
            return [kind, *(part for pair in user_variables(vars(x)).items() for part in pair)] if is_users(x) else []
        case types.ModuleType():  # imported modules are skipped, because ``state_leaks`` compares their variables
            return [] if sys.modules.get(x.__name__) is x else [vars(x)]
        case np.ndarray() | np.generic():
            numbers = np.asarray(x)  # without the methods of a subclass of ndarray
            _add(whole, f"{numbers.dtype} {numbers.shape};")
            whole.update(b"" if numbers.dtype.hasobject else numbers.tobytes())
            return [*(numbers.ravel().tolist() if numbers.dtype.hasobject else []), x.base, *attributes(x)]
        case dict():
            items = OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x)
            return [*(part for pair in items for part in pair), *attributes(x)]
        case types.FunctionType():
            _add(whole, f"{hash(x.__code__)};")  # Python's hash of code covers the constants in the code
            return [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
        case weakref.ref():
            return [x(), *attributes(x)]
        case ContextVar():
            return [x.get(None)]
        case threading.local():  # the hash covers the current thread's values only
            return [threading.local.__getattribute__(x, "__dict__")]
        case Logger():
            return [user_variables(vars(x), OF_LOGGERS)]
        case _ if isinstance(x, CODE) or _is_stream(x) or kind.__name__ == "_lru_list_elem":
            return []  # an lru_cache itself contains the objects of its _lru_list_elem
        case _ if isinstance(x, VISITED):
            more = attributes(x)  # before get_referents, because reading can create a ``__dict__``
            frame = x.gi_frame if isinstance(x, types.GeneratorType) else None
            parts = [part for part in gc.get_referents(x) if part is not frame]
            _add(whole, f"{frame.f_lasti};" if frame else "")
            return [*(sorted(parts, key=_place) if isinstance(x, UNORDERED) else parts), *more]
    for plain in PLAIN:
        if isinstance(x, plain):
            _add(whole, f"{plain.__repr__(x)};")  # pyright: ignore[reportArgumentType]
            return attributes(x)
    if isinstance(x, LOCKS):
        return [repr(x)]
    if isinstance(x, _Hidden) or (isinstance(x, BaseException) and x.__traceback__):
        raise _Unknown
    if not _hides(kind):
        return attributes(x)
    if is_users(kind):
        raise _Unknown
    return _pickled(x, kind)


def _is_stream(x: object) -> bool:
    return any(
        x is getattr(sys, name) for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
    )


def is_users(kind: type) -> bool:
    """Return whether a class is user code. Classes of Python, this package and installed libraries are not."""
    name = kind.__module__
    if name.partition(".")[0] in NOT_USERS:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    # A class of a notebook has no file. The file of __main__ may be <stdin>, or the program that runs the user's code.
    return file is None or name == "__main__" or is_user_code(file)


def _place(x: Any) -> tuple[str, str, int]:
    """Return a key that sorts the objects of a set or cache; an unchanged set is always sorted in the same order."""
    plain = type(x) in PLAIN_TYPES
    return type(x).__qualname__, repr(x) if plain else "", 0 if plain else id(x)


def _hides(kind: type) -> bool:
    """Return whether objects of a class are larger than attributes and slots require, so they may have other state."""
    ours = [vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base)]
    slots = sum(isinstance(value, types.MemberDescriptorType) for values in ours for value in values)
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return bool(kind.__itemsize__) or kind.__basicsize__ > object.__basicsize__ + 8 * pointers


def _pickled(x: Any, kind: type) -> list[Any]:
    """Return the state that ``pickle`` would store for a library's object; if there is none, the object's bytes."""
    reduced: Any
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = reduce(x) if reduce else x.__reduce_ex__(2)
    except TypeError:
        try:
            return [memoryview(x).tobytes()]
        except TypeError:
            raise _Unknown from None
    if isinstance(reduced, str):  # the object is a library's global variable, which pickle stores as a name
        return [reduced]
    return [list(part) if index > 2 and part else part for index, part in enumerate(reduced)][1:]


def _add(whole: Any, text: str) -> None:
    whole.update(text.encode(errors="backslashreplace"))
