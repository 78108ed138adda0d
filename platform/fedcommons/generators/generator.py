"""What a generator is: it learns images of classes from a client's data and draws new ones."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import ClassVar, Protocol

from torch import Tensor

from fedcommons.core.release import Release
from fedcommons.data.examples import Examples

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Receipt:
    """What protects a trained generator and every image drawn from it; by default nothing.

    The fields are those of ``Release``. A receipt becomes a release when images leave a client.
    """

    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0

    def release(self, client: int, *what: str) -> Release:
        """The event that ``client`` sends this, under these names."""
        return Release(client, what, **asdict(self))


@dataclass(frozen=True)
class Trained:
    """A trained generator; without a receipt it counts as uncovered."""

    weights: Weights
    receipt: Receipt | None = None


class Generator(Protocol):
    """Hyper-parameters in a frozen dataclass, and functions whose every draw is keyed by ``seed``.

    sampling: names of the hyper-parameters that only ``sample`` uses; all others decide what is trained.

    Two functions are optional. ``check(flat)`` gets the experiment's fields (dotted names to values), and
    ``check_shape(shape, data)`` the images' shape (C, H, W) and the data set's name; both refuse with ``UserError``.
    """

    sampling: ClassVar[tuple[str, ...]]

    @property
    def epochs(self) -> int:
        """Number of training epochs after which samples are drawn."""
        ...

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> Mapping[int, Trained]:
        """Train on these images and return, for each number of epochs asked for, what samples are drawn with.

        Weights after epoch e do not depend on which other epochs were asked for. ``flip``: training may replace an
        image by its mirror image.
        """
        ...

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """One image for each label, uint8 (n, *shape)."""
        ...
