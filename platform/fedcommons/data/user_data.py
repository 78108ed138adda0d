"""The conversion of user-defined data sets (arrays or map-style torch Datasets) to tensors.

uint8 examples (n, C, H, W) are images. Examples of other integer types are tokens. Floating examples are normalised
here if the data set states ``mean`` and ``std``. Without ``mean`` and ``std``, the data set must already be normalised.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedcommons.data import user_rows
from fedcommons.data.examples import N_CLASSES, STANDARDISATION, Examples, Origin, Source, channel_statistics
from fedcommons.data.user_arrays import as_array, conversion_hint, kind_of
from fedcommons.data.user_columns import Columns, columns_of, examples_of, is_set, labels_of, numbers_of
from fedcommons.data.user_rows import Inputs
from fedcommons.errors import UserError, quote
from fedcommons.seeding import numpy_generator
from lightning_modules.classifier import IGNORED

STATED = {"n_classes", "mean", "std", "normalised", "pad", "collate"}
"""Names of the values that a data set may state."""

UNSTATED: Any = object()
"""Marker of a data set that does not state ``n_classes``. The value None would state that labels are not classes."""

TEST = 0.2
"""Share of the examples that become the test set if a data set has no test set."""

MOST_CLASSES = 10**6
"""Maximum number of classes. A larger number raises an error, because memory is needed for each client and class."""


def read(name: str, returned: Any, split: tuple[int, ...] = ()) -> tuple[Source, Origin]:
    """Convert the result of a data set component to a ``Source``; also return the positions of its training examples.

    The test tensors share no memory with the component's result. ``load`` copies the training tensors.

    Args:
        name: name of the data set, for messages and as the key of the random split.
        split: further key of the random split.
        returned: a ``Source``, a pair (train, test), an object or a dict with ``train`` and ``test``, or one set of
            examples (see ``user_columns``; also a dict with ``train``), of which a random fifth becomes the test set.
            The object may have the attributes n_classes (None: labels are not classes), mean, std and ``normalised``
            (True: floating examples already have mean 0 and standard deviation 1).

    Raises:
        UserError: ``returned`` has another form, or its examples are invalid.
    """
    columns, stated = _padded_sets(name, returned), _constant(returned, "n_classes", UNSTATED)
    sets, inputs = _examples(name, columns, stated)
    n, is_one = len(sets[0]), len(sets) == 1
    order = numpy_generator("test split", name, *split).permutation(n) if is_one else np.arange(n)
    n_test = int(TEST * n) if is_one else 0
    notes = _notes(name, stated, columns, sets)
    origin = Origin(np.sort(order[n_test:]), len(order), notes)
    train, test = sets if len(sets) == 2 else (sets[0][origin.rows], sets[0][np.sort(order[:n_test])])
    for which, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"data set {name} has no {which} examples.")
    for which, a, b in (("examples", train.x, test.x), ("labels", train.y, test.y)):
        if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            raise UserError(
                f"data set {name}: training {which} are {tuple(a.shape[1:])} {a.dtype}, and test {which} "
                f"{tuple(b.shape[1:])} {b.dtype}."
            )
    n_classes, positions = None if columns[0].y is None else _classes(name, stated, sets), None
    if train.y.dim() > 1:
        n_classes, positions = None, n_classes
    channels = train.x.shape[1] if train.x.dim() > 1 else 1
    mean, std = (_by_channel(name, returned, which, channels) for which in ("mean", "std"))
    if (mean is None) != (std is None):
        raise UserError(f"data set {name} must have both mean and std, or neither.")
    # Copy the test set, as user code may later change its arrays or files. (``load`` copies the training examples.)
    test = replace(test, x=test.x.clone(), y=test.y.clone())
    if isinstance(returned, Source):
        return replace(returned, train=train, test=test, n_classes=n_classes), origin
    computed = () if (n_classes or positions) is None or stated is not UNSTATED else (N_CLASSES,)
    if train.x.dtype != torch.uint8:
        if train.x.is_floating_point() and mean is not None and std is not None:
            train, test = (replace(part, x=_normalised(name, part.x, mean, std)) for part in (train, test))
            origin = replace(origin, normalised_by=(mean, std))
        elif train.x.is_floating_point() and not _constant(returned, "normalised", False):
            _require_normalised(name, train.x)
        mean, std = (0.0,), (1.0,)
    elif mean is None or std is None:
        mean, std = channel_statistics(train.x)
        computed = (STANDARDISATION, *computed)
    source = Source(train, test, n_classes, tuple(mean), tuple(std), computed=computed)
    return replace(source, positions=positions, inputs=inputs), origin


def snapshot(what: str, data: Any) -> Any:
    """Return a copy of a data set, as arrays and stated numbers, in a form that ``read`` accepts.

    Raises:
        UserError: ``data`` has another form, or its rows are random.
    """
    if isinstance(data, Source):
        return deepcopy(data)
    columns = _padded_sets(what, data)
    if any(part.is_random() for part in columns):
        raise UserError(
            f"data set {what} returns other rows when it is read again, as with a random transform: transform batches "
            "in the module's training_step instead."
        )
    sets: list[dict[str, Any]] = []
    for part in columns:
        x = _inputs_of(f"data set {what}", part)
        n = len(x if isinstance(x, Tensor) else next(iter(x.values())))
        y = None if part.y is None else labels_of(f"data set {what}", part.y, n)
        sets.append({"x": x, "y": y, "groups": part.groups, "factors": dict(part.factors)})
    stated = {name: _constant(data, name, UNSTATED) for name in ("n_classes", "mean", "std", "normalised")}
    stated = {name: value for name, value in stated.items() if value is not UNSTATED and not callable(value)}
    return deepcopy({**stated, **(sets[0] if len(sets) == 1 else dict(zip(("train", "test"), sets, strict=True)))})


def _padded_sets(name: str, returned: Any) -> list[Columns]:
    columns, pad = _sets(name, returned), _constant(returned, "pad", None)
    return columns if pad is None or callable(pad) else user_rows.padded(f"data set {name}", columns, pad)


def _sets(name: str, returned: Any) -> list[Columns]:
    what, both = f"data set {name}", ("train", "test")
    if callable(collate := _constant(returned, "collate", None)):
        if isinstance(returned, Mapping):
            parts = [returned[part] for part in both if part in returned]
        else:
            pair = [getattr(returned, part, None) for part in both]
            parts = pair if all(part is not None for part in pair) else returned if _is_pair(returned) else [returned]
        if not parts or not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts):
            raise UserError(f"{what}: collate needs rows: a map-style Dataset or a list, or train and test of them.")
        return user_rows.collated(what, parts, collate)
    is_train_alone = isinstance(returned, Mapping) and {*returned} - STATED == {"train"}
    if is_train_alone or (isinstance(returned, Mapping) and all(part in returned for part in both)):
        return [columns_of(what, returned[part]) for part in both if part in returned]
    if all(hasattr(returned, part) for part in both):
        return [columns_of(what, getattr(returned, part)) for part in both]
    if isinstance(returned, list) and len(returned) == 2 and all(isinstance(part, TorchDataset) for part in returned):
        returned = tuple(returned)  # torch's random_split returns a list
    if is_set(returned):
        return [columns_of(what, returned)]
    if isinstance(returned, tuple) and len(returned) == 2 and all(is_set(part) for part in returned):
        return [columns_of(what, part) for part in returned]
    if words := conversion_hint(returned):
        raise UserError(f"{what} must return (x, y) or a map-style Dataset, got {kind_of(returned)}{words}.")
    raise UserError(
        f"{what} must return (x, y), (x, y, groups), a dict {{'x': x, 'y': y}}, a map-style Dataset, a pair (train, "
        f"test) of these, or an object with train and test; got {kind_of(returned)}."
    )


def _is_pair(returned: Any) -> bool:
    return type(returned) in (tuple, list) and len(returned) == 2 and all(is_set(part) for part in returned)


def _examples(name: str, sets: list[Columns], stated: Any) -> tuple[list[Examples], Inputs]:
    """Return the sets as tensors, and names and shapes of named inputs; ``stated``: the stated number of classes.

    Equal group names, and equal values of a factor, get equal numbers in all sets.
    """
    what, examples, inputs = f"data set {name}", list[Examples](), list[Inputs]()
    for columns in sets:
        x, layout = _inputs_of(what, columns), ()
        if not isinstance(x, Tensor):
            order = [which for which, _ in inputs[0] if which in x] if inputs else []  # of the training inputs
            x, layout = user_rows.packed(what, {which: x[which] for which in order} | x)
        inputs.append(layout)
        examples.append(Examples(x, labels_of(what, columns.y, len(x))))
    if len({columns.y is None for columns in sets}) > 1:
        raise UserError(f"{what}: the training set and the test set must both have labels, or neither.")
    if stated is not UNSTATED:
        examples = [replace(part, y=_as_stated(what, part.y, stated)) for part in examples]
    lengths = [len(part) for part in examples]
    numbers = numbers_of(what, "groups", [columns.groups for columns in sets], lengths)
    examples = [replace(part, groups=groups) for part, groups in zip(examples, numbers, strict=True)]
    for factor in sorted({factor for columns in sets for factor in columns.factors}):
        numbers = numbers_of(what, f"factor {factor}", [columns.factors.get(factor) for columns in sets], lengths)
        for i, values in enumerate(numbers):
            if values is not None:
                examples[i] = replace(examples[i], factors={**examples[i].factors, factor: values})
    if inputs[0] != inputs[-1]:
        raise UserError(f"{what}: training inputs are {dict(inputs[0])}, and test inputs {dict(inputs[-1])}.")
    return examples, inputs[0]


def _inputs_of(what: str, columns: Columns) -> Tensor | dict[str, Tensor]:
    if named := user_rows.by_name(what, columns.x):
        return {which: examples_of(f"{what}, input {which}", Columns(x, None)) for which, x in named.items()}
    return examples_of(what, columns)


def _constant(returned: Any, name: str, default: Any) -> Any:
    """Return the value that the data set, or the first set of a pair, states as entry or attribute ``name``.

    If no value is stated, return ``default``.
    """
    if isinstance(returned, Mapping):
        return returned.get(name, default)
    if hasattr(returned, name):
        return getattr(returned, name)
    if _is_pair(returned):
        return _constant(returned[0], name, default)
    return default


def _as_stated(what: str, y: Tensor, n_classes: Any) -> Tensor:
    """Return labels as floats if the stated ``n_classes`` is None, otherwise as int64 classes.

    With ``n_classes`` None, labels that are all 0 keep their type, because zeros stand for missing labels.

    Raises:
        UserError: ``n_classes`` is not None, but some labels are not whole numbers.
    """
    if n_classes is None:
        return y.float() if y.any() else y
    if y.is_floating_point() and (y.dim() > 1 or not _is_whole(y)):
        raise UserError(
            f"{what}: n_classes is {quote(n_classes)}, but the labels are floats {tuple(y.shape)}, not classes: set "
            "n_classes = None for regression."
        )
    return y.long()


def _is_whole(y: Tensor) -> bool:
    return bool((y == y.round()).all())


def _notes(name: str, stated: Any, columns: list[Columns], sets: list[Examples]) -> tuple[str, ...]:
    """Return a message to the user if float labels are taken for regression, and one if rows are random."""
    notes, y = [], sets[0].y
    if y.is_floating_point() and y.dim() == 1 and stated is UNSTATED and _is_whole(y):
        notes.append(
            f"data set {name}: labels are floats, so this is regression; labels of an integer type are classes."
        )
    if any(part.is_random() for part in columns):
        notes.append(
            f"data set {name} returns random rows (from a random transform, for example). The rows are read once, so "
            "every epoch has the same rows"
            + ("" if any(part.has_drawn for part in columns) else ", and an unseeded generator gives each run others")
            + ". For new random rows, transform batches in the module's training_step"
            + (", or use --data.augment true (flips and crops)." if sets[0].x.dim() == 4 else ".")
        )
    return tuple(notes)


def _classes(name: str, stated: Any, sets: list[Examples]) -> int | None:
    """Return the stated ``n_classes``, or the largest label plus 1; None if the labels are not classes.

    Raises:
        UserError: labels are outside of 0 ... n_classes - 1, or ``n_classes`` is not stated and a class would be empty.
    """
    if sets[0].y.is_floating_point() or stated is None:
        return None
    labels = torch.cat([part.y.flatten() for part in sets]).unique()
    if sets[0].y.dim() > 1:
        labels = labels[labels != IGNORED]
        for which, part in zip(("training ", "test ") if len(sets) == 2 else ("",), sets, strict=True):
            if len(rows := (part.y == IGNORED).flatten(1).all(1).nonzero()):
                raise UserError(
                    f"data set {name}: {len(rows)} of {len(part)} {which}examples have no label, as all their labels "
                    f"are {IGNORED}; the first is row {int(rows[0])}: leave these examples out."
                )
    low, high = int(labels[0]), int(labels[-1])
    advice = "renumber the labels with np.unique(y, return_inverse=True)[1]"
    if low < 0 or high >= MOST_CLASSES:
        raise UserError(
            f"data set {name}: labels must be 0, 1, ..., at most {MOST_CLASSES - 1}, but some are "
            f"{'negative' if low < 0 else 'larger'}: {advice} ({len(labels)} classes), or use floats for regression."
        )
    n = high + 1 if stated is UNSTATED else stated
    if stated is UNSTATED and n > len(labels):
        raise UserError(
            f"data set {name}: the {len(labels)} different labels are not 0 to {len(labels) - 1}, so classes are "
            f"empty: {advice}, state n_classes (largest label + 1), or use floats for regression."
        )
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or not 1 <= n <= MOST_CLASSES:
        raise UserError(f"data set {name}: n_classes must be a whole number in 1 ... {MOST_CLASSES}, got {quote(n)}.")
    if high >= n:
        raise UserError(f"data set {name}: n_classes is {n}, but some labels are larger than n_classes - 1.")
    return int(n)


def _by_channel(name: str, returned: Any, which: str, channels: int) -> tuple[float, ...] | None:
    """Return ``mean`` or ``std`` (named by ``which``): one number, or one per channel; None if it is not stated."""
    stated = _constant(returned, which, None)
    if stated is None or callable(stated):  # a method such as tensor.mean is not a stated number
        return None
    values = np.ravel(as_array(f"data set {name}", which, stated)).astype(float)
    least = 0 if which == "std" else -np.inf
    if len(values) not in (1, channels) or not (np.isfinite(values) & (values > least)).all():
        raise UserError(
            f"data set {name}: {which} must be a finite number{' above 0' if which == 'std' else ''} for each channel "
            f"({channels} here), got {quote(stated)}."
        )
    return tuple(values.tolist())


def _normalised(name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    m, s = (torch.tensor(v, dtype=x.dtype) for v in (mean, std))
    across = (1, -1) + (1,) * (x.dim() - 2)
    x = (x - m.view(across)) / s.view(across)
    if not bool(x.isfinite().all()):
        raise UserError(f"data set {name}: its examples are not finite after they are normalised by mean and std.")
    return x


def _require_normalised(name: str, x: Tensor) -> None:
    mean, std = float(x.mean()), float(x.std())
    if not (abs(mean) <= 0.25 and 0.5 <= std <= 2):  # a comparison with NaN is false, so NaN raises
        raise UserError(
            f"data set {name}: floating examples must be normalised (mean 0, standard deviation 1), got {mean:.3g} and "
            f"{std:.3g}; return uint8 images, or state mean and std, or normalised, next to train and test, such as "
            "{'train': (x, y), 'test': (x, y), 'normalised': True}."
        )
