"""Attributes of another framework's object as tensors by name, so that the object can be built anew in each round.

An attribute is kept if its value differs from the value in a newly built object and consists of tensors, numpy arrays,
numbers, Flower's ``ArrayRecord`` and ``Parameters``, lists and dicts of them (keys: strings or whole numbers), and
Python literals such as None, strings, and tuples and sets of numbers. The name of a tensor is the path to the value in
JSON: the attribute, then the place in each list or the place and the key in each dict, then the value's type.

A torch module is kept as its ``state_dict``, if the newly built object has a module of that name with tensors of the
same names and shapes to load it; its numbers and texts are lost. Values of a ``Parameter`` or of another leaf that
requires gradients are copied into the new object's one, which modules and optimizers may hold too. A strategy that is
an attribute, as in Flower's wrappers, is kept by its attributes.

Another attribute is lost if it was deleted, if its pickled bytes changed, or if it cannot be pickled. Variables inside
functions and modules, and global variables, are not compared. If two attributes hold one object, the new object gets
two copies of it.
"""

import json
import pickle
import warnings
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import cache, partial
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcommons.flat_tensors import Payload, data
from fedcommons.testing.comparing import listed, raw
from fedcommons.testing.flower import content_of_record, with_content

CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, partial)
LITERALS = (type(None), str, bytes, tuple, set, list, dict)
LOST = "lost "

Attribute = tuple[type, Mapping[str, Tensor] | None, int | None]
"""An attribute's type, copies of its values by path (None: it cannot be kept), and its fingerprint."""

warn = cache(warnings.warn)  # it shows a text once in a process


def attributes(thing: object, path: tuple[Any, ...] = (), holders: tuple[object, ...] = ()) -> dict[str, Attribute]:
    """Return the attributes of ``thing`` and of strategies among them, by path; path, holders: where ``thing`` is."""
    result, holders = dict[str, Attribute](), (*holders, thing)
    for name, value in _values(thing).items():
        steps, kind, is_strategy = (*path, (0, name)), type(value), _is_strategy(value)
        try:
            content = _state(value) if isinstance(value, nn.Module) and not is_strategy else value
            leaves = dict(_leaves(dict(content) if isinstance(content, dict) else content, steps))
            result[json.dumps(steps)] = kind, leaves, fingerprint(leaves)
        except (TypeError, ValueError, SyntaxError, RuntimeError):  # RuntimeError: recursion, a tensor without values
            result[json.dumps(steps)] = kind, None, fingerprint(kind if is_strategy else value)
            if is_strategy and not any(value is holder for holder in holders):
                result |= attributes(value, steps, holders)
        if isinstance(value, nn.Module) and not is_strategy:
            result[json.dumps([*steps, (0, "__dict__")])] = dict, None, hash(repr(_plain_values(value)))
    return result


def changed(thing: object, built: Mapping[str, Attribute]) -> dict[str, Tensor]:
    """Return the values of the attributes that differ from ``built``, the attributes of a newly built object.

    The value of an attribute that cannot be kept is an empty tensor; see ``lost_attributes``.
    """
    result, present, absent = dict[str, Tensor](), attributes(thing), (type(None), None, None)
    for path in {**built, **present}:
        (kind, now, after), (old_kind, old, before) = present.get(path, absent), built.get(path, absent)
        shapes, old_shapes = ({name: x.shape for name, x in (leaves or {}).items()} for leaves in (now, old))
        is_lost = issubclass(kind, nn.Module | nn.Parameter) and shapes != old_shapes
        if now is None or is_lost or (issubclass(kind, dict) and kind not in (dict, old_kind)):
            name = kind.__name__ if path in present else "deleted"
            now = {json.dumps([*json.loads(path), LOST + name]): torch.zeros(0)}
        result |= now if after is None or after != before else {}
    return result


def lost_attributes(values: Payload) -> str:
    """Return the names and types of the attributes in ``changed``'s result that cannot be kept."""
    paths = [path for path in map(json.loads, values) if path[-1].startswith(LOST)]
    return listed([f"{'.'.join(name for _, name in steps)} ({kind.removeprefix(LOST)})" for *steps, kind in paths])


def restore(thing: object, values: Payload) -> None:
    """Set the attributes that ``changed`` returned, all of which can be kept."""
    if values:
        _set(thing, _value([(json.loads(path), data(x)) for path, x in values.items()]))


def _values(thing: object) -> dict[str, Any]:
    """Return an object's attributes, also in ``__slots__``, and lists, dicts and sets of a strategy's class."""
    kinds = (MemberDescriptorType, *((list, dict, set) if _is_strategy(thing) else ()))
    of_classes = {n: kind for kind in type(thing).__mro__ for n, x in vars(kind).items() if type(x) in kinds}
    names = [name for name in of_classes if not name.startswith("__") and hasattr(thing, name)]
    return {name: getattr(thing, name) for name in names} | getattr(thing, "__dict__", {})


def _state(module: nn.Module) -> dict[str, Any]:
    return {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in module.state_dict().items()}


def _plain_values(module: nn.Module) -> list[Any]:
    """Return the numbers and texts that are attributes of a module and of the modules in it, except ``training``."""
    return [
        (name, key, x)
        for name, part in module.named_modules()
        for key, x in vars(part).items()
        if type(x) in (bool, int, float, str) and key != "training"
    ]


def _set(thing: object, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        object.__setattr__(thing, name, _put(_values(thing).get(name), value))


def _is_strategy(value: Any) -> bool:
    names = () if isinstance(value, type) else ("aggregate_fit", "aggregate_train")
    return any(callable(getattr(value, name, None)) for name in names)


def fingerprint(value: Any) -> int | None:
    """Return a hash of the pickled value; None: it cannot be pickled. Nothing is ever unpickled."""
    pickler = pickle.Pickler(file := BytesIO())
    pickler.persistent_id = _stand_in  # pyright: ignore[reportAttributeAccessIssue]
    with suppress(Exception):  # classes of users may raise any error
        pickler.dump(value)
        return hash(file.getvalue())


def _stand_in(thing: Any) -> Any:
    """Return a stand-in for a tensor (perhaps a view of a larger one) or code (such as a lambda); others: None."""
    if isinstance(thing, Tensor) and not is_lazy(thing):
        return hash((thing.dtype, thing.shape, *raw({"": thing.detach().cpu()}).values()))
    return (getattr(thing, "__qualname__", ""), id(thing)) if isinstance(thing, CODE) else None


def _put(old: Any, value: Any) -> Any:
    """Return the kept ``value`` of an attribute; modules, parameters and strategies take it and stay the object."""
    if _is_strategy(old) and not isinstance(old, dict):
        _set(old, value)
    elif isinstance(old, nn.Module):
        old.load_state_dict(value)
    elif isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape and _trains(old, value):
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, list) and isinstance(value, list) and len(old) == len(value):
        return [_put(*pair) for pair in zip(old, value, strict=True)]
    elif isinstance(old, dict) and isinstance(value, dict):
        old, new = copy(old), {name: _put(old.get(name), part) for name, part in value.items()}
        old.clear()
        old.update(new)  # of the old class, such as defaultdict
    else:
        return value
    return old


def _trains(old: Tensor, value: Tensor) -> bool:
    return isinstance(old, nn.Parameter) or (old.requires_grad and value.requires_grad)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield path and copy of each value; raise an error of ``literal_eval`` or TypeError if a value cannot be kept."""
    kind, name = type(value), type(value).__name__
    if kind in (dict, OrderedDict) and value and all(isinstance(key, str | int) for key in value):
        for place, (key, part) in enumerate(value.items()):
            yield from _leaves(part, (*path, (place, key)))
    elif kind is list and value:
        for place, part in enumerate(value):
            yield from _leaves(part, (*path, (place,)))
    elif kind in (Tensor, nn.Parameter, bool, int, float, np.ndarray) or isinstance(value, np.generic):
        x = value.detach().cpu().clone() if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
        if x.is_complex() or x.layout is not torch.strided:
            raise TypeError
        name = ("leaf" if value.is_leaf and value.requires_grad else "tensor") if isinstance(value, Tensor) else name
        name = "numpy" if isinstance(value, np.generic) else name
        if kind in (Tensor, np.ndarray) and name != "leaf" and (order := _order(value)) != [*range(x.dim())]:
            name, x = f"{name} {json.dumps(order)}", x.permute(order).contiguous()
        yield json.dumps([*path, name]), x
    elif kind in LITERALS and literal_eval(repr(value)) == value:
        yield json.dumps([*path, "literal"]), torch.tensor(np.frombuffer(repr(value).encode(), np.uint8))
    else:
        yield from _leaves(content_of_record(value), (*path, (0, name, "flwr")))


def _order(value: Any) -> list[int]:
    """Return the dimensions from the largest stride to the smallest; sums depend on it in their last bits."""
    strides = value.stride() if isinstance(value, Tensor) else value.strides
    return sorted(range(len(strides)), key=lambda i: -strides[i])


def _value(parts: Iterable[tuple[list[Any], Tensor]]) -> Any:
    """Return the value whose parts have these paths."""
    groups: dict[tuple[Any, ...], list[tuple[list[Any], Tensor]]] = {}
    for (step, *rest), x in parts:
        if isinstance(step, str) and " " in step:
            step, _, order = step.partition(" ")
            x = x.permute(np.argsort(json.loads(order)).tolist())
        if step == "literal":
            return literal_eval(x.numpy(force=True).tobytes().decode())
        if step in ("ndarray", "numpy"):
            return x.numpy(force=True).copy("K") if step == "ndarray" else x.numpy(force=True)[()]
        if isinstance(step, str):
            return x.clone().requires_grad_(step == "leaf") if step in ("tensor", "leaf") else x.item()
        groups.setdefault(tuple(step), []).append((rest, x))
    values = [(step, _value(groups[step])) for step in sorted(groups)]
    (step, value), *_ = values
    if len(step) == 3:
        return with_content(step[1], value)
    return {step[1]: part for step, part in values} if len(step) == 2 else [part for _, part in values]
