"""The user's own data sets as tensors: arrays, or any map-style torch Dataset.

uint8 examples (n, C, H, W) are images. Floating examples must be normalised; if their mean and std are given, they are
normalised here, else they are refused. Examples of other whole numbers are tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.arrays import as_array, as_tensor, how, is_array, kind_of
from fedcommons.data.examples import Examples, Source
from fedcommons.errors import UserError, shown
from fedcommons.seeds import numpy_generator

TEST = 0.2
"""Share of the examples that become the test set if a data set has none."""

MOST_CLASSES = 10**6
"""More are taken for labels that are no classes: every client has a count of each."""


def source(name: str, returned: Any) -> Source:
    """What a data set part returned, as tensors that nobody else holds.

    returned: a ``Source``, a pair (train, test), an object with ``train`` and ``test``, or one set. Of one set a fifth
    becomes the test set, drawn with the data set's name as key. A set is (x, y) or a map-style Dataset of (x, y). The
    object may have the attributes n_classes, mean, std and ``normalised``.

    Raises:
        UserError: it is none of these, or its examples cannot be used.
    """
    sets = _sets(name, returned)
    train, test = [_examples(name, part) for part in sets] if len(sets) == 2 else _split(name, sets[0])
    for which, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"data set {name} has no {which} examples.")
        low, high = int(part.y.min()), int(part.y.max())
        if low < 0 or high >= MOST_CLASSES:
            wrong = low if low < 0 else high
            raise UserError(f"data set {name}: labels must be 0, 1, ..., at most {MOST_CLASSES - 1}, got {wrong}.")
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        raise UserError(
            f"data set {name}: training examples are {tuple(train.x.shape[1:])} {train.x.dtype}, and test examples "
            f"{tuple(test.x.shape[1:])} {test.x.dtype}."
        )
    n_classes = _classes(name, returned, 1 + max(int(train.y.max()), int(test.y.max())))
    channels = train.x.shape[1] if train.x.dim() > 1 else 1
    mean, std = (_by_channel(name, returned, which, channels) for which in ("mean", "std"))
    if (mean is None) != (std is None):
        raise UserError(f"data set {name} must have both mean and std, or none of them.")
    # A copy: its author may change what was returned, or a file that it maps. (The training part is cut out later.)
    test = Examples(test.x.clone(), test.y.clone())
    if isinstance(returned, Source):
        return replace(returned, train=train, test=test, n_classes=n_classes)
    if train.x.is_floating_point():
        if mean is not None and std is not None:
            train, test = (Examples(_normalised(name, part.x, mean, std), part.y) for part in (train, test))
        elif not getattr(returned, "normalised", False):
            _require_normalised(name, train.x)
        return Source(train, test, n_classes, (0.0,), (1.0,))
    if train.x.dtype != torch.uint8:
        return Source(train, test, n_classes, (0.0,), (1.0,))
    if mean is None or std is None:
        by_channel = train.x.float().div(255).movedim(1, 0).flatten(1)
        mean, std = by_channel.mean(1).tolist(), by_channel.std(1).clamp(min=1e-6).tolist()
    return Source(train, test, n_classes, tuple(mean), tuple(std))


def _sets(name: str, returned: Any) -> list[Any]:
    if hasattr(returned, "train") and hasattr(returned, "test"):
        return [returned.train, returned.test]
    if _is_set(returned):
        return [returned]
    if isinstance(returned, tuple) and len(returned) == 2 and all(_is_set(part) for part in returned):
        return list(returned)
    if words := how(returned):
        raise UserError(f"data set {name} must give (x, y) or a map-style Dataset, got {kind_of(returned)}{words}.")
    raise UserError(
        f"data set {name} must give (x, y), a map-style Dataset, a pair (train, test) of such, or an object with train "
        f"and test; got {kind_of(returned)}."
    )


def _is_set(part: Any) -> bool:
    if isinstance(part, tuple):
        columns = len(part) == 2 and all(is_array(t) or isinstance(t, list) for t in part)
        return columns and not (isinstance(part[1], list) and isinstance(next(iter(part[1]), ()), tuple | list))
    listed = hasattr(part, "__getitem__") and not isinstance(part, Mapping) and not hasattr(part, "toarray")
    return isinstance(part, Examples) or (listed and not is_array(part))


def _classes(name: str, returned: Any, highest: int) -> int:
    """How many classes there are: what its author says, or one more than the highest label."""
    n = getattr(returned, "n_classes", highest)
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 1 <= n <= MOST_CLASSES:
        raise UserError(f"data set {name}: n_classes must be a whole number in 1 ... {MOST_CLASSES}, got {shown(n)}.")
    if highest > n:
        raise UserError(f"data set {name}: n_classes is {n}, and it has label {highest - 1}.")
    return int(n)


def _by_channel(name: str, returned: Any, which: str, channels: int) -> tuple[float, ...] | None:
    """Its ``mean`` or ``std``, a number a channel; None if it has none."""
    given = getattr(returned, which, None)
    if given is None or callable(given):  # a method is no number of its author's
        return None
    values = np.ravel(as_array(f"data set {name}", which, given)).astype(float)
    least = 0 if which == "std" else -np.inf
    if len(values) not in (1, channels) or not (np.isfinite(values) & (values > least)).all():
        raise UserError(
            f"data set {name}: {which} must be a finite number{' above 0' if which == 'std' else ''} for each channel "
            f"({channels} here), got {shown(given)}."
        )
    return tuple(values.tolist())


def _split(name: str, part: Any) -> tuple[Examples, Examples]:
    everything = _examples(name, part)
    order = numpy_generator("test split", name).permutation(len(everything))
    n_test = int(TEST * len(everything))
    return everything[np.sort(order[n_test:])], everything[np.sort(order[:n_test])]


def _examples(name: str, part: Any) -> Examples:
    """x and y as tensors, images with their channel first."""
    what = f"data set {name}"
    if not _is_set(part):
        raise UserError(f"{what}: its train and test must each be (x, y) or a map-style Dataset, got {kind_of(part)}.")
    if isinstance(part, Examples):
        part = part.x, part.y
    xs, ys = part if isinstance(part, tuple) else _read(what, part)
    x = _stacked(what, xs) if isinstance(xs, list) else as_tensor(what, "examples", xs)
    y = as_tensor(what, "labels", _numbered(what, ys) if isinstance(ys, list) else ys)
    if y.dim() != 1 or y.is_floating_point() or x.dim() == 0 or len(x) != len(y):
        n = len(x) if x.dim() else 0
        raise UserError(
            f"{what}: labels must be whole numbers, one for each of the {n} examples, got {tuple(y.shape)} {y.dtype}."
        )
    if 0 in x.shape[1:]:
        raise UserError(f"{what}: examples must have at least one number each, got {tuple(x.shape)}.")
    if x.dtype == torch.uint8 and x.dim() not in (3, 4):
        raise UserError(f"{what}: uint8 examples must be images (n, H, W) or (n, C, H, W), got {tuple(x.shape)}.")
    if x.dtype == torch.uint8 and x.dim() == 3:
        x = x.unsqueeze(1)  # (n, H, W): grey images
    if x.dtype == torch.uint8 and x.dim() == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    elif x.dtype == torch.uint8 and x.shape[1] > 4 and x.shape[3] in (2, 4):
        raise UserError(
            f"{what}: images of {x.shape[3]} channels must have these first, (n, C, H, W), got {tuple(x.shape)}."
        )
    if x.dtype == torch.float64:
        x = x.float()  # as the modules' weights
    if x.is_floating_point() and not (finite := x.isfinite()).all():
        n = int((~finite.reshape(len(x), -1).all(1)).sum())
        raise UserError(f"{what}: examples must be finite numbers, and {n} of {len(x)} have NaN or infinite ones.")
    return Examples(x.contiguous(), y.long())


def _read(what: str, part: Any) -> tuple[list[Any], list[Any]]:
    """The examples and labels of a map-style Dataset."""
    if not hasattr(part, "__len__"):
        raise UserError(f"{what}: a map-style Dataset must have a length.")
    xs, ys = [], []
    for i in range(len(part)):
        row = part[i]
        of_numbers = isinstance(row, list) and isinstance(next(iter(row), None), int | float)  # one-hot labels, say
        if not (isinstance(row, tuple | list) and len(row) >= 2) or of_numbers:
            raise UserError(f"{what}: each row of a map-style Dataset must be (x, y), got {kind_of(row)}{how(row)}.")
        xs.append(row[0])
        ys.append(row[1])
    return xs, ys


def _stacked(what: str, examples: list[Any]) -> Tensor:
    if not examples:
        raise UserError(f"{what} has no examples.")
    tensors = [as_tensor(what, "examples", x) for x in examples]
    if shapes := sorted({tuple(t.shape) for t in tensors})[1:]:
        raise UserError(f"{what}: all examples must have one shape; one has {shapes[0]}.")
    return torch.stack(tensors)


def _numbered(what: str, labels: list[Any]) -> np.ndarray:
    """Labels that came one by one: 2.0 is a whole number, and a vector of one number is that number."""
    y = as_array(what, "labels", labels)
    if y.dtype.kind == "f" and (y == y.round()).all():
        y = y.astype(np.int64)
    return y[:, 0] if y.shape[1:] == (1,) else y


def _normalised(name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    m, s = (torch.tensor(v, dtype=x.dtype) for v in (mean, std))
    across = (1, -1) + (1,) * (x.dim() - 2)
    x = (x - m.view(across)) / s.view(across)
    if not bool(x.isfinite().all()):
        raise UserError(f"data set {name}: its examples are not finite after they are normalised by mean and std.")
    return x


def _require_normalised(name: str, x: Tensor) -> None:
    mean, std = float(x.mean()), float(x.std())
    if not (abs(mean) <= 0.25 and 0.5 <= std <= 2):  # also for nan
        raise UserError(
            f"data set {name}: floating examples must be normalised (mean 0, standard deviation 1), got {mean:.3g} and "
            f"{std:.3g}; give uint8 images, or mean and std, or say normalised = True."
        )
