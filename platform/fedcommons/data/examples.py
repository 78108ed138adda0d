"""Examples with labels in memory, and a data set with its training, validation and test examples."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from fedcommons.errors import UserError


@dataclass(frozen=True)
class Examples:
    """Examples and labels: x (n, C, H, W) uint8, floating features (n, ...) or tokens (n, length).

    y: (n,) int64 classes; floats (n,) or (n, k) for regression; zeros if there are no labels. groups: (n,) int64, the
    source of each example (a writer, a hospital), or None. factors: further attributes of the examples, (n,) int64 by
    name.
    """

    x: Tensor
    y: Tensor
    _: KW_ONLY
    groups: Tensor | None = None
    factors: Mapping[str, Tensor] = field(default_factory=dict, hash=False)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: np.ndarray | Tensor | slice) -> "Examples":
        index = torch.tensor(index) if isinstance(index, np.ndarray) else index
        groups = None if self.groups is None else self.groups[index]
        factors = {name: values[index] for name, values in self.factors.items()}
        return Examples(self.x[index], self.y[index], groups=groups, factors=factors)

    @cached_property
    def digest(self) -> str:
        """Hash the shapes, types and bytes of x and y; the first access computes the hash."""
        hashed = blake2b(digest_size=12)
        for t in (self.x, self.y):
            _add(hashed, "", t)
        return hashed.hexdigest()

    def to(self, device: torch.device) -> "Examples":
        """Return the same examples on ``device``."""
        groups = None if self.groups is None else self.groups.to(device)
        factors = {name: values.to(device) for name, values in self.factors.items()}
        return Examples(self.x.to(device), self.y.to(device), groups=groups, factors=factors)


STANDARDISATION, N_CLASSES = "mean and standard deviation of all clients' images", "number of classes of all clients"
"""Names of the values that are computed from the training examples if a data set does not state these values."""


@dataclass(frozen=True)
class Source:
    """The data that a data set component returns.

    n_classes: None if the labels are not classes. mean, std: per channel; of pixels scaled to [0, 1] for uint8 images,
    else of the examples themselves. augment: clients flip and crop images in training. flip: mirrored images are as
    likely, so generators may train on them. computed: names of the values computed from the training examples.
    """

    train: Examples
    test: Examples
    n_classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    _: KW_ONLY
    augment: bool = False
    flip: bool = False
    computed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """The positions of the training examples in the set that the data set component returned, and the group names.

    rows: (n,) position of each example in the returned training set, or in the only returned set. given: number of
    examples in that set. group_names: (G,) of any type, or None. notes: messages to the user on how the data were read.
    """

    rows: np.ndarray
    n_given: int
    group_names: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @property
    def moved(self) -> bool:
        """Return whether an example i is not row i or rows are held out: then row numbers of a file would mislead."""
        return len(self.rows) < self.n_given or bool((self.rows != np.arange(self.n_given)).any())


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training, validation and test examples; mean and std per channel of pixels scaled to [0, 1].

    n_classes: None if there are no labels or the labels are not classes. augment: clients flip and crop images in
    training. flip: generators mirror images in training. origin: origin of the training examples. computed: names of
    the values computed from the training examples without noise (``STANDARDISATION``, ``N_CLASSES``).
    """

    name: str
    n_classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool
    train: Examples
    validation: Examples
    test: Examples
    flip: bool = False
    origin: Origin | None = None
    computed: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """Return ``n_classes`` of a data set whose labels are classes.

        Raises:
            UserError: the labels are not classes.
        """
        if self.n_classes is None:
            raise UserError(f"the labels of {self.name} are no classes.")
        return self.n_classes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an example, (C, H, W) for images."""
        return tuple(self.train.x.shape[1:])

    @property
    def targets(self) -> int | None:
        """Return k, the number of values in a regression label; None for classes and without labels."""
        y = self.train.y
        return (y.shape[1] if y.dim() > 1 else 1) if y.is_floating_point() else None

    @cached_property
    def digest(self) -> str:
        """Hash the names, shapes, types and bytes of all columns of the training, validation and test examples."""
        hashed = blake2b(digest_size=12)
        for name in ("train", "validation", "test"):
            examples: Examples = getattr(self, name)
            groups = {} if examples.groups is None else {"groups": examples.groups}
            factors = {f"factors.{which}": values for which, values in examples.factors.items()}
            for which, t in {"x": examples.x, "y": examples.y, **groups, **factors}.items():
                _add(hashed, f"{name}.{which}", t)
        return hashed.hexdigest()


def _add(hashed: blake2b, name: str, t: Tensor) -> None:
    """Add a tensor's name, shape, type and bytes to the hash."""
    hashed.update(f"{name} {tuple(t.shape)} {t.dtype}\n".encode())
    hashed.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def without_images(dataset: Dataset) -> Dataset:
    """Return the data set without examples: its shape, classes and normalisation are small to send."""
    empty = dataset.train[slice(0, 0)]
    return replace(dataset, train=empty, validation=empty, test=empty, origin=None)
