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
    """What protects a trained generator, and with it whatever is drawn from it; by itself nothing does.

    The fields are those of ``Release``, which a receipt becomes when what was drawn leaves a client.
    """

    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0

    def release(self, client: int, *what: str) -> Release:
        """The event that ``client`` lets this go."""
        return Release(client, what, **asdict(self))


@dataclass(frozen=True)
class Trained:
    """A trained generator; without a receipt it counts as uncovered."""

    weights: Weights
    receipt: Receipt | None = None


class Generator(Protocol):
    """Hyper-parameters in a frozen dataclass, and functions whose every draw is keyed by ``seed``.

    sampling: names of those hyper-parameters that ``sample`` alone uses: the others decide what is trained. It may have
    besides, both raising ``UserError``: ``check(flat)``, which refuses an experiment by its fields, dotted names to
    values, and ``check_shape(shape, data)``, which refuses images of a shape (C, H, W) of the data set of this name.
    """

    sampling: ClassVar[tuple[str, ...]]

    @property
    def epochs(self) -> int:
        """After so many epochs of training samples are drawn."""
        ...

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> Mapping[int, Trained]:
        """Train on these images; what samples are drawn with after each of these numbers of epochs.

        A training is the beginning of every longer one: what is asked for besides changes no bit. ``flip``: a mirrored
        image is as likely, and may be trained on in its place.
        """
        ...

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """One image for each label, uint8 (n, *shape)."""
        ...
