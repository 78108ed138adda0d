"""Attributes of another framework's object as tensors by name, so that the object can be built anew in each round.

An attribute is kept if it is a number, a tensor, a numpy array, or lists and dicts of them (keys: strings or whole
numbers), and if its value differs from the value in a newly built object. The name of a tensor is the path to the value
in JSON: the attribute, then the place in each list or the place and the key in each dict, then the value's type.

A torch module is kept as its ``state_dict``, if the newly built object has a module of that name with tensors of the
same names and shapes to load it. Values of a ``Parameter`` are copied into the new object's, which modules and
optimizers may hold too. A strategy that is an attribute, as in Flower's wrappers, is kept by its attributes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedcommons.flat_tensors import Payload, data
from fedcommons.testing.comparing import raw

Leaves = Mapping[str, Tensor]
"""Copies of the values in an attribute, by path."""


def attributes(thing: object, inner: bool = True) -> dict[str, Leaves]:
    """Return the values of each attribute that can be kept; inner: also of strategies that are attributes."""
    result: dict[str, Leaves] = {}
    for name, value in getattr(thing, "__dict__", {}).items():
        with suppress(TypeError):
            result[name] = dict(_leaves({name: _content(value, inner)}, []))
    return result


def changed(thing: object, built: Mapping[str, Leaves]) -> dict[str, Tensor]:
    """Return the values of all attributes that differ from ``built``, the attributes of a newly built object."""
    pairs = [
        (leaves, built.get(name, {}))
        for name, leaves in attributes(thing).items()
        if not isinstance(vars(thing)[name], nn.Module) or _shapes(leaves) == _shapes(built.get(name, {}))
    ]
    return {path: x for leaves, before in pairs if raw(leaves) != raw(before) for path, x in leaves.items()}


def restore(thing: object, kept: Payload) -> None:
    """Set the attributes that ``changed`` returned."""
    values = _value([(json.loads(path), data(x)) for path, x in kept.items()]) if kept else {}
    vars(thing).update({name: _put(vars(thing).get(name), value) for name, value in values.items()})


def _content(value: Any, inner: bool) -> Any:
    if isinstance(value, nn.Module):
        return value.state_dict()
    if inner and _is_strategy(value):
        return {name: _content(vars(value)[name], False) for name in attributes(value, False)}
    return value


def _is_strategy(value: Any) -> bool:
    names = () if isinstance(value, type) else ("aggregate_fit", "aggregate_train")
    return any(callable(getattr(value, name, None)) for name in names)


def _shapes(leaves: Leaves) -> dict[str, torch.Size]:
    return {path: x.shape for path, x in leaves.items()}


def _put(old: Any, value: Any) -> Any:
    """Return the kept ``value`` of an attribute; modules, parameters and strategies take it and stay the object."""
    if isinstance(old, nn.Module):
        old.load_state_dict(value)
    elif isinstance(old, nn.Parameter) and isinstance(value, Tensor) and old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, list) and isinstance(value, list) and len(old) == len(value):
        return [_put(*pair) for pair in zip(old, value, strict=True)]
    elif isinstance(old, dict) and isinstance(value, dict):
        return {name: _put(old.get(name), part) for name, part in value.items()}
    elif _is_strategy(old) and isinstance(value, dict):
        vars(old).update({name: _put(vars(old).get(name), part) for name, part in value.items()})
    else:
        return value
    return old


def _leaves(value: Any, path: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield path and copy of each value; raise a TypeError if one cannot be kept, or if a list or dict is empty."""
    if isinstance(value, dict) and value and all(isinstance(key, str | int) for key in value):
        for place, (key, part) in enumerate(value.items()):
            yield from _leaves(part, [*path, [place if path else 0, key]])
    elif isinstance(value, list) and value:
        for place, part in enumerate(value):
            yield from _leaves(part, [*path, [place]])
    elif isinstance(value, Tensor) and not is_lazy(value):
        yield json.dumps([*path, "tensor"]), value.detach().cpu().clone()
    elif isinstance(value, int | float | np.ndarray | np.generic):
        yield json.dumps([*path, type(value).__name__]), torch.tensor(np.asarray(value))
    else:
        raise TypeError


def _value(parts: Iterable[tuple[list[Any], Tensor]]) -> Any:
    """Return the number, tensor, array, list or dict whose values have these paths."""
    groups: dict[tuple[Any, ...], list[tuple[list[Any], Tensor]]] = {}
    for (step, *rest), x in parts:
        if isinstance(step, str):
            return x.clone() if step == "tensor" else x.numpy(force=True).copy() if step == "ndarray" else x.item()
        groups.setdefault(tuple(step), []).append((rest, x))
    values = [(step[-1], _value(groups[step])) for step in sorted(groups)]
    return dict(values) if len(next(iter(groups))) == 2 else [value for _, value in values]
