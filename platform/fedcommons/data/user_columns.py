"""The conversion of a user's set of examples to columns: inputs x, labels y, groups and factors.

Groups are the sources of the examples (such as writers or hospitals), and factors are further attributes. Accepted
forms of a set: (x, y), (x, y, groups), ``Examples``, columns by name (a dict or a scikit-learn Bunch), or a map-style
Dataset whose rows are (x, y) or dicts of columns (Hugging Face's). y is None if there are no labels. x may be a dict of
inputs by name (``user_rows``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.data.user_arrays import as_tensor, column_names, conversion_hint, is_array, kind_of
from fedcommons.errors import FEW, UserError
from fedcommons.seeding import global_states

X, Y, GROUPS = ("x", "image", "img", "data"), ("y", "label", "target"), ("groups", "group")
"""Accepted names of the columns x, y and groups, in a dict of columns or in a row."""


READ_AGAIN = 64
"""Number of evenly spaced rows of a Dataset that are read twice to detect random transforms."""


@dataclass(frozen=True)
class Columns:
    """The columns of a set of examples, in the types that the user passed.

    is_random: return whether some row of a map-style Dataset differs when it is read a second time.
    has_drawn: whether reading the Dataset changed the state of a global random generator.
    """

    x: Any
    y: Any
    groups: Any = None
    factors: Mapping[str, Any] = field(default_factory=dict)
    is_random: Callable[[], bool] = lambda: False
    has_drawn: bool = False


def is_set(part: Any) -> bool:
    """Return whether ``part`` has one of the forms of a set of examples that ``columns_of`` accepts."""
    if isinstance(part, tuple):
        has_inputs = len(part) in (2, 3) and (is_column(part[0]) or _is_named(part[0]))
        columns = has_inputs and all(t is None or is_column(t) for t in part[1:])
        first = next(iter(part[1]), None) if columns and isinstance(part[1], list) else None
        is_label = isinstance(first, list) and all(isinstance(number, int | float) for number in first)
        return columns and (is_label or not isinstance(first, tuple | list))
    if isinstance(part, Mapping):
        return any(name in part for name in X)
    listed = hasattr(part, "__getitem__") and not hasattr(part, "toarray")
    return isinstance(part, Examples) or (listed and not is_array(part))


def _is_named(thing: Any) -> bool:
    """Return whether an object is a mapping of columns: inputs by name."""
    return isinstance(thing, Mapping) and bool(thing) and all(map(is_column, thing.values()))


def is_column(thing: Any) -> bool:
    """Return whether an object is an array, or a list (or Hugging Face's ``Column``) that may become an array."""
    return is_array(thing) or isinstance(thing, list) or _is_hugging_faces(thing)


def _is_hugging_faces(thing: Any) -> bool:
    kind = type(thing)  # other sequences may be map-style Datasets
    return (kind.__module__, kind.__name__) == ("datasets.arrow_dataset", "Column")


def _listed(column: Any) -> Any:
    """Return a Hugging Face ``Column``, also as an input by name, as a list; other columns as they are."""
    if isinstance(column, Mapping):
        return {name: _listed(values) for name, values in column.items()}
    return list(column) if _is_hugging_faces(column) else column


def columns_of(what: str, part: Any) -> Columns:
    """Return the columns of the set of examples ``part``; ``what``: name of the data set for messages.

    Raises:
        UserError: the form of ``part`` is unknown.
    """
    if not is_set(part):
        raise UserError(f"{what}: train and test must each be (x, y) or a map-style Dataset, got {kind_of(part)}.")
    if isinstance(part, Examples):
        return Columns(part.x, part.y, part.groups, part.factors)
    if isinstance(part, tuple):
        return Columns(*map(_listed, part))
    if isinstance(part, Mapping):
        x, y, groups = (_listed(part[name]) if name else None for name in _names(what, part))
        return Columns(x, y, groups, part.get("factors") or {})
    return _read(what, part)


def _names(what: str, row: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return the names under which a row or a dict of columns stores x, y and groups; None if it has no groups."""
    names = [next((name for name in accepted if name in row), None) for accepted in (X, Y, GROUPS)]
    for name, accepted in zip(names[:2], (X, Y), strict=False):
        if name is None:
            raise UserError(
                f"{what}: one of {', '.join(map(str, row))} must be named {' or '.join(accepted)}; otherwise return "
                "{'x': rows['a'], 'y': rows['b']}, or [(row['a'], row['b']) for row in rows]; several inputs are a "
                "dict, {'x': {'a': rows['a'], 'c': rows['c']}, 'y': rows['b']}."
            )
    return str(names[0]), str(names[1]), names[2]


def _read(what: str, part: Any) -> Columns:
    """Read all rows of a map-style Dataset. Return its columns, and copies of some rows to detect random rows."""
    if not hasattr(part, "__len__"):
        raise UserError(f"{what}: a map-style Dataset must have a length.")
    xs, ys, groups, names = [], [], [], None
    copies: dict[int, Any] = dict.fromkeys(np.linspace(0, max(0, len(part) - 1), READ_AGAIN).astype(int).tolist())
    before = global_states()
    for i in range(len(part)):
        row = part[i]
        if isinstance(row, Mapping):
            names = names or _names(what, row)
            if missing := [name for name in names if name and name not in row]:
                raise UserError(f"{what}: row {i} has no {missing[0]}, but earlier rows have.")
            row = tuple(row[name] for name in names if name)
            groups += row[2:]
        # A list of numbers may be a row of one-hot labels, so it is not accepted as a pair (x, y).
        of_numbers = isinstance(row, list) and isinstance(next(iter(row), None), int | float)
        if not (isinstance(row, tuple | list) and len(row) >= 2) or of_numbers:
            raise UserError(
                f"{what}: each row of a map-style Dataset must be (x, y), got {kind_of(row)}{conversion_hint(row)}."
            )
        xs.append(row[0])
        ys.append(row[1])
        if i in copies:
            copies[i] = _copied((row[0], row[1]))
    y = ys if any(y is not None for y in ys) or not ys else None
    has_drawn = global_states() != before

    def is_random() -> bool:
        try:
            for i in range(len(part)) if has_drawn else copies:
                row = part[i]
                again = [row[name] for name in names if name] if names else row
                if not _is_same(copies.get(i, (xs[i], y and y[i])), tuple(again[:2])):
                    return True
        except Exception:  # user code may raise any type of error when a row is read again
            return has_drawn
        return False

    return Columns(xs, y, groups or None, is_random=is_random, has_drawn=has_drawn)


def _copied(value: Any) -> Any:
    """Return a numpy copy of an array of any library; a tuple or list becomes a list of such copies."""
    if isinstance(value, tuple | list | Mapping):
        return [_copied(item) for item in (value.values() if isinstance(value, Mapping) else value)]
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(value).copy()


def _is_same(a: Any, b: Any) -> bool:
    a, b = (list(item.values()) if isinstance(item, Mapping) else item for item in (a, b))
    if isinstance(a, tuple | list):
        return all(map(_is_same, a, b))
    x, y = _copied(a), _copied(b)
    return x.shape == y.shape and bool(((x == y) | (x != x)).all())  # NaN counts as equal to every value


def examples_of(what: str, columns: Columns) -> Tensor:
    """Return the inputs x as a tensor (n, ...); uint8 images as (n, C, H, W), float64 as float32.

    Raises:
        UserError: x contains no valid numbers or has an invalid shape.
    """
    x = _stacked(what, columns.x) if isinstance(columns.x, list) else as_tensor(what, "examples", columns.x)
    if x.dim() == 0:
        raise UserError(f"{what}: labels must be one for each of the 0 examples, which are a single number.")
    if 0 in x.shape[1:]:
        raise UserError(f"{what}: examples must have at least one number each, got {tuple(x.shape)}.")
    if x.dtype == torch.uint8 and x.dim() not in (3, 4):
        raise UserError(
            f"{what}: uint8 examples must be images (n, H, W) or (n, C, H, W), got {tuple(x.shape)}; give other "
            "bytes as x.astype(int)."
        )
    if x.dtype == torch.uint8 and x.dim() == 3:
        x = x.unsqueeze(1)  # add the channel dimension to grey images (n, H, W)
    if x.dtype == torch.uint8 and x.dim() == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    elif x.dtype == torch.uint8 and x.shape[1] > 4 and x.shape[3] in (2, 4):
        raise UserError(
            f"{what}: images must have the {x.shape[3]} channels first, (n, C, H, W), got {tuple(x.shape)}."
        )
    if x.dtype == torch.float64:
        x = x.float()  # modules with float32 weights need float32 inputs
    if x.is_floating_point() and not (finite := x.isfinite()).all():
        n = int((~finite.reshape(len(x), -1).all(1)).sum())
        names = compress(column_names(columns.x, x.shape[1]), ~finite.all(0)) if x.dim() == 2 else ()
        where = f" in column {', '.join(islice(names, FEW))}" if x.dim() == 2 else ""
        raise UserError(f"{what}: examples must be finite numbers, but {n} of {len(x)} contain NaN or infinity{where}.")
    return x.contiguous()


def labels_of(what: str, labels: Any, n: int) -> Tensor:
    """Return y as a tensor; zeros if ``labels`` is None.

    int64: classes (n,), or a class per position (n, ...), such as (n, L) or (n, H, W). floats: (n,) or (n, k), for
    regression.

    The type of the numbers decides: whole numbers of a float type, such as 2.0, are labels for regression.
    n: number of examples. what: name of the data set for messages.

    Raises:
        UserError: the labels are one-hot, not finite, or not one per example.
    """
    if labels is None:
        return torch.zeros(n, dtype=torch.int64)
    y = _stacked(what, labels, "labels") if _is_list_of_arrays(labels) else as_tensor(what, "labels", labels)
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dim() == 2 and len(y) and (y.count_nonzero(1) == 1).all() and (y.sum(1) == 1).all():
        raise UserError(f"{what}: labels are one-hot {tuple(y.shape)}: return y.argmax(1).")
    if not y.dim() or (y.is_floating_point() and y.dim() > 2) or len(y) != n or 0 in y.shape[1:]:
        raise UserError(
            f"{what}: labels must be one for each of the {n} examples, got {tuple(y.shape)} {y.dtype}: whole numbers, "
            "(n,) for classes or (n, ...) for a class per position, or floats, (n,) or (n, k)."
        )
    if not y.is_floating_point():
        return y.long()
    if not y.isfinite().all():
        raise UserError(f"{what}: labels must be finite numbers, but some are NaN or infinite.")
    return y.float()


def numbers_of(what: str, which: str, sets: list[Any], lengths: list[int]) -> list[Tensor | None]:
    """Replace the names of groups, or the values of a factor, by numbers 0, 1, ..., equal in all sets of a data set.

    Return the numbers, (n,) int64 per set, in the order of the sorted names or values; None for a set without the
    column. sets: one column (n,) or None per set, such as train and test. lengths: number of examples per set.
    what, which: names of the data set and of the column, for messages.

    Raises:
        UserError: a column does not have one value for each example.
    """
    arrays = [item.numpy(force=True) if isinstance(item, Tensor) else item for item in sets]
    columns = {i: np.asarray(item) for i, item in enumerate(arrays) if item is not None}
    for i, column in columns.items():
        if column.shape != (lengths[i],) or column.dtype.kind not in "biufUSO":
            raise UserError(
                f"{what}: {which} must be one number or text for each of the {lengths[i]} examples, got {column.shape} "
                f"{column.dtype.name}."
            )
    if not columns:
        return [None for _ in sets]
    everything = np.concatenate([*columns.values()])
    everything = everything.astype(str) if everything.dtype.kind == "O" else everything
    numbers = np.unique(everything, return_inverse=True)[1]
    rest = iter(np.split(numbers.ravel(), np.cumsum([lengths[i] for i in columns])[:-1]))
    return [torch.from_numpy(next(rest).astype(np.int64)) if i in columns else None for i in range(len(sets))]


def _is_list_of_arrays(labels: Any) -> bool:
    return isinstance(labels, list) and bool(labels) and isinstance(labels[0], Tensor) and labels[0].dim() > 0


def _stacked(what: str, examples: list[Any], which: str = "examples") -> Tensor:
    if not examples:
        raise UserError(f"{what} has no examples.")
    tensors = [as_tensor(what, which, x) for x in examples]
    if shapes := sorted({tuple(t.shape) for t in tensors})[1:]:
        raise UserError(
            f"{what}: all {which} must have the same shape, but one has {shapes[0]}; state pad, the fill value of "
            "shorter sequences, or collate, a function of all rows that returns (x, y)."
        )
    return torch.stack(tensors)
