"""The interface of generators, which are trained on one client's data and draw synthetic examples of chosen classes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from inspect import signature
from math import inf
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.privacy.release import Release
from fedcommons.seeding import seed_for

M = TypeVar("M", bound=nn.Module)

Weights = Mapping[str, Tensor]

Progress = Callable[[int, int], None]
"""A function that the generator calls after each step with (steps done, total steps)."""


@dataclass(frozen=True)
class Receipt:
    """The privacy protection of a trained generator and of all its samples. The default values state no protection.

    mechanism: ``SAMPLED_GAUSSIAN``, or None for no protection. q: sampling rate. sigma: noise multiplier, the standard
    deviation of the noise divided by the sensitivity. steps: number of noisy steps. When samples leave a client, the
    receipt becomes an entry of the privacy ledger (``Release``), which has the same fields.
    """

    mechanism: str | None = None
    q: float = 1.0
    sigma: float = 0.0
    sensitivity: float = inf
    steps: int = 0

    def release(self, client: int, *what: str, seen: int = 0) -> Release:
        """Return the privacy ledger entry for data, named ``what``, that leave ``client`` with this protection.

        seen: number of the client's examples from which the data were computed.
        """
        return Release(client, what, **asdict(self), n_disclosed=seen)


@dataclass(frozen=True)
class TrainedGenerator:
    """The weights of a trained generator, and its privacy protection (receipt); None: no protection."""

    weights: Weights
    receipt: Receipt | None = None


class Generator(Protocol):
    """A generator: a frozen dataclass of hyperparameters, whose functions draw random numbers from ``seed`` only.

    sampling: names of the hyperparameters that only ``sample`` uses; the other hyperparameters decide the training.
    ``--dry-run`` predicts the number of steps from the hyperparameters ``batch_size`` and ``sampling_steps``, if any.

    A generator may have further functions. The functions ``check...`` raise ``UserError`` to refuse an experiment.
    check(fields): check the experiment's fields (dotted names to values).
    check_type(dtype, data), check_shape(shape, data): check type and shape (C, H, W) of examples of data set ``data``.
    check_sizes(sizes): check the number of training examples of each client's generator.
    for_images(n): return the generator for a client with n training examples, for example with equal numbers of steps.
    ``fit`` and ``sample`` may have a parameter ``progress``: a function (see ``Progress``), or None.
    """

    sampling: ClassVar[tuple[str, ...]]

    @property
    def epochs(self) -> int:
        """Return the number of epochs of training after which samples are drawn."""
        ...

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> Mapping[int, TrainedGenerator]:
        """Train on ``examples`` and return the trained generator after each number of epochs in ``epochs``.

        The weights after e epochs do not depend on the other numbers in ``epochs``. flip: whether training may mirror
        images. A private generator has one more parameter, ``noise`` (see ``privacy.noise.Noise``), from which it must
        draw all noise that its receipt states.
        """
        ...

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one example per label (n,): (n, *shape) in the training examples' type, which is uint8 for images."""
        ...


def for_client(generator: Generator, n: int) -> Generator:
    """Return the generator for n training examples: ``generator.for_images(n)`` if it exists, else ``generator``."""
    for_images = getattr(generator, "for_images", None)
    return for_images(n) if for_images else generator


def require_images(names: str, dtype: torch.dtype, data: str) -> None:
    """Check that the data set ``data`` has uint8 images, because the generators ``names`` draw only uint8 images.

    Raises:
        UserError: ``dtype`` is not uint8.
    """
    if dtype != torch.uint8:
        raise UserError(
            f"generator.name {names} draw uint8 images, but {data} has {dtype} examples: use a "
            "user-defined generator that draws examples of this type."
        )


def build_module(
    kind: Callable[..., M], constants: Any, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool, **other: Any
) -> M:
    """Build a network of class ``kind`` with those constants of a generator that the class has as parameters.

    seed: seed of the generator, from which the seed of the network's random draws is computed. other: values that
    replace the constants of these names.
    """
    names = signature(kind).parameters
    values = {field.name: getattr(constants, field.name) for field in fields(constants) if field.name in names}
    facts = {"shape": shape, "n_classes": n_classes, "flip": flip, "seed": seed_for(seed, "noise")}
    return kind(**{**values, **facts, **other})
