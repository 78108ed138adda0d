"""Examples and labels in memory, and a data set of them with its held-out parts."""

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Examples:
    """Examples and labels: x (n, C, H, W) uint8, floating features (n, ...) or tokens (n, length); y (n,) int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: np.ndarray | Tensor | slice) -> "Examples":
        index = torch.tensor(index) if isinstance(index, np.ndarray) else index
        return Examples(self.x[index], self.y[index])

    @cached_property
    def digest(self) -> str:
        """Of shapes, types and bytes of x and y, as they are when it is first asked for."""
        hashed = blake2b(digest_size=12)
        for t in (self.x, self.y):
            _add(hashed, "", t)
        return hashed.hexdigest()

    def to(self, device: torch.device) -> "Examples":
        """The same examples on ``device``."""
        return Examples(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Source:
    """What a data set part returns.

    mean, std: per channel; of pixels scaled to [0, 1] for uint8 images, else of the examples themselves. augment:
    clients flip and crop in training. flip: mirrored images are as likely, so generators may train on them.
    """

    train: Examples
    test: Examples
    n_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    _: KW_ONLY
    augment: bool = False
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Training, validation and test examples; mean and std per channel of pixels scaled to [0, 1].

    augment: clients flip and crop in training; flip: generators mirror images in training.
    """

    name: str
    n_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool
    train: Examples
    validation: Examples
    test: Examples
    flip: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W)."""
        return tuple(self.train.x.shape[1:])

    @cached_property
    def digest(self) -> str:
        """Of the content: names, shapes, types and bytes of x and y of the three parts."""
        hashed = blake2b(digest_size=12)
        for name in ("train", "validation", "test"):
            examples: Examples = getattr(self, name)
            for which, t in (("x", examples.x), ("y", examples.y)):
                _add(hashed, f"{name}.{which}", t)
        return hashed.hexdigest()


def _add(hashed: blake2b, name: str, t: Tensor) -> None:
    """Add a tensor's name, shape, type and bytes."""
    hashed.update(f"{name} {tuple(t.shape)} {t.dtype}\n".encode())
    hashed.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def without_images(dataset: Dataset) -> Dataset:
    """The data set's shape, classes and normalisation without its images, so that it is small to send."""
    empty = dataset.train[slice(0, 0)]
    return replace(dataset, train=empty, validation=empty, test=empty)
