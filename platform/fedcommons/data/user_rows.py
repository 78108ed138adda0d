"""Rows of a user's data set that are no arrays of one shape: inputs by name, sequences of unequal length, collation.

Inputs by name, such as {"ids": ids, "mask": mask}, become one tensor (n, D): the flattened inputs side by side, all as
int64 or all as float32. ``Source.inputs`` has their names and shapes, by which ``lightning_modules`` divides the tensor
again. Sequences are padded to the length of the longest of all sets: inputs by ``pad``, labels by ``IGNORED``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.data.user_arrays import as_tensor
from fedcommons.data.user_columns import Columns, columns_of, is_set
from fedcommons.errors import UserError, quote, user_code_context
from lightning_modules.classifier import IGNORED

Inputs = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape (without the number of examples) of each input."""


def collated(what: str, parts: Sequence[Any], collate: Callable[[list[Any]], Any]) -> list[Columns]:
    """Return the columns of each set after one call of ``collate`` on the rows of all sets, so that shapes are equal.

    Raises:
        UserError: ``collate`` does not return (x, y) or a dict of columns with one entry per row.
    """
    rows = [[part[i] for i in range(len(part))] for part in parts]
    with user_code_context(f"{what}: collate"):
        batch = collate([row for of_set in rows for row in of_set])
    if not (isinstance(batch, tuple | Mapping) and is_set(batch)):
        raise UserError(f"{what}: collate must return (x, y) or {{'x': ..., 'y': ...}}, got {type(batch).__name__}.")
    both, result, first = columns_of(what, batch), [], 0
    for of_set in rows:
        part = slice(first, first := first + len(of_set))
        x = {n: t[part] for n, t in both.x.items()} if isinstance(both.x, Mapping) else both.x[part]
        y, groups = (None if column is None else column[part] for column in (both.y, both.groups))
        result.append(Columns(x, y, groups, {name: values[part] for name, values in both.factors.items()}))
    return result


def by_name(what: str, x: Any) -> dict[str, Any] | None:
    """Return the inputs by name if ``x`` is a mapping of columns or a list of mappings; otherwise None."""
    if isinstance(x, Mapping):
        return {str(name): column for name, column in x.items()}
    if not (isinstance(x, list) and x and isinstance(x[0], Mapping)):
        return None
    names = list(x[0])
    if other := next((i for i, row in enumerate(x) if set(row) != set(names)), None):
        raise UserError(f"{what}: row {other} has the inputs {', '.join(map(str, x[other]))}, not those of row 0.")
    return {str(name): [row[name] for row in x] for name in names}


def padded(what: str, sets: list[Columns], pad: Any) -> list[Columns]:
    """Return the sets with all sequences padded to the length of the longest. pad: number, or numbers by input name."""
    values: Mapping[str, Any] | None = pad if isinstance(pad, Mapping) else None
    number: Any = pad
    for value in (pad,) if values is None else values.values():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{what}: pad must be a number, or a number for each input by name, got {quote(value)}.")
    names = [by_name(what, columns.x) for columns in sets]
    xs: list[Any] = [columns.x for columns in sets]
    if names[0] is not None:
        inputs = [name or {} for name in names]
        if set(inputs[0]) != set(inputs[-1]):
            a, b = (", ".join(each) or "not named" for each in (inputs[0], inputs[-1]))
            raise UserError(f"{what}: training inputs are {a}, and test inputs {b}.")
        if values is not None and (lacking := [name for name in inputs[0] if name not in values]):
            raise UserError(f"{what}: pad has no number for the input {lacking[0]}.")
        of_name = {
            name: _padded(what, [each[name] for each in inputs], number if values is None else values[name])
            for name in inputs[0]
        }
        xs = [{name: of_name[name][i] for name in of_name} for i in range(len(sets))]
    elif values is not None:
        raise UserError(f"{what}: pad must be a number, as its inputs have no names.")
    else:
        xs = _padded(what, xs, number)
    ys = _padded(what, [columns.y for columns in sets], None)
    return [replace(columns, x=x, y=y) for columns, x, y in zip(sets, xs, ys, strict=True)]


def _padded(what: str, columns: list[Any], value: float | None) -> list[Any]:
    """Return the columns of all sets, with rows padded along their first axis if the column is a list of sequences.

    value: the number that fills the rows of an input; None if the columns are labels, which ``IGNORED`` fills.

    Raises:
        UserError: the rows' type cannot represent ``value``, or labels of unequal length are floats.
    """
    if not all(isinstance(column, list) for column in columns):
        return columns
    rows = [
        [as_tensor(what, "examples" if value is not None else "labels", row) for row in column] for column in columns
    ]
    each = [row for of_set in rows for row in of_set]
    if any(row.dim() == 0 for row in each) or len({len(row) for row in each}) < 2:
        return columns
    longest = max(len(row) for row in each)
    if value is None:
        if any(row.is_floating_point() for row in each):
            raise UserError(f"{what}: labels of unequal length must be classes (whole numbers), and some are floats.")
        rows, value = [[row.long() for row in of_set] for of_set in rows], IGNORED
    stated = torch.tensor(value, dtype=torch.float64)
    for kind in {row.dtype for of_set in rows for row in of_set}:
        if not kind.is_floating_point and stated.to(kind) != stated:
            raise UserError(f"{what}: pad must be a whole number in the range of {kind}, got {quote(value)}.")
    return [
        [F.pad(row, [0, 0] * (row.dim() - 1) + [0, longest - len(row)], value=value) for row in of_set]
        for of_set in rows
    ]


def packed(what: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Inputs]:
    """Return the inputs as one tensor (n, D), int64 or float32, and their names and shapes.

    Raises:
        UserError: the inputs have unequal numbers of rows, or some are whole numbers and others floats.
    """
    kinds = {name: "floats" if t.is_floating_point() else "whole numbers" for name, t in tensors.items()}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(f"{what}: its inputs must be all whole numbers or all floats, got {listed}.")
    if len({len(t) for t in tensors.values()}) != 1 or not all(name.isidentifier() for name in tensors):
        listed = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise UserError(f"{what}: inputs need valid Python names and equal numbers of rows, got {listed}.")
    flat = [t.reshape(len(t), prod(t.shape[1:])) for t in tensors.values()]
    x = torch.cat([t.float() if t.is_floating_point() else t.long() for t in flat], 1)
    return x, tuple((name, tuple(t.shape[1:])) for name, t in tensors.items())
