"""A class-conditional DDPM trained by a Lightning Trainer (Ho et al. 2020; Fedssyn, algorithm I, line 3).

Departs from the paper: the moving average of the weights warms up, because with a client's few steps a fixed decay of
0.9995 would leave it dominated by the initial weights.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedcommons.core.worker import default_device, require_precision
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError, quote
from fedcommons.generators.generator import Progress, Receipt, TrainedGenerator, Weights, require_images
from fedcommons.generators.training_loop import batch_of
from fedcommons.runtime import memory_limit
from fedcommons.seeding import generator, seed_for, set_default_generator

COPIES = 5
"""Copies of the weights in memory during training: weights, gradient, Adam's two moments and the moving average."""


@dataclass(frozen=True)
class Diffusion:
    """The constants of a DDPM with or without privacy; a base class, not a generator.

    sampling: see ``Generator``.
    """

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """passes over the client's images (the share rho)"""
    batch_size: Annotated[int, "[1, 1e9]"] = 256
    """images per step"""
    lr: Annotated[float, "(0, 1e38]"] = 1e-4
    """learning rate of Adam"""
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (64, 128, 128)
    """channels of the U-Net's levels; each level halves the image"""
    ema_decay: Annotated[float, "[0, 1)"] = 0.9995
    """decay of the weights' moving average, reached by warm-up"""
    timesteps: Annotated[int, "[1, 1e6]"] = 1000
    """T, steps of the diffusion in training"""
    schedule: Annotated[str, "linear | squaredcos_cap_v2"] = "linear"
    """noise schedule: linear (Ho et al.) or squaredcos_cap_v2 (cosine)"""
    prediction: Annotated[str, "epsilon | v_prediction | sample"] = "epsilon"
    """what the network predicts: epsilon (Ho et al.), the noise; sample, the image; or v_prediction (Salimans and Ho
    2022), a mixture of both; the last two learn from far noisier gradients"""
    sampler: Annotated[str, "ddpm | ddim"] = "ddpm"
    """ddpm (ancestral) or ddim (deterministic, for few steps)"""
    sampling_steps: Annotated[int, "[1, 1e6]"] = 1000
    """steps of the sampler, at most T"""

    sampling: ClassVar[tuple[str, ...]] = ("sampler", "sampling_steps")


@dataclass(frozen=True)
class DDPM(Diffusion):
    """A DDPM (Ho et al. 2020), conditional on the class."""

    even_batches: bool = False
    """split an epoch's images into batches of equal sizes, at most batch_size; otherwise the last batch is smaller, and
    Adam's step for it is equally large"""
    steps: Annotated[int | None, "[1, 1e9]"] = None
    """minimum number of training steps of every client's generator, which replaces epochs: the passes are increased
    for few images; default: epochs"""
    snr_gamma: Annotated[float | None, "(0, 1e6]"] = None
    """gamma of min-SNR weighting (Hang et al. 2023: 5): losses of times with little noise weigh less; default: all
    times have equal weights, as in Ho et al."""
    precision: Annotated[str, "fp32 | bf16"] = "fp32"
    """precision of training, by torch's autocast; images are drawn in fp32"""

    def check(self, fields: Mapping[str, Any]) -> None:
        """See ``Generator``."""
        if len(self.channels) < 2 or any(n % 8 for n in self.channels):
            raise UserError(
                f"generator.channels must be two or more multiples of 8 (group norm), got {quote(list(self.channels))}."
            )
        if self.sampling_steps > self.timesteps:
            raise UserError(
                f"generator.sampling_steps must be at most generator.timesteps = {self.timesteps}, "
                f"got {self.sampling_steps}."
            )

    def for_images(self, n: int) -> "DDPM":
        """Return the DDPM for a client whose generator sees n images, with the epochs that ``steps`` need."""
        if self.steps is None:
            return self
        batches = -(-n // batch_of(n, self.batch_size, self.even_batches))
        return replace(self, epochs=-(-self.steps // batches), steps=None)

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return the epochs and the batch size of a client whose generator sees n images."""
        return {"epochs": self.epochs, "batch_size": min(n, batch_of(n, self.batch_size, self.even_batches))}

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """See ``Generator``."""
        require_images("ddpm and private_ddpm", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """See ``Generator``. The memory is a lower bound: every level has at least three 3x3 convolutions."""
        halved = 2 ** (len(self.channels) - 1)
        if odd := [side for side in shape[1:] if side % halved]:
            raise UserError(
                f"generator.channels has {len(self.channels)} levels, so the image side must be a multiple "
                f"of {halved}, and {data} has {odd[0]}."
            )
        memory_limit.require(
            "the generator", COPIES * 4 * sum(3 * 9 * n * n for n in self.channels), "generator.channels"
        )

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """See ``Generator``; fewer images than ``batch_size`` form one batch."""
        import pytorch_lightning as lightning

        from fedcommons.generators import lightning_trainer

        require_precision("generator.precision", self.precision, default_device())
        set_default_generator(seed, "initial weights")
        model = self.build(tuple(examples.x.shape[1:]), n_classes, seed, flip)
        loader = DataLoader(
            TensorDataset(examples.x, examples.y),
            batch_size=batch_of(len(examples), self.batch_size, self.even_batches),
            shuffle=True,
            generator=generator(seed, "order"),
        )
        generators: dict[int, TrainedGenerator] = {}

        class Keep(lightning.Callback):
            def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
                if trainer.current_epoch + 1 in epochs:
                    generators[trainer.current_epoch + 1] = TrainedGenerator(model.averaged(), Receipt())

        precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[self.precision]
        lightning_trainer.fit(model, loader, max(epochs), [Keep()], progress, precision)
        return generators

    def sample(
        self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``Generator``."""
        model = self.build(shape, n_classes, seed)
        model.unet.load_state_dict(dict(weights))
        model.to(default_device())
        draws = seed_for(seed, "samples")
        return model.sample(labels, draws, sampler=self.sampler, steps=self.sampling_steps, progress=progress).cpu()

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return the loss of each image (n,), with equal times and noise for all images, for membership inference."""
        model = self.build(tuple(examples.x.shape[1:]), n_classes, seed)
        model.unet.load_state_dict(dict(weights))
        model.to(default_device())
        return model.losses(examples.x, examples.y, seed_for(seed, "losses")).cpu()

    def build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False):
        """Build the LightningModule with initial weights from torch's default generator; ``seed``: for its noise."""
        from lightning_modules import ddpm  # slow to import (seconds), and most workers never need it

        return ddpm.DDPM(
            shape=shape,
            n_classes=n_classes,
            channels=self.channels,
            lr=self.lr,
            timesteps=self.timesteps,
            schedule=self.schedule,
            prediction=self.prediction,
            ema_decay=self.ema_decay,
            snr_gamma=self.snr_gamma,
            flip=flip,
            seed=seed_for(seed, "noise"),
        )
