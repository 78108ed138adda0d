"""What outlives a client beside messages and memory: under DP, module and method are compared before and after it.

The noise of DP-SGD hides an example only if nothing else carries it on. A queue, a running mean, a list on the module
that training changes does: the next steps and the next clients see it without any noise. So whatever is not put back,
and differs after a client, is named, and the ledger takes nothing of such a run for covered.

Compared are buffers that no message carries, and all attributes: tensors, arrays, numbers, texts, containers of them,
what objects and functions among them hold, what the class holds, and the variables of the file in which it stands.
Not seen is what lies behind C code or another module: generators of random numbers, caches, files.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from logging import Logger
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcommons.core.work import Work
from fedcommons.tensors import Flat

OURS = ("fedcommons", "lightning_modules", "pytorch_lightning", "lightning_fabric", "torch", "builtins", "typing")
"""Packages whose classes and files keep no state of training."""

State = dict[str, bytes]
"""Name -> digest of its value."""


def put_back(work: Work) -> None:
    """Take back what a client's training leaves in the worker: weights, gradients, metrics, momentum, rates."""
    work.load(work.initial)
    work.logged.metrics.put_back()
    work.optimizer.state.clear()
    for parameter in work.named.values():
        parameter.grad = None
    work.set_rates()


def state(work: Work, algorithm: object, others: Mapping[str, object] | None = None) -> State:
    """All that could outlive a client, by name; ``others``: what else a client gets that is not its own."""
    sent = {id(t) for t in _sent(work)}
    seen: dict[int, object] = {id(x): x for x in (work, work.clock, work.logged, work.optimizer, sys.modules)}
    modules = dict(work.module.named_modules())
    seen |= {id(module): module for module in modules.values()}
    found = {"work (initial)": work.initial, "work (rates)": work.rates, "work (names)": sorted(vars(work))}
    found |= {f"optimizer state ({name})": value for name, value in _of_optimizer(work.optimizer)}
    found |= dict(others or {})
    for path, module in modules.items():
        found |= {f"module state ({path}{'.' * bool(path)}{name})": x for name, x in _attributes(module, sent)}
    classes = _classes([*modules.values(), algorithm])
    if not _is_ours(type(algorithm)):
        found |= {f"method state ({name})": x for name, x in vars(algorithm).items()}
    found |= {f"class state ({c.__name__}.{name})": x for c in classes for name, x in _own(vars(c))}
    files = {c.__module__: sys.modules.get(c.__module__) for c in classes}
    found |= {f"global state ({file}.{name})": x for file, of in files.items() if of for name, x in _plain(vars(of))}
    return {name: _digest(value, seen) for name, value in found.items()}


def differing(before: State, after: State) -> set[str]:
    """The names whose values differ, or that only one of the two has."""
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


def _sent(work: Work) -> Iterator[Tensor]:
    """Tensors of the module that the engine loads before every client: weights, and statistics that are sent."""
    yield from (p for name, p in work.named.items() if p.data_ptr() == work.params[name].data_ptr())
    if len(work.buffers):
        saved = work.module.state_dict().keys()
        yield from (buffer for name, buffer in work.module.named_buffers() if name in saved)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    for number, group in enumerate(optimizer.param_groups):
        yield from ((f"{number}.{name}", value) for name, value in group.items() if name != "params")
    yield from ((name, x) for name, x in vars(optimizer).items() if name not in ("param_groups", "state"))


def _attributes(module: nn.Module, sent: set[int]) -> Iterator[tuple[str, object]]:
    """What a module holds itself: buffers and attributes; its parts are modules of their own."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield from ((n, vars(t) if id(t) in sent else t) for n, t in value.items() if t is not None)
        elif name != "_modules" and not (name == "training" and isinstance(value, bool)):
            yield name, value


def _classes(parts: Iterable[object]) -> list[type]:
    kinds = dict.fromkeys(kind for part in parts for kind in type(part).__mro__)
    return [kind for kind in kinds if not _is_ours(kind)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in OURS


def _own(variables: Mapping[str, Any]) -> list[tuple[str, object]]:
    return [(name, value) for name, value in variables.items() if not name.startswith("__")]


def _plain(variables: Mapping[str, Any]) -> list[tuple[str, object]]:
    """A file's variables that are data: others, such as imported modules, lead to the whole process."""
    data = (Tensor, np.ndarray, bool, int, float, complex, bytes, list, dict, set)
    return [(name, value) for name, value in _own(variables) if isinstance(value, data)]


def _digest(value: object, seen: dict[int, object]) -> bytes:
    """16 bytes that follow the value; what is in ``seen`` counts as nothing."""
    whole = blake2b(digest_size=16)
    left = [value]
    while left:
        x = left.pop()
        if x is None or isinstance(x, bool | int | float | complex | str | bytes):
            whole.update(f"{type(x).__name__} {x!r};".encode(errors="backslashreplace"))
            continue
        if id(x) in seen:
            continue
        seen[id(x)] = x  # held, so that its id stays its own
        parts = _parts(x)
        whole.update(f"{type(x).__name__} {len(parts)};".encode())
        if isinstance(x, Tensor):
            _add(whole, x.detach())
        elif isinstance(x, np.ndarray) and x.dtype != object:
            _add(whole, torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).reshape(-1)))
        left += reversed(parts)
    return whole.digest()


def _add(whole: Any, x: Tensor) -> None:
    whole.update(f"{x.dtype} {tuple(x.shape)};".encode())
    if x.layout == torch.strided and x.device.type != "meta":
        whole.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _parts(x: object) -> list[Any]:
    """What an object holds, in an order of its own."""
    match x:
        case Flat():
            return [x.layout.names, x.buffer]
        case dict() | Mapping():
            return [part for pair in x.items() for part in pair]
        case set() | frozenset():
            return sorted(map(repr, x))
        case list() | tuple():
            return list(x)
        case ModuleType() | type() | Logger():
            return []
        case FunctionType():
            return [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)]
        case CellType():
            return _contents(x)
        case MethodType():
            return [x.__self__, x.__func__]
        case partial():
            return [x.func, x.args, x.keywords]
    inside = [vars(x)] if hasattr(x, "__dict__") else []
    return [*inside, *x] if hasattr(x, "maxlen") and isinstance(x, Iterable) else inside


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a variable that has no value yet
        return []
