"""Image data sets as uint8 tensors in memory, with the held-out parts already split off.

``digits`` is in scikit-learn's package; the others come from torchvision's classes and folders.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedcommons.config.experiment import Data
from fedcommons.errors import UserError, unknown
from fedcommons.paths import user_path
from fedcommons.seeds import numpy_generator


@dataclass(frozen=True)
class Examples:
    """Images and labels: x (n, C, H, W) uint8 (or any float features), y (n,) int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: np.ndarray | Tensor | slice) -> "Examples":
        index = torch.tensor(index) if isinstance(index, np.ndarray) else index
        return Examples(self.x[index], self.y[index])

    def to(self, device: torch.device) -> "Examples":
        """The same examples on ``device``."""
        return Examples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test images; mean and std per channel of pixels scaled to [0, 1]."""

    name: str
    n_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool
    train: Examples
    validation: Examples
    test: Examples

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)."""
        return tuple(self.train.x.shape[1:])


@dataclass(frozen=True)
class _Source:
    n_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool
    torchvision_class: str = ""
    folder: str = ""


# Mean and std: CIFAR as in the authors' code (methods.md section 1); the others are those of the training images.
_SOURCES = {
    "digits": _Source(10, (0.3053,), (0.3761,), False),
    "mnist": _Source(10, (0.1307,), (0.3081,), False, "MNIST", "MNIST/raw"),
    "fmnist": _Source(10, (0.2860,), (0.3530,), False, "FashionMNIST", "FashionMNIST/raw"),
    "cifar10": _Source(10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), True, "CIFAR10", "cifar-10-batches-py"),
    "cifar100": _Source(100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), True, "CIFAR100", "cifar-100-python"),
}


def data_folder(data: Data) -> Path:
    """Where data sets are looked for: ``data.dir``, else FEDCOMMONS_DATA, else ./data."""
    return user_path(
        "data.dir" if data.dir else "FEDCOMMONS_DATA", data.dir or os.environ.get("FEDCOMMONS_DATA") or "data"
    )


def load(data: Data) -> Dataset:
    """The data set, its validation part split off and, with ``data.limit``, its training part thinned.

    The splits are keyed by the data set alone, so every run, whatever its seed, is judged on the same images.

    Raises:
        UserError: the data set is unknown, not in the folder or damaged, or ``data.limit`` exceeds it.
    """
    if data.name not in _SOURCES:
        raise unknown("data set", data.name, _SOURCES)
    source = _SOURCES[data.name]
    train, test = _digits() if data.name == "digits" else _torchvision(source, data)
    if reason := flaw(train, test, source.n_classes):
        raise _unusable(source, data, f"is damaged: {reason}")
    order = numpy_generator("validation split", data.name).permutation(len(train))
    n_validation = int(data.validation * len(train))
    if data.validation_from == "last":
        held_out = order >= len(train) - n_validation
        order = np.concatenate([order[held_out], order[~held_out]])
    validation, rest = train[np.sort(order[:n_validation])], order[n_validation:]
    if data.limit is not None:
        if data.limit > len(rest):
            raise UserError(f"data.limit must be at most the {len(rest)} training images there are, got {data.limit}.")
        rest = rest[: data.limit]
    augment = source.augment if data.augment is None else data.augment
    return Dataset(
        data.name, source.n_classes, source.mean, source.std, augment, train[np.sort(rest)], validation, test
    )


def _digits() -> tuple[Examples, Examples]:
    """scikit-learn's 1,797 handwritten digits, 8x8, grey values 0..16 brought to 0..255; 20 % are the test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(np.rint(images * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    everything = Examples(x, torch.from_numpy(labels.astype(np.int64)))
    order = numpy_generator("test split", "digits").permutation(len(everything))
    n_test = int(0.2 * len(everything))
    return everything[np.sort(order[n_test:])], everything[np.sort(order[:n_test])]


def _torchvision(source: _Source, data: Data) -> tuple[Examples, Examples]:
    from torchvision import datasets

    root = data_folder(data)
    make: Callable = getattr(datasets, source.torchvision_class)
    try:
        parts = [make(root, train=train, download=data.download) for train in (True, False)]
        return _examples(parts[0]), _examples(parts[1])
    except _UNREADABLE as error:
        there = (root / source.folder).is_dir()
        why = f"({' '.join(str(error).partition('. ')[0].split())[:200]})"
        reason = f"could not be downloaded {why}" if data.download else f"is damaged {why}" if there else "is not there"
        raise _unusable(source, data, reason) from error


# What torchvision raises where files are not there, cut off, of another form or not its pickles.
_UNREADABLE = (
    RuntimeError, OSError, ValueError, TypeError, AssertionError, EOFError, LookupError, AttributeError, ImportError,
    MemoryError, OverflowError, pickle.UnpicklingError,
)  # fmt: skip


def _unusable(source: _Source, data: Data, reason: str) -> UserError:
    root = data_folder(data)
    return UserError(
        f"data set {data.name} {reason}: looked in {(root / source.folder).resolve()}; name another folder with "
        f"--data-dir or FEDCOMMONS_DATA, or get it with "
        f"`python sweeps/table1.py --dataset {data.name} --data-dir {root} --download --dry-run`."
    )


def _examples(part) -> Examples:
    x = torch.as_tensor(np.asarray(part.data))  # (n, H, W) or (n, H, W, C) uint8
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
    return Examples(x, torch.as_tensor(part.targets, dtype=torch.int64))


def flaw(train: Examples, test: Examples, n_classes: int) -> str | None:
    """What is wrong with images and labels that were read, in words; None if nothing is."""
    for name, part in (("training", train), ("test", test)):
        if part.x.dtype != torch.uint8:
            return f"its {name} images are {part.x.dtype}, not uint8"
        if len(part.x) != len(part.y):
            return f"it has {len(part.x)} {name} images and {len(part.y)} labels"
        if part.x.numel() == 0:
            return f"it has no {name} images"
        low, high = int(part.y.min()), int(part.y.max())
        if low < 0 or high >= n_classes:
            return f"its {name} labels lie in [{low}, {high}], not in [0, {n_classes - 1}]"
    if train.x.shape[1:] != test.x.shape[1:]:
        return f"its training images are {tuple(train.x.shape[1:])} and its test images {tuple(test.x.shape[1:])}"
    if train.x.shape[2] != train.x.shape[3]:
        return f"its images are {train.x.shape[2]}x{train.x.shape[3]}, not square"
    return None


def without_images(dataset: Dataset) -> Dataset:
    """The facts of a data set (shape, classes, normalisation) without its images: small enough to send anywhere."""
    empty = dataset.train[slice(0, 0)]
    return replace(dataset, train=empty, validation=empty, test=empty)
