"""The user's own data sets as tensors: arrays, or any map-style torch Dataset.

uint8 examples (n, C, H, W) are images. Floating examples must be normalised; if their mean and std are given, they are
normalised here, else they are refused. Examples of other whole numbers are tokens.
"""

from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples, Source
from fedcommons.errors import UserError, shown
from fedcommons.seeds import numpy_generator

TEST = 0.2
"""Share of the examples that become the test set if a data set has none."""


def source(name: str, returned: Any) -> Source:
    """What a data set part returned, as tensors.

    returned: a ``Source``, a pair (train, test), an object with ``train`` and ``test``, or one set. Of one set a fifth
    becomes the test set, drawn with the data set's name as key. A set is (x, y) or a map-style Dataset of (x, y). The
    object may have the attributes n_classes, mean, std and ``normalised``.

    Raises:
        UserError: it is none of these, or its examples cannot be used.
    """
    if isinstance(returned, Source):
        return returned
    sets = _sets(name, returned)
    train, test = [_examples(name, part) for part in sets] if len(sets) == 2 else _split(name, sets[0])
    for which, part in (("training", train), ("test", test)):
        if not len(part):
            raise UserError(f"data set {name} has no {which} examples.")
        if int(part.y.min()) < 0:
            raise UserError(f"data set {name}: labels must be 0, 1, ..., got {int(part.y.min())}.")
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        raise UserError(
            f"data set {name}: training examples are {tuple(train.x.shape[1:])} {train.x.dtype}, and test examples "
            f"{tuple(test.x.shape[1:])} {test.x.dtype}."
        )
    highest = 1 + max(int(train.y.max()), int(test.y.max()))
    n_classes = int(getattr(returned, "n_classes", highest))
    if highest > n_classes:
        raise UserError(f"data set {name}: n_classes is {n_classes}, and it has label {highest - 1}.")
    mean, std = getattr(returned, "mean", None), getattr(returned, "std", None)
    if train.x.is_floating_point():
        if mean is not None and std is not None:
            train, test = (Examples(_normalised(part.x, mean, std), part.y) for part in (train, test))
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
    if isinstance(returned, tuple) and len(returned) == 2 and all(_is_set(part) for part in returned):
        return list(returned)
    if _is_set(returned):
        return [returned]
    raise UserError(
        f"data set {name} must give (x, y), a map-style Dataset, a pair (train, test) of such, or an object with train "
        f"and test; got {shown(type(returned).__name__)}."
    )


def _is_set(part: Any) -> bool:
    pair = isinstance(part, tuple) and len(part) == 2 and all(isinstance(t, Tensor | np.ndarray) for t in part)
    listed = hasattr(part, "__getitem__") and not isinstance(part, tuple | Tensor | np.ndarray)
    return pair or isinstance(part, Examples) or listed


def _split(name: str, part: Any) -> tuple[Examples, Examples]:
    everything = _examples(name, part)
    order = numpy_generator("test split", name).permutation(len(everything))
    n_test = int(TEST * len(everything))
    return everything[np.sort(order[n_test:])], everything[np.sort(order[:n_test])]


def _examples(name: str, part: Any) -> Examples:
    """x and y as tensors, images with their channel first."""
    if isinstance(part, Examples):
        return part
    if not isinstance(part, tuple):
        if not isinstance(part, Sized):
            raise UserError(f"data set {name}: a map-style Dataset must have a length.")
        pairs = [part[i] for i in range(len(part))]  # pyright: ignore[reportIndexIssue]
        part = _stacked(name, [x for x, *_ in pairs]), np.asarray([int(y) for _, y, *_ in pairs])
    x, y = (torch.as_tensor(np.asarray(t) if not isinstance(t, Tensor) else t) for t in part)
    if y.dim() != 1 or y.is_floating_point() or len(x) != len(y):
        raise UserError(
            f"data set {name}: labels must be whole numbers, one for each of the {len(x)} examples, got "
            f"{tuple(y.shape)} {y.dtype}."
        )
    if x.dtype == torch.uint8 and x.dim() not in (3, 4):
        raise UserError(
            f"data set {name}: uint8 examples must be images (n, H, W) or (n, C, H, W), got {tuple(x.shape)}."
        )
    if x.dtype == torch.uint8 and x.dim() == 3:
        x = x.unsqueeze(1)  # (n, H, W): grey images
    if x.dtype == torch.uint8 and x.dim() == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.dtype == torch.float64:
        x = x.float()  # as the modules' weights
    return Examples(x.contiguous(), y.long())


def _stacked(name: str, examples: list[Any]) -> Tensor:
    if not examples:
        raise UserError(f"data set {name} has no examples.")
    tensors = [x if isinstance(x, Tensor) else torch.as_tensor(np.array(x)) for x in examples]
    if shapes := sorted({tuple(t.shape) for t in tensors})[1:]:
        raise UserError(f"data set {name}: all examples must have one shape; one has {shapes[0]}.")
    return torch.stack(tensors)


def _normalised(x: Tensor, mean: Any, std: Any) -> Tensor:
    m, s = (torch.as_tensor(v, dtype=x.dtype) for v in (mean, std))
    across = (1, -1) + (1,) * (x.dim() - 2)
    return (x - m.view(across)) / s.view(across)


def _require_normalised(name: str, x: Tensor) -> None:
    mean, std = float(x.mean()), float(x.std())
    if not (abs(mean) <= 0.25 and 0.5 <= std <= 2):  # also for nan
        raise UserError(
            f"data set {name}: floating examples must be normalised (mean 0, standard deviation 1), and theirs are "
            f"{mean:.3g} and {std:.3g}; give uint8 images, or mean and std, or say normalised = True."
        )
