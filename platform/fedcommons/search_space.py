"""Search spaces from the command line: ``alpha=0.01,0.1`` is a grid, ``p=uniform(0,0.5)`` a distribution."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, get_args, get_type_hints

import numpy as np
from ray import tune

from fedcommons.config import IGNORED_BY_RESULTS, SHORT_NAMES, Experiment, field_names
from fedcommons.errors import UserError, unknown
from fedcommons.seeds import numpy_generator

DISTRIBUTIONS = {"uniform": tune.uniform, "loguniform": tune.loguniform, "randint": tune.randint}

Space = Mapping[str, "list[Any] | Any"]
"""Dotted field to a list of values or one of Ray Tune's distributions."""


def parse(texts: Sequence[str]) -> Space:
    """The space that ``NAME=VALUES`` texts describe; NAME is a dotted field or a short name of methods.md section 0.

    Raises:
        UserError: a text, name, value or distribution that is not understood.
    """
    space: dict[str, Any] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        field = SHORT_NAMES.get(name, name)
        if field not in field_names():
            raise unknown("swept field", name, [*SHORT_NAMES, *field_names()])
        if not equals or not values.strip():
            raise UserError(f"--space takes NAME=VALUES such as alpha=0.01,0.1 or p=uniform(0,0.5), got {text!r}.")
        if field in IGNORED_BY_RESULTS:
            raise UserError(f"--space: {field} changes no result and cannot be swept.")
        if field in space:
            raise UserError(f"--space: {field} is swept twice.")
        space[field] = _values(field, values.strip())
    return space


def points(space: Space, samples: int, seed: int) -> list[dict[str, Any]]:
    """Every combination of the grids, each with ``samples`` draws of the distributions (once where there are none).

    Draws are keyed by (seed, field, number), so a larger ``samples`` keeps the points of a smaller one.
    """
    grids = {name: values for name, values in space.items() if isinstance(values, list)}
    drawn = {name: domain for name, domain in space.items() if not isinstance(domain, list)}
    return [
        {**dict(zip(grids, values, strict=True)), **{n: _draw(d, seed, n, i) for n, d in drawn.items()}}
        for values in product(*grids.values())
        for i in range(samples if drawn else 1)
    ]


def _draw(domain: Any, seed: int, name: str, number: int) -> Any:
    value = domain.sample(random_state=numpy_generator(seed, "search", name, number))
    return int(value) if isinstance(value, int | np.integer) else float(f"{float(value):.6g}")


def _values(field: str, text: str) -> Any:
    call = re.fullmatch(r"(\w+)\((.*)\)", text)
    if not call:
        return [_value(field, part) for part in text.split(",")]
    name, arguments = call.groups()
    if name not in DISTRIBUTIONS:
        raise unknown("distribution", name, DISTRIBUTIONS)
    kind, fits = _kind(field), {float: ("uniform", "loguniform"), int: ("randint",)}
    if name not in fits.get(kind, ()):
        allowed = " or ".join(fits.get(kind, ())) or "a list of values only"
        raise UserError(f"--space {field} takes {allowed}, as it is {kind.__name__}; got {name}.")
    try:
        low, high = (float(part) for part in arguments.split(","))
        if not low < high or (name == "loguniform" and low <= 0):
            raise ValueError
    except ValueError:
        need = "0 < LOW < HIGH" if name == "loguniform" else "LOW < HIGH"
        raise UserError(f"--space {field}: {name} takes (LOW,HIGH) with {need}, got ({arguments}).") from None
    return DISTRIBUTIONS[name](int(low), int(high)) if name == "randint" else DISTRIBUTIONS[name](low, high)


def _kind(field: str) -> type:
    """The type of a field's values, None left out."""
    section, _, leaf = field.rpartition(".")
    hint = get_type_hints(get_type_hints(Experiment)[section] if section else Experiment)[leaf]
    return next(k for k in (get_args(hint) or (hint,)) if k is not type(None))


def _value(field: str, text: str) -> Any:
    kind = _kind(field)
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.strip().lower()]
        if kind in (int, float, str):
            return kind(text.strip())
    except (ValueError, KeyError):
        raise UserError(f"--space {field} takes {kind.__name__} values separated by commas, got {text!r}.") from None
    raise UserError(f"--space: {field} is a list and cannot be swept.")
