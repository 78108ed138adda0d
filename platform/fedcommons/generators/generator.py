"""The interface of generators, which learn the images of each class from a client's data and draw new images."""

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
"""A function that is called after each step with (steps done, total steps)."""


@dataclass(frozen=True)
class Receipt:
    """The privacy protection of a trained generator and of all samples from it; the defaults state no protection.

    The fields are those of ``Release``. A receipt becomes a release when images leave a client.
    """

    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0

    def release(self, client: int, *what: str, seen: int = 0) -> Release:
        """Return the release of ``what`` (names) by ``client``; ``seen``: number of its examples, see ``Release``."""
        return Release(client, what, **asdict(self), n_disclosed=seen)


@dataclass(frozen=True)
class TrainedGenerator:
    """A trained generator, which counts as unprotected if it has no receipt."""

    weights: Weights
    receipt: Receipt | None = None


class Generator(Protocol):
    """A frozen dataclass of hyper-parameters, whose functions draw random numbers from ``seed`` only.

    sampling: names of the hyper-parameters that only ``sample`` uses; the other hyper-parameters decide the training.
    If the generator has ``batch_size`` and ``sampling_steps``, ``--dry-run`` counts its steps by these.

    Optional functions refuse an experiment with a ``UserError``. ``check(fields)`` checks its fields (dotted names to
    values). ``check_type(dtype, data)`` and ``check_shape(shape, data)`` check the examples of the data set named
    ``data``; the shape of images is (C, H, W). ``check_sizes(sizes)`` checks the number of each client's examples.
    ``fit`` and ``sample`` may have a parameter ``progress``: a function (see ``Progress``) or None, for the screen.
    ``for_images(n)`` may return a generator for a client with n examples, for example with equal steps per client.
    """

    sampling: ClassVar[tuple[str, ...]]

    @property
    def epochs(self) -> int:
        """Return the epochs of training after which samples are drawn."""
        ...

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> Mapping[int, TrainedGenerator]:
        """Train on ``examples`` and return the generator after each number of epochs in ``epochs``.

        The weights after epoch e do not depend on the other requested epochs. ``flip``: mirrored images are as likely
        as the images, and training may use them instead. A private generator has one more parameter, ``noise`` (see
        ``core.noise.Noise``): all noise that its receipt states comes from it.
        """
        ...

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one example for each label: (n, *shape), of the type of the training examples, uint8 for images."""
        ...


def for_client(generator: Generator, n: int) -> Generator:
    """Return the generator for a client with n examples: the result of ``for_images(n)`` if it has this function."""
    for_images = getattr(generator, "for_images", None)
    return for_images(n) if for_images else generator


def require_images(names: str, dtype: torch.dtype, data: str) -> None:
    """Check that the data set ``data`` has uint8 images, as the generators of these ``names`` draw only such images.

    Raises:
        UserError: ``dtype`` is not uint8.
    """
    if dtype != torch.uint8:
        raise UserError(
            f"generator.name {names} draw uint8 images, and {data} has {dtype} examples: name a "
            "generator of your own that draws these."
        )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the module's weights and buffers, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}
