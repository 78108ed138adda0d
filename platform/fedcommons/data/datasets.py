"""The package's data sets as uint8 images in memory, and the loading and splitting of any data set.

``digits`` comes with scikit-learn. torchvision reads the other data sets from the folders in which it stores them.
"""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcommons.data import user_data
from fedcommons.data.examples import N_CLASSES, STANDARDISATION, Dataset, Examples, Source
from fedcommons.errors import UserError
from fedcommons.runtime.libraries import collection_off
from fedcommons.seeding import keyed_globals, numpy_generator
from fedcommons.storage.paths import user_path


def data_folder(dir: str | None) -> Path:
    """Return the folder of the data sets: ``dir``, or the environment variable FEDCOMMONS_DATA, or ./data.

    dir: the value of the configuration field ``data.dir``, or None.
    """
    return user_path("data.dir" if dir else "FEDCOMMONS_DATA", dir or os.environ.get("FEDCOMMONS_DATA") or "data")


def load(
    name: str,
    make: Callable[[], Any],
    *,
    validation: float = 0.1,
    validation_from: str = "random",
    public: float = 0.0,
    split_seed: int | None = None,
    limit: int | None = None,
    augment: bool | None = None,
    standardise: bool = True,
) -> Dataset:
    """Build a data set, split off validation and public images, and keep at most ``limit`` other training images.

    Random splits depend on the data set's name and ``split_seed``. With None, runs with different seeds are evaluated
    on the same images.
    Global random generators are also seeded by the name while the data set is built.

    Args:
        make: function that returns a ``Source``, or an object that ``user_data.read`` accepts.
        validation: share of the training images that becomes the validation set.
        validation_from: ``random`` (random training images become the validation set) or ``last`` (the last ones).
        public: share of the training images that becomes the public images, which lose their labels.
        limit: maximum number of training images; None: no limit.
        augment: whether clients flip and crop images in training; None: the data set's value.
        standardise: whether models see (value - mean) / standard deviation; otherwise they see the values themselves.

    Raises:
        UserError: the data set is missing or damaged, ``user_data.read`` refuses its form, there are fewer training
            images than ``limit``, or ``standardise`` or ``augment`` does not fit examples that are not images.
    """
    split = () if split_seed is None else (split_seed,)
    with keyed_globals("data set", name):
        source, origin = user_data.read(name, make(), split)
    train = source.train
    if not standardise and train.x.dtype != torch.uint8:
        raise UserError(
            f"data.standardise must be true for data set {name}: only images of whole numbers 0 to 255 can be left "
            "unstandardised, and its examples are not such images."
        )
    if augment and train.x.dim() != 4:
        raise UserError(
            f"data.augment must be false for data set {name}: it flips and crops images, and examples are "
            f"{tuple(train.x.shape[1:])}."
        )
    if augment and source.positions:
        raise UserError(f"data.augment must be false for data set {name}: it would not flip and crop labels.")
    order = numpy_generator("validation split", name, *split).permutation(len(train))
    n_validation = int(validation * len(train))
    if validation_from == "last":
        held_out = order >= len(train) - n_validation
        order = np.concatenate([order[held_out], order[~held_out]])
    # Public images are the last of the order, so that with a limit clients have equal images with and without them.
    rest, public_rows = np.split(order[n_validation:], [len(order) - n_validation - int(public * len(order))])
    validation_set, public_x = train[np.sort(order[:n_validation])], train[np.sort(public_rows)].x
    if limit is not None:
        if limit > len(rest):
            raise UserError(f"data.limit must be at most the {len(rest)} training images there are, got {limit}.")
        rest = rest[:limit]
    augmented = source.augment if augment is None else augment
    rest, flip = np.sort(rest), augmented and source.flip
    stated = () if standardise else (STANDARDISATION,)
    n_classes = source.n_classes or source.positions
    if n_classes and any((part.y == n_classes - 1).any() for part in (validation_set, source.test)):
        # A validation or test example has the highest label, so the number of classes reveals no training example.
        # The number of classes is therefore treated like a number that the data set states.
        stated = (*stated, N_CLASSES)
    return Dataset(
        name=name,
        n_classes=source.n_classes,
        mean=source.mean if standardise else (0.0,) * len(source.mean),
        std=source.std if standardise else (1.0,) * len(source.std),
        augment=augmented,
        train=train[rest],
        validation=validation_set,
        test=source.test,
        flip=flip,
        origin=replace(origin, rows=origin.rows[rest]),
        computed=tuple(what for what in source.computed if what not in stated),
        normalised_by=origin.normalised_by,
        positions=source.positions,
        inputs=source.inputs,
        public=Examples(public_x, torch.zeros(len(public_x), dtype=torch.int64)) if len(public_x) else None,
    )


def digits(split_seed: int | None = None) -> Source:
    """scikit-learn's 1,797 handwritten digits, 8x8, grey values 0..16 scaled to 0..255; 20 % are the test set.

    split_seed: key of the test set's random split; None: the split that runs share by default.
    """
    with collection_off():
        from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(np.rint(images * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    everything = Examples(x, torch.from_numpy(labels.astype(np.int64)))
    split = () if split_seed is None else (split_seed,)
    order = numpy_generator("test split", "digits", *split).permutation(len(everything))
    n_test = int(0.2 * len(everything))
    train, test = everything[np.sort(order[n_test:])], everything[np.sort(order[:n_test])]
    return Source(train, test, 10, (0.3053,), (0.3761,))


# The mean and std of CIFAR-10 and CIFAR-100 are taken from Fedssyn's released code.
# The mean and std of the other data sets were computed from their training images.


def mnist(dir: Path, download: bool) -> Source:
    """MNIST: 28x28 handwritten digits."""
    parts = _torchvision("mnist", "MNIST", "MNIST/raw", dir, download, 10)
    return Source(*parts, 10, (0.1307,), (0.3081,))


def fmnist(dir: Path, download: bool) -> Source:
    """Fashion-MNIST: 28x28 grey images of clothes."""
    parts = _torchvision("fmnist", "FashionMNIST", "FashionMNIST/raw", dir, download, 10)
    return Source(*parts, 10, (0.2860,), (0.3530,))


def cifar10(dir: Path, download: bool) -> Source:
    """CIFAR-10: 32x32 colour images of 10 classes."""
    parts = _torchvision("cifar10", "CIFAR10", "cifar-10-batches-py", dir, download, 10)
    return Source(*parts, 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), augment=True, flip=True)


def cifar100(dir: Path, download: bool) -> Source:
    """CIFAR-100: 32x32 colour images of 100 classes."""
    parts = _torchvision("cifar100", "CIFAR100", "cifar-100-python", dir, download, 100)
    return Source(*parts, 100, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), augment=True, flip=True)


MOST_BYTES = 2**29
"""Maximum size of a file in bytes: torchvision reads whole files into memory, and no data set has a larger file."""

UNREADABLE = (
    RuntimeError, OSError, ValueError, TypeError, AssertionError, EOFError, LookupError, AttributeError, ImportError,
    MemoryError, OverflowError, pickle.UnpicklingError,
)  # fmt: skip
"""Types of errors that torchvision raises if files are missing or truncated, or have another format or contents."""


def _torchvision(
    name: str, kind: str, folder: str, root: Path, download: bool, n_classes: int
) -> tuple[Examples, Examples]:
    from torchvision import datasets

    def unusable(reason: str) -> UserError:
        delete = "delete that folder and " if os.path.isdir(root / folder) else ""  # torchvision keeps damaged files
        return UserError(
            f"data set {name} {reason}: looked in {os.path.realpath(root / folder)}; name another folder with "
            f"--data-dir or FEDCOMMONS_DATA, or {delete}get it with "
            f"`python sweeps/table1.py --dataset {name} --data-dir {root} --download --dry-run`."
        )

    make: Callable = getattr(datasets, kind)
    try:
        _require_small(root / folder)
        train, test = (_examples(make(root, train=train, download=download)) for train in (True, False))
    except UNREADABLE as error:
        exists = os.path.isdir(root / folder)
        details = f"({' '.join(str(error).partition('. ')[0].split())[:200]})"
        reason = (
            f"could not be downloaded {details}" if download else f"is damaged {details}" if exists else "is not there"
        )
        raise unusable(reason) from error
    if reason := flaw(train, test, n_classes):
        raise unusable(f"is damaged: {reason}")
    return train, test


def _require_small(folder: Path) -> None:
    """Check that no file in a folder is larger than ``MOST_BYTES``. A missing folder passes the check.

    Raises:
        ValueError: a file is larger than ``MOST_BYTES``.
    """
    for path in folder.iterdir() if os.path.isdir(folder) else ():
        if os.path.isfile(path) and (size := os.path.getsize(path)) > MOST_BYTES:
            raise ValueError(f"{path.name} has {size:,} bytes, more than any file of the data set")


def _examples(part) -> Examples:
    x = torch.as_tensor(np.asarray(part.data))  # (n, H, W) or (n, H, W, C) uint8
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
    return Examples(x, torch.as_tensor(part.targets, dtype=torch.int64))


def flaw(train: Examples, test: Examples, n_classes: int) -> str | None:
    """Return a message on the first fault of the data, or None.

    Images must be square and uint8, and labels must be in 0 ... n_classes - 1.
    """
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
