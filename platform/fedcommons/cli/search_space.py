"""Search spaces of ``--space``: ``alpha=0.01,0.1`` is a grid of values, ``p=uniform(0,0.5)`` a distribution."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from fedcommons.cli.values import split
from fedcommons.config.dotted import SHORT_NAMES, full_name, is_ignored, unchosen_field_error
from fedcommons.config.fields import Field
from fedcommons.errors import UserError, quote, unknown
from fedcommons.seeding import numpy_generator

LIMITS = {
    "uniform": (float, -1e300, 1e300, "LOW < HIGH, within 1e300 of 0"),
    "loguniform": (float, 1e-300, 1e300, "0 < LOW < HIGH, from 1e-300 to 1e300"),
    "randint": (int, 0, 2**62, "whole 0 <= LOW < HIGH, up to 2^62"),
}
"""Distribution -> (type of its values, smallest lower bound LOW, largest upper bound HIGH, condition in words)."""

SearchSpace = Mapping[str, "list[Any] | Any"]
"""Dotted name of a field -> list of values (grid) or a distribution of Ray Tune."""


def read_space(texts: Sequence[str], fields: Mapping[str, Field], chosen: Mapping[str, Sequence[str]]) -> SearchSpace:
    """Return the search space that the texts ``NAME=VALUES`` describe.

    fields: dotted name -> field; NAME is one of these names or a short name. chosen: kind -> names of components.

    Raises:
        UserError: a text, name, value or distribution is invalid.
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
            raise UserError(f"--space: {field} cannot be swept, because no result depends on it.")
        if field in space:
            raise UserError(f"--space: {field} is swept twice; name each field once.")
        space[field] = _values(field, fields[field], values.strip())
    return space


def points(space: SearchSpace, samples: int, seed: int, few: int | None = None) -> list[dict[str, Any]]:
    """Return the points of a search space, each a mapping from field to value.

    Each combination of the grids is combined with each of ``samples`` draws of the distributions. Without
    distributions, each combination is one point. A draw depends on (seed, field, number of the draw), so a larger
    ``samples`` keeps the earlier points.
    few: number of combinations of the grids, which ``some`` chooses; None: all combinations.
    """
    grids = {name: values for name, values in space.items() if isinstance(values, list)}
    distributions = {name: domain for name, domain in space.items() if not isinstance(domain, list)}
    lists = [*grids.values(), range(samples if distributions else 1)]
    return [
        {**dict(zip(grids, values, strict=True)), **{n: _draw(d, seed, n, i) for n, d in distributions.items()}}
        for *values, i in (product(*lists) if few is None else some(lists, few))
    ]


def count(space: SearchSpace, samples: int) -> int:
    """Return the number of points of a search space, as ``points`` would create them. samples: see ``points``."""
    grids = [values for values in space.values() if isinstance(values, list)]
    return prod(map(len, grids)) * (samples if len(grids) < len(space) else 1)


def some(lists: Sequence[Sequence[Any]], few: int) -> list[tuple[Any, ...]]:
    """Return ``few`` random combinations of one value per list, the same in each call, without listing all of them."""
    rng = numpy_generator(0, "some combinations")
    return [tuple(values[int(rng.integers(len(values)))] for values in lists) for _ in range(few)]


def ends(space: SearchSpace) -> list[dict[str, Any]]:
    """Return points for a check of the search space: they contain all grid values and both ends of all distributions.

    The first point has the first values. Each other point differs from the first point in one field. If both ends of a
    distribution are allowed, all values between the ends are allowed too.
    """
    values = {name: options if isinstance(options, list) else _ends(options) for name, options in space.items()}
    first = {name: several[0] for name, several in values.items()}
    return [first, *({**first, name: value} for name, several in values.items() for value in several[1:])]


def _ends(domain: Any) -> list[Any]:
    """Return the smallest and largest value of a distribution. For ``randint`` the largest value is HIGH - 1."""
    return [domain.lower, domain.upper - 1 if isinstance(domain.lower, int) else domain.upper]


def _draw(domain: Any, seed: int, name: str, number: int) -> Any:
    value = domain.sample(random_state=numpy_generator(seed, "search", name, number))
    return int(value) if isinstance(value, int | np.integer) else float(f"{float(value):.6g}")


def _values(field: str, its: Field, text: str) -> Any:
    kind = its.kinds[0]
    call = re.fullmatch(r"(\w+)\((.*)\)", text)
    if kind is tuple:
        raise UserError(f"--space: {field} cannot be swept, because its value is a list.")
    if not call:
        return list(split(f"--space {field}", text, kind if kind is not bool else truth, its.allowed))
    name, arguments = call.groups()
    if name not in LIMITS:
        raise unknown("distribution", name, LIMITS)
    number_type, least, most, need = LIMITS[name]
    if number_type is not kind:
        allowed = " or ".join(n for n, limits in LIMITS.items() if limits[0] is kind) or "a list of values only"
        raise UserError(f"--space {field} takes {allowed}, as it is {kind.__name__}; got {name}.")
    try:
        low, high = split(f"--space {field}", arguments, kind)
        if not least <= low < high <= most:
            raise ValueError
    except (UserError, ValueError):
        raise UserError(f"--space {field}: {name} takes (LOW,HIGH) with {need}, got ({arguments}).") from None
    from ray import tune  # imported late, because the import takes a second

    return getattr(tune, name)(low, high)


def truth(text: str) -> bool:
    """Convert the text true or false to a bool.

    Raises:
        ValueError: the text is neither ``true`` nor ``false``, in any case of letters.
    """
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"
