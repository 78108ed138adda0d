"""The common base of generators trained by DP-SGD: constants, checks, noise, training and statements of privacy.

Each image's loss is averaged over ``draws`` random draws, and the gradient of this mean is clipped. Noise is added to
the sum of gradients over a Poisson sample, and Adam takes a step. The guarantee covers the weights after all steps and
all images drawn from the weights. It does not cover the labels of the drawn images, which requests.py computes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.generator import Progress, Receipt, TrainedGenerator
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.accountants import noise_for, require_reachable
from fedcommons.privacy.dp_sgd import DPSGD
from fedcommons.privacy.noise import Noise, Source
from fedcommons.privacy.release import Release
from fedcommons.seeding import wide_key
from fedcommons.storage.artifact_store import constants

MOST_BY_PRV = 100.0
"""Largest target epsilon that is allowed with the accountant prv, whose time and memory grow with epsilon."""


@dataclass(frozen=True)
class ByDPSGD:
    """The constants of DP-SGD with Opacus' accountants. This is a base class, not a generator.

    Batches are Poisson samples. So ``batch_size`` is the expected number B of images in a batch, and an epoch has
    ceil(n/B) steps for the n images on which a client's generator is trained.
    """

    sampling: ClassVar[tuple[str, ...]]

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """number of epochs; an epoch has (training images)/batch_size steps, rounded up"""
    batch_size: Annotated[int, "[1, 1e9]"] = 256
    """expected number of images per step; each image is in a batch with probability batch_size/(training images)"""
    target_epsilon: Annotated[float | None, "(0, 1000]"] = None
    """target epsilon of each client's generator. The noise follows from either target_epsilon or noise_multiplier"""
    target_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """number of epochs after which target_epsilon is reached; default: generator.epochs"""
    noise_multiplier: Annotated[float | None, "[0.001, 1e6]"] = None
    """sigma, standard deviation of the noise divided by clip"""
    delta: Annotated[float, "[1e-250, 1)"] = 1e-5
    """delta of the (target_epsilon, delta) guarantee; a run has one delta, so it must be dp.delta"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 1.0
    """clipping norm: largest L2 norm of an image's gradient"""
    draws: Annotated[int, "[1, 1e6]"] = 1
    """noise multiplicity: number of random draws over which an image's loss is averaged, before clipping"""
    accountant: Annotated[str, "rdp | prv"] = "rdp"
    """accountant that computes the noise: rdp, as in the privacy ledger, or prv, which adds less noise (so the ledger
    reports an epsilon above the target)"""
    physical_batch: Annotated[int, "[1, 1e9]"] = 32
    """number of images whose gradients are in memory at a time; it affects only memory and rounding"""

    def __post_init__(self) -> None:
        """Set ``target_epochs`` to ``epochs`` if a target epsilon is set without ``target_epochs``.

        ``target_epochs`` decides the noise, so the stored constants must contain the number.
        """
        if self.target_epsilon is not None and self.target_epochs is None:
            object.__setattr__(self, "target_epochs", self.epochs)

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return {"target_epochs": number of epochs after which the target epsilon is reached}; {} without a target."""
        return {"target_epochs": self.target_epochs} if self.target_epochs else {}

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that the privacy constants are consistent; ``fields``: the experiment's fields (see ``Generator``)."""
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            which = "neither" if self.target_epsilon is None else "both"
            raise UserError(f"set either generator.target_epsilon or generator.noise_multiplier, not {which}.")
        if self.accountant == "prv" and (self.target_epsilon or 0) > MOST_BY_PRV:
            raise UserError(
                f"generator.target_epsilon must be at most {MOST_BY_PRV:g} with generator.accountant prv, got "
                f"{self.target_epsilon:g}: this accountant needs too much time for a larger epsilon; use "
                "generator.accountant rdp."
            )
        if self.target_epochs is not None and self.target_epsilon is None:
            raise UserError("generator.target_epochs is for generator.target_epsilon, which is not set.")
        if self.target_epochs is not None and self.target_epochs < self.epochs:
            raise UserError(
                f"generator.target_epochs must be at least generator.epochs = {self.epochs}, got {self.target_epochs}: "
                "more epochs spend more than generator.target_epsilon."
            )
        if fields.get("dp.delta", self.delta) != self.delta:
            raise UserError(f"generator.delta must be dp.delta = {fields['dp.delta']:g}, got {self.delta:g}.")

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """Check batch size, delta and target epsilon for each client; ``sizes``: training images per generator."""
        for client, n in enumerate(sizes):
            if n < self.batch_size:
                raise UserError(
                    "generator.batch_size must be at most the number of images on which each client's generator is "
                    f"trained, as the sampling rate is their ratio, got {self.batch_size}: client {client}'s generator "
                    f"is trained on {n}."
                )
            if self.delta * n >= 1:
                raise UserError(
                    f"generator.delta must be below 1/n = {1 / n:.3g}, got {self.delta:g}: client {client}'s generator "
                    f"is trained on n = {n} images, and with this delta it could publish one of them."
                )
            if self.target_epsilon is not None:
                try:
                    require_reachable(self.target_epsilon, *self._course(n))
                except UserError as error:
                    raise UserError(f"client {client}: generator.{error}") from None

    def _course(self, n: int) -> tuple[float, int, float, str]:
        """Return (sampling rate q, steps, delta, accountant), which decide the noise for n training images."""
        q, steps = DPSGD.sampling_rate(n, self.batch_size), DPSGD.steps(n, self.batch_size)
        return q, (self.target_epochs or self.epochs) * steps, self.delta, self.accountant

    def sigma(self, n: int) -> float:
        """Return the noise multiplier for n training images: the constant, or computed from the target epsilon."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None
        return noise_for(self.target_epsilon, *self._course(n))

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> "Training":
        """Return the untrained network and the functions of its training; subclasses define this function."""
        raise NotImplementedError

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        noise: Noise | None = None, progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """Train by DP-SGD (see ``Generator``); receipts state the sampling rate, noise multiplier and steps so far.

        noise: the noise of a run; None: seeded noise, which does not depend on ``epochs``, ``physical_batch`` or the
        constants of sampling.
        """
        if noise is None:
            less = (*self.sampling, "epochs", "physical_batch")
            noise = Noise(Source(wide_key("generator", repr(constants(self, less)), n_classes, str(flip), seed)))
        training = self.training(tuple(examples.x.shape[1:]), n_classes, seed, flip)
        n, generators, protections = len(examples), dict[int, TrainedGenerator](), set[Release]()
        of_epoch, device = DPSGD.steps(n, self.batch_size), next(training.module.parameters()).device
        steps: Iterator[Release] = dp_sgd_vmap.steps(
            training.module,
            training.optimizer,
            training.loss,
            [examples.x.to(device), examples.y.to(device)],
            training.draw,
            DPSGD(self.sigma(n), self.clip),
            batch_size=self.batch_size,
            epochs=max(epochs),
            physical_batch=self.physical_batch,
            noise=noise.call("private generator", examples.x, examples.y),
            draws=training.draws,
        )
        for step, protection in enumerate(steps, 1):
            training.after()
            protections.add(protection)
            epoch, rest = divmod(step, of_epoch)
            if progress:
                progress(step, max(epochs) * of_epoch)
            if rest == 0 and epoch in epochs:
                # If the guarantees of the steps differ, a receipt cannot state them: the generator is unprotected.
                p = protection if len(protections) == 1 else Release()
                receipt = Receipt(p.mechanism, p.q, p.sigma, p.sensitivity, step)
                generators[epoch] = TrainedGenerator(training.weights(), receipt)
        return generators


@dataclass(frozen=True)
class Training:
    """A generator's training by DP-SGD: the network that sees real images, and functions for this generator.

    loss, draw, draws: see ``dp_sgd_vmap.steps``. after: function that is called after every step. It uses only the
    module, not the examples, so it costs no privacy. weights: function that returns the generator's weights.
    """

    module: nn.Module
    optimizer: Optimizer
    loss: dp_sgd_vmap.Loss
    draw: dp_sgd_vmap.Draw
    draws: torch.Generator
    after: Callable[[], object]
    weights: Callable[[], Mapping[str, Tensor]]


def per_image(model: nn.Module, draws: int, prefix: str = "") -> tuple[dp_sgd_vmap.Loss, dp_sgd_vmap.Draw]:
    """Return the loss of an image, averaged over ``draws`` random draws, and a function that makes the random draws.

    prefix: name of the trained network in ``model``, with a dot; empty if the whole model is trained.
    """
    draw_noises: Any = model.draw

    def loss(named: dict[str, Tensor], image: Tensor, label: Tensor, *noises: Tensor) -> Tensor:
        rows = image.expand(draws, *image.shape), label.expand(draws)
        return functional_call(model, {f"{prefix}{name}": t for name, t in named.items()}, (*rows, *noises))

    def draw(images: int, rows: dp_sgd_vmap.Rows) -> list[Tensor]:
        return [part.unflatten(0, (images, draws))[rows] for part in draw_noises(images * draws)]

    return loss, draw
