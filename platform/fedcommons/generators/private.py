"""The DDPM of ``ddpm.py`` trained by DP-SGD, so that its images are differentially private (Dockhorn et al. 2023).

Each image's loss is a mean over ``draws`` pairs (t, eps), its gradient is clipped, the sum over a Poisson sample gets
noise, Adam makes a step, and then the moving average of the weights does. The guarantee is that of the weights after
all steps, and of all images drawn from them; labels of drawn images come from elsewhere.

Departs from Fedssyn, which prints a noise multiplier that gives its epsilon at one batch size only (see
docs/results/epsilon_of_the_paper.md): here the target is given, and every client's noise is solved for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedcommons import capacity
from fedcommons.artifacts import constants
from fedcommons.core import dp_vectorised
from fedcommons.core.accountants import noise_for, require_reachable
from fedcommons.core.dp_sgd import DPSGD
from fedcommons.core.noise import Noise, Source
from fedcommons.core.release import Release
from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.ddpm import DDPM, Diffusion
from fedcommons.generators.generator import Progress, Receipt, TrainedGenerator, Weights, require_images
from fedcommons.seeds import set_default_generator, wide_key

if TYPE_CHECKING:  # it takes seconds to import, and most workers never need it
    from lightning_modules import ddpm

_NOT_IN_THE_NOISE = (*Diffusion.sampling, "epochs", "physical_batch")
"""Constants that change neither data nor noise of a step; two trainings that differ in another one share no noise."""


MOST_BY_PRV = 100.0
"""The largest target for which the accountant prv has an answer within seconds: the grid of losses grows with it."""


@dataclass(frozen=True)
class PrivateDDPM(Diffusion):
    """A DDPM by DP-SGD with Opacus' accountants. n: images that a client's generator sees.

    ``epochs`` and ``batch_size`` mean something else here than in a DDPM, so they stand here too.
    """

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """epochs of ceil(n/B) steps each"""
    batch_size: Annotated[int, "[1, 1e9]"] = 256
    """B, expected number of images per step; every image is in a batch with probability q = B/n"""
    target_epsilon: Annotated[float | None, "(0, 1000]"] = None
    """epsilon of each client's generator; its noise is solved for. Either this or noise_multiplier"""
    target_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """epochs after which target_epsilon is reached; default: generator.epochs"""
    noise_multiplier: Annotated[float | None, "[0.001, 1e6]"] = None
    """sigma, standard deviation of the noise divided by clip"""
    delta: Annotated[float, "(0, 1)"] = 1e-5
    """delta of target_epsilon; a run has one delta, so it must be dp.delta"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 1.0
    """clipping norm: largest L2 norm of an image's gradient"""
    draws: Annotated[int, "[1, 1e6]"] = 1
    """noise multiplicity: pairs (t, eps) over which an image's loss is a mean, before clipping"""
    accountant: Annotated[str, "rdp | prv"] = "rdp"
    """what solves for the noise: rdp, by which the ledger counts, or prv (less noise, and a larger epsilon there)"""
    physical_batch: Annotated[int, "[1, 1e9]"] = 32
    """images whose gradients are held at a time; it changes memory and rounding only"""

    def __post_init__(self) -> None:
        """The noise for a target depends on when it is reached, so that belongs to what identifies a training."""
        if self.target_epsilon is not None and self.target_epochs is None:
            object.__setattr__(self, "target_epochs", self.epochs)

    @property
    def plain(self) -> DDPM:
        """The same generator without privacy."""
        return DDPM(**{field.name: getattr(self, field.name) for field in fields(DDPM)})

    def check(self, fields: Mapping[str, Any]) -> None:
        """See ``Generator``."""
        self.plain.check(fields)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "neither" if self.target_epsilon is None else "both"
            raise UserError(f"give either generator.target_epsilon or generator.noise_multiplier, not {given}.")
        if self.accountant == "prv" and (self.target_epsilon or 0) > MOST_BY_PRV:
            raise UserError(
                f"generator.target_epsilon must be at most {MOST_BY_PRV:g} with generator.accountant prv, got "
                f"{self.target_epsilon:g}: its grids would grow without end."
            )
        if self.target_epochs is not None and self.target_epsilon is None:
            raise UserError("generator.target_epochs is for generator.target_epsilon, which is not given.")
        if self.target_epochs is not None and self.target_epochs < self.epochs:
            raise UserError(
                f"generator.target_epochs must be at least generator.epochs = {self.epochs}, got {self.target_epochs}: "
                "more epochs spend more than generator.target_epsilon."
            )
        if fields.get("dp.delta", self.delta) != self.delta:
            raise UserError(f"generator.delta must be dp.delta = {fields['dp.delta']:g}, got {self.delta:g}.")

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """See ``Generator``."""
        require_images("ddpm and private_ddpm", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """See ``Generator``."""
        self.plain.check_shape(shape, data)
        held = 4 * self.physical_batch * sum(3 * 9 * n * n for n in self.channels)
        capacity.require("the gradients of a physical batch", held, "generator.physical_batch")

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """See ``Generator``."""
        for client, n in enumerate(sizes):
            if n < self.batch_size:
                raise UserError(
                    f"generator.batch_size must be at most the number of images that each client's generator sees, as "
                    f"the sampling rate is their ratio, got {self.batch_size}: client {client}'s sees {n}."
                )
            if self.delta * n >= 1:
                raise UserError(
                    f"generator.delta must be below 1/n = {1 / n:.3g}, got {self.delta:g}: client {client}'s generator "
                    f"sees {n} images, and at such a delta it could publish one of them."
                )
            if self.target_epsilon is not None:
                try:
                    require_reachable(self.target_epsilon, *self._course(n))
                except UserError as error:
                    raise UserError(f"client {client}: generator.{error}") from None

    def _course(self, n: int) -> tuple[float, int, float, str]:
        """(q, steps, delta, accountant) of the training of n images for which the noise is solved."""
        q, steps = DPSGD.sampling_rate(n, self.batch_size), DPSGD.steps(n, self.batch_size)
        return q, (self.target_epochs or self.epochs) * steps, self.delta, self.accountant

    def sigma(self, n: int) -> float:
        """The noise multiplier for n images."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.target_epsilon is not None
        return noise_for(self.target_epsilon, *self._course(n))

    def fit(
        self,
        examples: Examples,
        n_classes: int,
        seed: int,
        epochs: Collection[int],
        *,
        flip: bool = False,
        noise: Noise | None = None,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:
        """See ``Generator``; the receipts tell the q, sigma and steps that were used up to each epoch."""
        alone = wide_key("generator", repr(constants(self, _NOT_IN_THE_NOISE)), n_classes, str(flip), seed)
        noise = noise or Noise(Source(alone))
        set_default_generator(seed, "initial weights")
        model = self.plain.build(tuple(examples.x.shape[1:]), n_classes, seed, flip).to(default_device())
        model.on_fit_start()
        n = len(examples)
        loss, draw = per_image(model, self.draws)
        steps = dp_vectorised.steps(
            model,
            torch.optim.Adam(model.parameters(), self.lr, fused=True),
            loss,
            [examples.x.to(model.device), examples.y.to(model.device)],
            draw,
            DPSGD(self.sigma(n), self.clip),
            batch_size=self.batch_size,
            epochs=max(epochs),
            physical_batch=self.physical_batch,
            noise=noise.call("private generator", examples.x, examples.y),
        )
        kept: dict[int, TrainedGenerator] = {}
        protections: set[Release] = set()
        for step, protection in enumerate(steps, 1):
            model.on_train_batch_end()
            protections.add(protection)
            epoch, rest = divmod(step, DPSGD.steps(n, self.batch_size))
            if progress:
                progress(step, max(epochs) * DPSGD.steps(n, self.batch_size))
            if rest == 0 and epoch in epochs:
                p = protection if len(protections) == 1 else Release()  # of two kinds of steps no receipt can tell
                kept[epoch] = TrainedGenerator(
                    model.averaged(), Receipt(p.mechanism, p.q, p.sigma, p.sensitivity, step)
                )
        return kept

    def sample(
        self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``Generator``."""
        return self.plain.sample(weights, shape, n_classes, labels, seed, progress)

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """See ``DDPM``."""
        return self.plain.losses(weights, examples, n_classes, seed)


def per_image(model: "ddpm.DDPM", draws: int) -> tuple[dp_vectorised.Loss, dp_vectorised.Draw]:
    """The loss of one image, mean over its draws, and what is drawn for so many images."""

    def loss(named: dict[str, Tensor], image: Tensor, label: Tensor, *drawn: Tensor) -> Tensor:
        rows = image.expand(draws, *image.shape), label.expand(draws)
        return functional_call(model, named, (*rows, *drawn))

    def draw(images: int) -> list[Tensor]:
        return [part.unflatten(0, (images, draws)) for part in model.draw(images * draws)]

    return loss, draw
