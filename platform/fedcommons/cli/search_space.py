"""Search spaces from the command line: ``alpha=0.01,0.1`` is a grid, ``p=uniform(0,0.5)`` a distribution."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from fedcommons.cli import parse
from fedcommons.config.dotted import SHORT_NAMES, full_name, is_ignored, unchosen_field_error
from fedcommons.config.fields import Field
from fedcommons.errors import UserError, quote, unknown
from fedcommons.seeding import numpy_generator

LIMITS = {
    "uniform": (-1e300, 1e300, "LOW < HIGH, within 1e300 of 0"),
    "loguniform": (1e-300, 1e300, "0 < LOW < HIGH, from 1e-300 to 1e300"),
    "randint": (0, 2**62, "whole 0 <= LOW < HIGH, up to 2^62"),
}
"""The smallest LOW and the largest HIGH of each distribution, and the condition in words."""

SearchSpace = Mapping[str, "list[Any] | Any"]
"""Dotted field to a list of values or one of Ray Tune's distributions."""


def read_space(texts: Sequence[str], fields: Mapping[str, Field], chosen: Mapping[str, Sequence[str]]) -> SearchSpace:
    """The space that ``NAME=VALUES`` texts describe; NAME is one of ``fields`` or a short name of one.

    Raises:
        UserError: a text, name, value or distribution that is not understood.
    """
    space: dict[str, Any] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        field = full_name(name, fields, chosen)
        if field not in fields:
            raise unchosen_field_error(field, chosen) or unknown("swept field", name, [*SHORT_NAMES, *fields])
        if not equals or not values.strip():
            raise UserError(f"--space takes NAME=VALUES such as alpha=0.01,0.1 or p=uniform(0,0.5), got {quote(text)}.")
        if is_ignored(field):
            raise UserError(f"--space: {field} changes no result and cannot be swept.")
        if field in space:
            raise UserError(f"--space: {field} is swept twice.")
        space[field] = _values(field, fields[field], values.strip())
    return space


def points(space: SearchSpace, samples: int, seed: int, few: int | None = None) -> list[dict[str, Any]]:
    """Every combination of the grids, each with ``samples`` draws of the distributions (one point if there are none).

    Draws are keyed by (seed, field, number), so raising ``samples`` keeps the earlier points and adds new ones.
    few: only so many of the points, see ``some``.
    """
    grids = {name: values for name, values in space.items() if isinstance(values, list)}
    drawn = {name: domain for name, domain in space.items() if not isinstance(domain, list)}
    lists = [*grids.values(), range(samples if drawn else 1)]
    return [
        {**dict(zip(grids, values, strict=True)), **{n: _draw(d, seed, n, i) for n, d in drawn.items()}}
        for *values, i in (product(*lists) if few is None else some(lists, few))
    ]


def count(space: SearchSpace, samples: int) -> int:
    """The number of points of a space, of which none is made."""
    grids = [values for values in space.values() if isinstance(values, list)]
    return prod(map(len, grids)) * (samples if len(grids) < len(space) else 1)


def some(lists: Sequence[Sequence[Any]], few: int) -> list[tuple[Any, ...]]:
    """So many combinations of these lists, drawn at random, the same ones each time; no other is made."""
    rng = numpy_generator(0, "some combinations")
    return [tuple(values[int(rng.integers(len(values)))] for values in lists) for _ in range(few)]


def ends(space: SearchSpace) -> list[dict[str, Any]]:
    """A point of the space, and that point with each field at each of its values, or at both ends of its distribution.

    What is allowed at the ends is allowed between them.
    """
    values = {name: one if isinstance(one, list) else _ends(one) for name, one in space.items()}
    first = {name: several[0] for name, several in values.items()}
    return [first, *({**first, name: value} for name, several in values.items() for value in several[1:])]


def _ends(domain: Any) -> list[Any]:
    """Of ``randint`` HIGH itself is not drawn."""
    return [domain.lower, domain.upper - 1 if isinstance(domain.lower, int) else domain.upper]


def _draw(domain: Any, seed: int, name: str, number: int) -> Any:
    value = domain.sample(random_state=numpy_generator(seed, "search", name, number))
    return int(value) if isinstance(value, int | np.integer) else float(f"{float(value):.6g}")


def _values(field: str, its: Field, text: str) -> Any:
    kind = its.kinds[0]
    call = re.fullmatch(r"(\w+)\((.*)\)", text)
    if kind is tuple:
        raise UserError(f"--space: {field} is a list and cannot be swept.")
    if not call:
        return list(parse.split(f"--space {field}", text, kind if kind is not bool else truth, its.allowed))
    name, arguments = call.groups()
    if name not in LIMITS:
        raise unknown("distribution", name, LIMITS)
    fits = {float: ("uniform", "loguniform"), int: ("randint",)}
    if name not in fits.get(kind, ()):
        allowed = " or ".join(fits.get(kind, ())) or "a list of values only"
        raise UserError(f"--space {field} takes {allowed}, as it is {kind.__name__}; got {name}.")
    least, most, need = LIMITS[name]
    try:
        low, high = parse.split(f"--space {field}", arguments, kind)
        if not least <= low < high <= most:
            raise ValueError
    except (UserError, ValueError):
        raise UserError(f"--space {field}: {name} takes (LOW,HIGH) with {need}, got ({arguments}).") from None
    from ray import tune  # it takes a second to import

    return {"uniform": tune.uniform, "loguniform": tune.loguniform, "randint": tune.randint}[name](low, high)


def truth(text: str) -> bool:
    """A truth value, which is true or false.

    Raises:
        ValueError: it is neither.
    """
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"
