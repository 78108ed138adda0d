"""Python objects as values of an experiment's fields: classes, functions, instances, arrays, Datasets, data frames.

An object becomes the record that a component in a file has: a name, the hash of its code and the values of its
constants. A class of a file is used as the file defines it. Other code, such as a notebook's, has a name
``__main__:NAME`` and no hash, as no hash of its source covers all values that it uses: its runs cannot be resumed.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from secrets import token_hex
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, cast
from warnings import warn

import numpy as np

from fedcommons.config import live_objects, presets, registry, user_loader
from fedcommons.config.dotted import SHORT_NAMES
from fedcommons.config.experiment import Experiment
from fedcommons.config.live_objects import LiveObject
from fedcommons.config.registry import KINDS
from fedcommons.core.digests import Hasher, attributes, is_users
from fedcommons.data import user_data
from fedcommons.data.user_columns import GROUPS, Y
from fedcommons.deprecated import adopt_old_methods
from fedcommons.errors import UserError, before_any_work, quote, unknown, user_code_context

PLAIN = (bool, int, float, str, NoneType)

Code = type | FunctionType | BuiltinFunctionType


def experiment(
    name: str = "small", dataset: Any = "digits", values: Mapping[str, Any] | None = None, **fields: Any
) -> Experiment:
    """Return the experiment of a preset, with some fields replaced.

    ``experiment(algorithm=Prox(mu=0.1), model=MyNet, data=(x, y), alpha=0.1, **{"client.epochs": 2})`` names fields as
    the command line does. The value of a field that names a component may also be a class, a function, a
    ``functools.partial`` or an object of a class, whose constants are attributes of the same names. Data may also be
    anything that a data set's function may return, a pandas DataFrame with a column ``label``, or (frame, name of its
    label column).

    Args:
        name: name of the preset: smoke, small, paper or authors.
        dataset: name of the data set, or data as above.
        values: field -> value, in addition to ``fields``. Lists are converted to tuples, numpy scalars to Python
            numbers, and paths to texts.
        fields: field -> value; replaces the same field in ``values``.

    Raises:
        UserError: a field is unknown, a value is out of its range, or an object has state that its constants do not
            describe.
    """
    if not isinstance(values, Mapping | None):
        raise UserError(f"values must be a mapping from names of fields to values, got {quote(values)}.")
    by_field = {SHORT_NAMES.get(n, n): v for n, v in {"data": dataset, **(values or {}), **fields}.items()}
    objects = {kind: value for kind, k in KINDS.items() if _is_object(value := by_field.get(k.field))}
    parts: dict[str, Any] = {}
    for kind, value in objects.items():
        by_field[KINDS[kind].field], constants = component, _ = _component(kind, value)
        live = live_objects.objects.get(component)
        if live and parts.setdefault(component, live.component) is not live.component:
            raise UserError(f"{KINDS[kind].field}: two classes are called {component}: rename one.")
        section = registry.section(kind, component)
        if both := [n for n in constants if f"{section}.{n}" in by_field]:
            raise UserError(f"{section}.{both[0]} is set twice, by an object and as a field: leave one out.")
        by_field |= {f"{section}.{n}": v for n, v in constants.items()}
    of_data = by_field["data.name"] if "data" in objects else dataset
    config = presets.experiment(name, of_data, by_field)
    for message in live_objects.unhashed(config.source, config.chosen):
        warn(message, stacklevel=2)  # also shown where the logger is not configured, as in a notebook
    return config


def _is_object(value: object) -> bool:
    return not isinstance(value, (*PLAIN, PurePath, np.generic))


def _component(kind: str, value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the component that an object stands for, and the constants that the object states."""
    field, constants = KINDS[kind].field, dict[str, Any]()
    if kind == "data" and not isinstance(value, Code | partial):
        return _data(value), constants
    is_instance = not isinstance(value, Code | partial)
    if isinstance(value, partial):
        if value.args or not isinstance(value.func, Code):
            raise UserError(f"{field}: functools.partial may only set constants by name, as partial(MyNet, width=8).")
        part, constants = value.func, {n: _plain(f"{field}: {n}", v) for n, v in value.keywords.items()}
    elif is_instance and KINDS[kind].has:
        part = type(value)
    elif is_instance:
        raise UserError(
            f"{field} takes a class, a function or a name, got an object of the class {type(value).__name__}: pass the "
            f"class, or a function that makes the object."
        )
    else:
        part = value
    name = _named(kind, part)
    return name, _constants(kind, name, value) if is_instance else constants


def _named(kind: str, part: Any) -> str:
    """Return the name of a class or function: in the package, in a module, or as an object of this process."""
    field, path = KINDS[kind].field, f"{part.__module__}:{part.__qualname__}"
    in_module = getattr(sys.modules.get(part.__module__), part.__qualname__, None)
    if in_module is part and not is_users(part):
        return next((name for name, where in KINDS[kind].components.items() if where == path), path)
    # The class may be older than the module's class now, which the registry and other processes import again.
    is_of_module = part.__module__ != "__main__" and in_module is not None and is_users(part)
    if is_of_module and user_loader.read(part.__module__, registry.base(), f"{field} {path}"):
        _require_same(f"{field} {path}", part, registry.find(kind, path))
        return path
    if kind == "generator":
        raise UserError(f"{field} {path} must come from a module, as its images are stored under the hash of its code.")
    adopt_old_methods(kind, part)
    label = f"lambda_{kind}" if part.__name__ == "<lambda>" else part.__name__
    same = [(name, o) for name, o in live_objects.objects.items() if o.component is part]
    if same:
        return same[0][0]
    code = live_objects.UNHASHED + token_hex(8)
    name = f"{live_objects.PREFIX}{label}"  # without the code: the seed of the split into test examples depends on it
    live_objects.objects[name] = LiveObject(part, code)
    return name


def _require_same(what: str, part: Any, of_file: Any) -> None:
    """Check that a class or function is what its file defines, as other processes import the file."""
    members, theirs = ({**vars(p), p.__name__: p} for p in (part, of_file))
    for name, member in members.items():
        ours, its = (getattr(m, "__func__", m) for m in (member, theirs.get(name)))
        codes = getattr(ours, "__code__", None), getattr(its, "__code__", None)
        if codes[0] != codes[1] or (type(ours) in PLAIN and ours != its):
            raise UserError(f"{what}: its {name} is not what the file defines: import the file again.")


def _constants(kind: str, name: str, value: Any) -> dict[str, Any]:
    """Return the constants with which an object was made, read from its attributes.

    Raises:
        UserError: an attribute is missing or no plain value, or an object with these constants differs from ``value``.
    """
    what, constants = registry.component_label(kind, name), dict[str, Any]()
    for constant in registry.constants(kind, name):
        with before_any_work(), user_code_context(what):
            stated = getattr(value, constant, _data)
        constants[constant] = _plain(f"{what}: its attribute {constant}", stated)
    ours, its = (Hasher({}).digest("", attributes(o)) for o in (value, registry.make(kind, name, constants)))
    if ours != its or ours.unknown:
        raise UserError(
            f"{what}: only its constants ({', '.join(constants) or 'it has none'}) are recorded, and an object made of "
            "them differs from this one: make each attribute a parameter of its constructor."
        )
    return constants


def _plain(what: str, value: Any) -> Any:
    """Return a constant as a config states it.

    Raises:
        UserError: ``value`` is missing, or no number, text, bool, None or list of these.
    """
    stated = presets.plain(value)
    if wrong := [m for m in (stated if isinstance(stated, tuple) else (stated,)) if not isinstance(m, PLAIN)]:
        has = "is missing" if wrong[0] is _data else f"holds a {type(wrong[0]).__name__}"
        raise UserError(
            f"{what} {has}, but must be the constant that the constructor got: a number, text, bool, None or list of "
            "these."
        )
    return stated


def _data(value: Any) -> str:
    """Register a copy of a data set's examples; return its name, which contains the hash of the examples."""
    with before_any_work(), user_code_context("data"):
        content = user_data.snapshot(f"of type {type(value).__name__}", _columns_of_frame(value))
    content_hash = Hasher({}).digest("data", content)
    code = live_objects.UNHASHED + token_hex(8) if content_hash.unknown else content_hash.value.hex()[:24]
    name = f"{live_objects.PREFIX}data_{code[-16:]}"
    live_objects.objects.setdefault(name, LiveObject(lambda: content, code))
    return name


def _columns_of_frame(value: Any) -> Any:
    """Return the columns x, y and groups of a pandas DataFrame, of (frame, label column) or of (train, test)."""
    pandas: Any = sys.modules.get("pandas")
    is_pair = isinstance(value, tuple) and len(value) == 2
    if pandas is not None and is_pair and all(isinstance(part, pandas.DataFrame) for part in value):
        return {name: _columns_of_frame(part) for name, part in zip(("train", "test"), value, strict=True)}
    frame, label = value if is_pair and isinstance(value[1], str | int) else cast(tuple[Any, Any], (value, None))
    if pandas is None or not isinstance(frame, pandas.DataFrame):
        return value
    names, columns = list(frame.columns), dict[str, Any]()
    if not frame.columns.is_unique:
        raise UserError("data: two columns of the DataFrame have the same name.")
    if label is not None and label not in names:
        raise unknown("column", str(label), map(str, names))
    for column, accepted in (("y", Y if label is None else [label]), ("groups", GROUPS)):
        present = [name for name in accepted if name in names]
        if len(present) > 1 or not (present or column == "groups"):
            has = " and ".join(present) or "none"
            raise UserError(
                f"data: a DataFrame needs one column {' or '.join(accepted)}, got {has}; data=(frame, 'price') names "
                "the column of the labels."
            )
        for name in present:
            columns[column] = frame[name].to_numpy()
            names.remove(name)
    x = frame[names]
    is_numeric = len(x.select_dtypes(["number", "bool"], exclude=["complex", "timedelta"]).columns) == len(names)
    return {"x": x.astype(float) if is_numeric else x, **columns}  # whole numbers of a table are no tokens
