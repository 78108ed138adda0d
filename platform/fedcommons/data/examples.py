"""Containers for labelled examples in memory, and for a data set of training, validation and test examples."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from fedcommons.errors import UserError


@dataclass(frozen=True)
class Examples:
    """n examples with labels.

    x: uint8 images (n, C, H, W), floating features (n, ...) or tokens (n, length).
    y: (n,) int64 classes; (n, ...) int64 classes per position, -100 where a position has none; floats (n,) or (n, k)
        for regression; floats (n, classes), soft labels, if a sharing strategy gives such labels; zeros if there are no
        labels.
    groups: (n,) int64, the number of each example's source (such as a writer or a hospital), or None.
    factors: further attributes of the examples (such as the camera or the year), (n,) int64 by name.
    """

    x: Tensor
    y: Tensor
    _: KW_ONLY
    groups: Tensor | None = None
    factors: Mapping[str, Tensor] = field(default_factory=dict, hash=False)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: np.ndarray | Tensor | slice) -> "Examples":
        if not isinstance(index, np.ndarray):
            return self._map(lambda column: column[index])
        rows = torch.tensor(index)
        if (rows.dtype, rows.dim()) == (torch.int64, 1) and not (index < 0).any():
            # several times as fast as column[rows]
            return self._map(lambda column: column.index_select(0, rows.to(column.device)))
        return self._map(lambda column: column[rows])

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Examples":
        groups = None if self.groups is None else function(self.groups)
        factors = {name: function(values) for name, values in self.factors.items()}
        return Examples(function(self.x), function(self.y), groups=groups, factors=factors)

    @cached_property
    def digest(self) -> str:
        """Return a hash of the shapes, types and bytes of x and y. It is computed once, at the first access."""
        hashed = blake2b(digest_size=12)
        for t in (self.x, self.y):
            _add(hashed, "", t)
        return hashed.hexdigest()

    def to(self, device: torch.device) -> "Examples":
        """Return a copy of the examples on ``device``."""
        return self._map(lambda column: column.to(device))


STANDARDISATION, N_CLASSES = "mean and standard deviation of all clients' images", "number of classes of all clients"
"""Names of two values in messages. A value that the data set does not state is computed from all training examples."""


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel of uint8 images (n, C, ...), scaled to [0, 1]."""
    by_channel = x.float().div(255).movedim(1, 0).flatten(1)
    return tuple(by_channel.mean(1).tolist()), tuple(by_channel.std(1).clamp(min=1e-6).tolist())


@dataclass(frozen=True)
class Source:
    """The data that a data set component returns.

    n_classes: number of classes; None if the labels are not classes.
    mean, std: one number per channel, of pixels scaled to [0, 1] for uint8 images, and of the values of other examples.
    augment: whether clients flip and crop images in training.
    flip: whether a mirrored image is as probable as the image, so that generators may train on mirrored images.
    computed: names of the values that were computed from the training examples (``STANDARDISATION``, ``N_CLASSES``).
    positions: number of classes if labels are per position (``n_classes`` is then None); otherwise None.
    inputs: name and shape of each input, which x has flattened and side by side; empty if x is a single input.
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
    positions: int | None = None
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Origin:
    """The positions of the training examples in the set that the data set component returned.

    rows: (n,) position of each training example in the returned training set, or in the only returned set.
    n_given: number of examples in the set to which ``rows`` refers.
    notes: messages to the user on how the data were read.
    normalised_by: stated mean and std by which floating examples were normalised, one number per channel, or None.
    """

    rows: np.ndarray
    n_given: int
    notes: tuple[str, ...] = ()
    normalised_by: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def moved(self) -> bool:
        """Return whether ``rows`` differs from 0 ... n_given - 1: some rows were held out or reordered."""
        return len(self.rows) < self.n_given or bool((self.rows != np.arange(self.n_given)).any())


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set with training, validation, test and public examples.

    n_classes: number of classes; None if there are no labels or the labels are not classes.
    mean, std: one number per channel, of pixels scaled to [0, 1]; models see (value - mean) / std.
    augment: whether clients flip and crop images in training. flip: whether generators mirror images in training.
    origin: positions of the training examples in the set that the data set component returned.
    computed: names of the values that were computed from the training examples without noise (``STANDARDISATION``,
        ``N_CLASSES``).
    normalised_by: see ``Origin``. positions, inputs: see ``Source``.
    public: examples without labels that belong to no client, or None.
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
    normalised_by: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    positions: int | None = None
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    public: Examples | None = None

    @property
    def n_public(self) -> int:
        """Return the number of public examples."""
        return 0 if self.public is None else len(self.public)

    @property
    def classes(self) -> int:
        """Return ``n_classes``, the number of classes, after a check that the labels are classes.

        Raises:
            UserError: the labels are not classes.
        """
        if self.n_classes is None:
            raise UserError(f"the labels of {self.name} are not classes.")
        return self.n_classes

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an example, (C, H, W) for images."""
        return tuple(self.train.x.shape[1:])

    @property
    def targets(self) -> int | None:
        """Return the number of values in a regression label; None if labels are classes or there are no labels."""
        y = self.train.y
        return (y.shape[1] if y.dim() > 1 else 1) if y.is_floating_point() else None

    @cached_property
    def digest(self) -> str:
        """Return a hash of all examples: the names, shapes, types and bytes of all columns."""
        hashed = blake2b(digest_size=12)
        for name in ("train", "validation", "test", *(["public"] if self.public else [])):
            examples: Examples = getattr(self, name)
            groups = {} if examples.groups is None else {"groups": examples.groups}
            factors = {f"factors.{which}": values for which, values in examples.factors.items()}
            for which, t in {"x": examples.x, "y": examples.y, **groups, **factors}.items():
                _add(hashed, f"{name}.{which}", t)
        return hashed.hexdigest()


def _add(hashed: blake2b, name: str, t: Tensor) -> None:
    hashed.update(f"{name} {tuple(t.shape)} {t.dtype}\n".encode())
    hashed.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def without_images(dataset: Dataset) -> Dataset:
    """Return a copy without examples, which is small to send. It keeps the shapes, n_classes, mean and std."""
    empty = dataset.train[slice(0, 0)]
    return replace(dataset, train=empty, validation=empty, test=empty, origin=None, public=None)
