"""What a generator is: it learns images of classes from a client's data and draws new ones."""

from collections.abc import Collection, Mapping
from typing import Protocol

from torch import Tensor

from fedcommons.data.datasets import Examples

Weights = Mapping[str, Tensor]


class Generator(Protocol):
    """Hyper-parameters in a frozen dataclass, and two functions whose every draw is keyed by ``seed``."""

    def fit(self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int]) -> Mapping[int, Weights]:
        """Train on these images; the weights that samples are drawn with after each of these numbers of epochs.

        A training is the beginning of every longer one: what is asked for besides changes no bit.
        """
        ...

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """One image for each label, uint8 (n, *shape)."""
        ...
