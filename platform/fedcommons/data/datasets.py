"""The package's data sets, as uint8 images in memory, and how any data set is loaded and split.

``digits`` is in scikit-learn's package; the others are read by torchvision's classes from its folders.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedcommons.config import parts
from fedcommons.config.experiment import Data
from fedcommons.config.fields import taken
from fedcommons.data import own
from fedcommons.data.examples import Dataset, Examples, Source
from fedcommons.errors import UserError
from fedcommons.paths import user_path
from fedcommons.seeds import keyed_globals, numpy_generator, seed_for


def data_folder(data: Data) -> Path:
    """Where data sets are looked for: ``data.dir``, else FEDCOMMONS_DATA, else ./data."""
    return user_path(
        "data.dir" if data.dir else "FEDCOMMONS_DATA", data.dir or os.environ.get("FEDCOMMONS_DATA") or "data"
    )


def load(data: Data) -> Dataset:
    """Load a data set, split off its validation part and keep at most ``data.limit`` of its training images.

    The splits depend on the data set's name only, so runs with different seeds are judged on the same images. So does
    all that a data set draws: the ``seed`` that it may ask for, and the global generators while it is made and read.

    Raises:
        UserError: there is no such data set, it is not in the folder, is damaged or not as ``own.source`` needs it, or
            it has fewer training images than ``data.limit``.
    """
    part = parts.find("data", data.name)
    seed = seed_for("data set", data.name) % 2**32  # many libraries take no larger one
    offered = {"dir": data_folder(data), "download": data.download, "seed": seed}
    with keyed_globals("data set", data.name):
        found = own.source(data.name, part(**{**taken(part, offered), **data.constants}))
    train = found.train
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
    augment = found.augment if data.augment is None else data.augment
    rest, flip = train[np.sort(rest)], augment and found.flip
    return Dataset(data.name, found.n_classes, found.mean, found.std, augment, rest, validation, found.test, flip)


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits, 8x8, grey values 0..16 brought to 0..255; 20 % are the test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(np.rint(images * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    everything = Examples(x, torch.from_numpy(labels.astype(np.int64)))
    order = numpy_generator("test split", "digits").permutation(len(everything))
    n_test = int(0.2 * len(everything))
    train, test = everything[np.sort(order[n_test:])], everything[np.sort(order[:n_test])]
    return Source(train, test, 10, (0.3053,), (0.3761,))


# Mean and std: of CIFAR as in Fedssyn's released code; of the others computed from the training images.


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


# What torchvision raises if files are missing, cut off, of another format or no pickles of its own.
_UNREADABLE = (
    RuntimeError, OSError, ValueError, TypeError, AssertionError, EOFError, LookupError, AttributeError, ImportError,
    MemoryError, OverflowError, pickle.UnpicklingError,
)  # fmt: skip


def _torchvision(
    name: str, kind: str, folder: str, root: Path, download: bool, n_classes: int
) -> tuple[Examples, Examples]:
    from torchvision import datasets

    def unusable(reason: str) -> UserError:
        return UserError(
            f"data set {name} {reason}: looked in {(root / folder).resolve()}; name another folder with "
            f"--data-dir or FEDCOMMONS_DATA, or get it with "
            f"`python sweeps/table1.py --dataset {name} --data-dir {root} --download --dry-run`."
        )

    make: Callable = getattr(datasets, kind)
    try:
        train, test = (_examples(make(root, train=train, download=download)) for train in (True, False))
    except _UNREADABLE as error:
        there = (root / folder).is_dir()
        why = f"({' '.join(str(error).partition('. ')[0].split())[:200]})"
        reason = f"could not be downloaded {why}" if download else f"is damaged {why}" if there else "is not there"
        raise unusable(reason) from error
    if reason := flaw(train, test, n_classes):
        raise unusable(f"is damaged: {reason}")
    return train, test


def _examples(part) -> Examples:
    x = torch.as_tensor(np.asarray(part.data))  # (n, H, W) or (n, H, W, C) uint8
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
    return Examples(x, torch.as_tensor(part.targets, dtype=torch.int64))


def flaw(train: Examples, test: Examples, n_classes: int) -> str | None:
    """What is wrong with images and labels that were read, in words; None if they are whole and square."""
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
