"""What a generator is: it learns images of classes from a client's data and draws new ones."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.privacy.release import Release

Weights = Mapping[str, Tensor]

Progress = Callable[[int, int], None]
"""Told after a step how many are done, and of how many."""


@dataclass(frozen=True)
class Receipt:
    """What protects a trained generator, and all that is drawn from it; the defaults say that nothing does.

    The fields are those of ``Release``. A receipt becomes a release when images leave a client.
    """

    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0

    def release(self, client: int, *what: str, seen: int = 0) -> Release:
        """The event that ``client`` sends this, under these names; ``seen``: of its examples, see ``Release``."""
        return Release(client, what, **asdict(self), seen=seen)


@dataclass(frozen=True)
class TrainedGenerator:
    """A trained generator; without a receipt it counts as uncovered."""

    weights: Weights
    receipt: Receipt | None = None


class Generator(Protocol):
    """Hyper-parameters in a frozen dataclass, and functions that draw from ``seed`` only.

    sampling: names of the hyper-parameters that only ``sample`` uses; the others decide what is trained. By
    ``batch_size`` and ``sampling_steps``, where it has them, ``--dry-run`` counts its steps. Optional functions raise
    ``UserError``: ``check(fields)`` refuses an experiment by its fields (dotted names to values), ``check_type(dtype,
    data)`` and ``check_shape(shape, data)`` examples of this type or shape, (C, H, W) for images, of the data set of
    this name, and ``check_sizes(sizes)`` the numbers of them that each client's generator would see. ``fit`` and
    ``sample`` may have one more parameter, ``progress``: a function or None, see ``Progress``, for the screen.
    ``for_images(n)`` may give another one for a client with n examples, as one that makes as many steps everywhere.
    """

    sampling: ClassVar[tuple[str, ...]]

    @property
    def epochs(self) -> int:
        """Epochs of training after which samples are drawn."""
        ...

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> Mapping[int, TrainedGenerator]:
        """Train on these images; return the generator after each of these numbers of epochs.

        Weights after epoch e do not depend on which other epochs were asked for. ``flip``: a mirrored image is as
        likely as the image, and may be trained on in its place. A private generator has one more parameter, ``noise``
        (see ``core.noise.Noise``), from which it draws all that its receipt tells of.
        """
        ...

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """One example for each label, (n, *shape), of the type that ``fit`` saw: uint8 for images."""
        ...


def of_client(generator: Generator, n: int) -> Generator:
    """The generator as it is for a client with n examples: what its ``for_images(n)`` gives, where it has that."""
    own = getattr(generator, "for_images", None)
    return own(n) if own else generator


def require_images(names: str, dtype: torch.dtype, data: str) -> None:
    """Refuse examples that are no uint8 images, which is what the generators of these ``names`` draw.

    Raises:
        UserError: the data set ``data`` has others.
    """
    if dtype != torch.uint8:
        raise UserError(
            f"generator.name {names} draw uint8 images, and {data} has {dtype} examples: name a "
            "generator of your own that draws these."
        )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of its weights and buffers, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}
