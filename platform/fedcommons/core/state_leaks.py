"""Detection of state leaks under DP-SGD: the state of module and method is compared before and after each client.

The noise of DP-SGD hides an example only if no other state contains information on the example. A queue, a running mean
or a list in the module is such state if training changes it, because later steps and later clients see it without
noise. So each piece of state is reported that differs after a client, even after a reset of the worker, or that
cannot be read. The privacy ledger then counts no data of the run as protected (covered).

The comparison uses hashes (``digests``). It covers: buffers that no message contains; all attributes of module, method,
optimizer and worker; the attributes of their classes; every variable of the files that define these classes, and of the
user's files that are imported there; the environment variables. numpy's and Python's global generators are restored.
The comparison does not cover other processes, files, threads, attributes set on a library, or modules whose import has
a computed name.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcommons.core.client_worker import Work
from fedcommons.core.digests import NOT_USERS, Digest, Hasher, of_tensor, user_variables
from fedcommons.errors import is_user_code

OURS = NOT_USERS | {"pytorch_lightning", "lightning_fabric", "torch"}
"""Packages that store no training state, by assumption, so their classes and files are not compared."""

OF_THE_ENGINE = {
    "module", "optimizer", "params", "buffers", "noise", "releases", "clock", "logged", "started_at", "share", "number",
    "replacement", "row_counts",
}  # fmt: skip
"""Attributes of a ``Work`` that the engine sets or loads before every client, or that are compared separately."""

OF_FILES = {
    "__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__path__",
    "__spec__", "__warningregistry__",
}  # fmt: skip
"""Variables of a Python module that Python itself sets."""

State = dict[str, Digest]
"""Name of a piece of state, such as an attribute -> hash of the piece of state."""


def put_back(work: Work) -> None:
    """Reset the worker after a client: weights, gradients, metrics, optimizer state, learning rates, logged values."""
    work.load(work.initial)
    work.logged.put_back()
    work.optimizer.state.clear()
    for parameter in work.named.values():
        parameter.grad = None
    work.set_rates()


def state(work: Work, algorithm: object, others: Mapping[str, object] | None = None) -> State:
    """Return by name the hash of each piece of state through which the next client could get a client's data.

    Args:
        work: the worker's training objects, after ``put_back``.
        algorithm: the federated method.
        others: further objects, by name, that several clients use.
    """
    sent = {id(t): t for t in _sent(work)}
    modules = dict(work.module.named_modules())
    classes = _classes([*modules.values(), algorithm])
    skipped: dict[str, object] = {"work": work, "clock": work.clock, "logged": work.logged, "method": algorithm}
    skipped |= {"optimizer": work.optimizer} | {f"module {path}": module for path, module in modules.items()}
    skipped |= {f"sent {number}": t for number, t in enumerate(sent.values())}
    skipped |= {f"class {number}": kind for number, kind in enumerate(classes)}
    hasher = Hasher(skipped)
    values = {f"work ({name})": value for name, value in _of_work(work)}
    values |= {f"optimizer state ({name})": value for name, value in _of_optimizer(work.optimizer)}
    values |= dict(others or {})
    for path, module in modules.items():
        values |= {f"module state ({path}{'.' * bool(path)}{name})": x for name, x in _attributes(module, sent)}
    if not _is_ours(type(algorithm)):
        values |= {f"method state ({name})": x for name, x in vars(algorithm).items()}
    values |= {f"class state ({c.__name__}.{name})": x for c in classes for name, x in user_variables(vars(c)).items()}
    for file, module in _files(classes).items():
        values |= {f"global state ({file}.{name})": x for name, x in _variables(module).items()}
    values["process state (os.environ)"] = dict(os.environ)
    return {name: hasher.digest(name, value) for name, value in values.items()}


def engine_attributes(work: Work) -> dict[str, object]:
    """Return the attributes of ``work`` and ``work.noise`` that the engine sets for a client, by name."""
    attributes = {f"work ({name})": value for name, value in vars(work).items() if name in OF_THE_ENGINE}
    return attributes | {f"work (noise.{name})": value for name, value in vars(work.noise).items() if name != "calls"}


def replaced(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    """Return the names of objects that were replaced, added or removed between ``before`` and ``after``."""
    return {name for name in {*before, *after} if name not in before or after.get(name) is not before[name]}


def differing(before: State, after: State) -> set[str]:
    """Return the names of the pieces of state that differ, are in only one of the two states, or cannot be read."""
    differ = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    unreadable = {f"{name}: cannot tell ({value.unknown})" for name, value in after.items() if value.unknown}
    return differ | {message for message in unreadable if message.partition(": ")[0] not in differ}


def _sent(work: Work) -> Iterator[Tensor]:
    """Yield the module's tensors that the engine loads before every client: trained weights and sent statistics."""
    yield from (p for name, p in work.named.items() if p.data_ptr() == work.params[name].data_ptr())
    if len(work.buffers):
        saved = work.module.state_dict().keys()
        yield from (buffer for name, buffer in work.module.named_buffers() if name in saved)


def _of_work(work: Work) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of the attributes of ``work`` that a client's training must not change."""
    yield "names", sorted(vars(work))
    yield "clock", sorted(vars(work.clock))
    yield "logged", vars(work.logged)
    for name, value in vars(work).items():
        if name == "counters":
            yield name, [built for _, built in value]
        elif name not in OF_THE_ENGINE:
            yield name, value


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, object]]:
    for number, group in enumerate(optimizer.param_groups):
        yield from ((f"{number}.{name}", value) for name, value in group.items())
    yield from ((name, x) for name, x in vars(optimizer).items() if name not in ("param_groups", "state"))


def _attributes(module: nn.Module, sent: Mapping[int, Tensor]) -> Iterator[tuple[str, object]]:
    """Yield (name, value) of a module's tensors and attributes; of a tensor in ``sent``, only the attributes."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            yield from ((n, of_tensor(t) if id(t) in sent else t) for n, t in value.items() if t is not None)
        elif name != "_modules" and not (name == "training" and isinstance(value, bool)):
            yield name, value


def _classes(parts: Iterable[object]) -> list[type]:
    kinds = dict.fromkeys(kind for part in parts for kind in type(part).__mro__)
    return [kind for kind in kinds if not _is_ours(kind)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in OURS


def _files(classes: Iterable[type]) -> dict[str, ModuleType]:
    """Return by name the Python modules that define ``classes``, and the user's modules imported there."""
    files: dict[str, ModuleType] = {}
    todo = [kind.__module__ for kind in classes]
    while todo:
        name = todo.pop()
        if name not in files and isinstance(module := sys.modules.get(name), ModuleType):
            files[name] = module
            todo += [other for other in _imported(module) if _is_users(other)]
    return files


def _is_users(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] not in OURS and file is not None and is_user_code(file)


def _imported(module: ModuleType) -> Iterator[str]:
    """Yield the names of the Python modules that ``module`` imports, or that define values of its variables."""
    file = getattr(module, "__file__", None)
    if file and is_user_code(file):
        yield from _imports(file, module.__package__ or "")
    for value in vars(module).values():
        where = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(where, str):
            yield where


@lru_cache(maxsize=1024)
def _imports(file: str, package: str) -> list[str]:
    modules: list[str] = []
    with suppress(OSError, SyntaxError, ValueError, ImportError):  # a compiled or deleted file has no source
        for node in ast.walk(ast.parse(Path(file).read_bytes())):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                where = resolve_name("." * node.level + (node.module or ""), package)
                modules += [where, *(f"{where}.{alias.name}" for alias in node.names)]
    return modules


def _variables(module: ModuleType) -> dict[str, Any]:
    """Return all variables of a user's Python module; of a library's module, only numbers, tensors and containers."""
    variables = user_variables(vars(module), OF_FILES)
    file = getattr(module, "__file__", None)
    if file is None or is_user_code(file):
        return variables
    data = (Tensor, np.ndarray, bool, int, float, complex, bytes, list, dict, set)
    return {name: value for name, value in variables.items() if isinstance(value, data)}
