"""A class-conditional DDPM trained by a Lightning Trainer (Ho et al. 2020; Fedssyn, algorithm I, line 3).

``PrivateDDPM`` is trained by DP-SGD, so that its images are differentially private (Dockhorn et al. 2023). Each image's
loss is averaged over ``draws`` random pairs of diffusion time t and noise eps. After each step the moving average of
the weights is updated (see ``dp_training.py``).

Departs from the paper: the decay of the weights' moving average warms up. A client takes few steps, so with a fixed
decay of 0.9995 the initial weights would dominate the average. Departs from Fedssyn: the user sets the target epsilon,
and every client's noise is computed from it. Fedssyn prints a noise multiplier, which gives the paper's epsilon at one
batch size only (see docs/notes/epsilon_of_the_paper.md).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcommons.core.worker import default_device, require_precision
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError, quote
from fedcommons.generators.dp_training import ByDPSGD, Training, per_image
from fedcommons.generators.generator import Progress, TrainedGenerator, Weights, build_module, require_images
from fedcommons.generators.training_loop import batch_of, train
from fedcommons.runtime import memory_limit
from fedcommons.seeding import seed_for, set_default_generator

COPIES = 5
"""Number of copies of the weights in memory: weights, gradient, Adam's two moments and the moving average."""


@dataclass(frozen=True)
class Diffusion:
    """The hyperparameters and the network of a DDPM, with or without privacy. This is a base class, not a generator.

    sampling: names of the hyperparameters that only sampling uses.
    """

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """number of passes over the training images, the share generator.rho of the client's images"""
    batch_size: Annotated[int, "[1, 1e9]"] = 256
    """number of images per training step"""
    lr: Annotated[float, "(0, 1e38]"] = 1e-4
    """learning rate of Adam"""
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (64, 128, 128)
    """channels of the U-Net's levels; between two levels the image is halved"""
    ema_decay: Annotated[float, "[0, 1)"] = 0.9995
    """final decay of the weights' moving average, which is reached after a warm-up"""
    timesteps: Annotated[int, "[1, 1e6]"] = 1000
    """T, number of diffusion steps in training"""
    schedule: Annotated[str, "linear | squaredcos_cap_v2"] = "linear"
    """noise schedule: linear (Ho et al.) or squaredcos_cap_v2 (cosine)"""
    prediction: Annotated[str, "epsilon | v_prediction | sample"] = "epsilon"
    """what the network predicts: epsilon (Ho et al.), the noise; sample, the image; or v_prediction (Salimans and Ho
    2022), a mixture of both; sample and v_prediction have far noisier gradients"""
    sampler: Annotated[str, "ddpm | ddim"] = "ddpm"
    """sampler: ddpm (ancestral) or ddim (deterministic, for few steps)"""
    sampling_steps: Annotated[int, "[1, 1e6]"] = 1000
    """number of steps of the sampler, at most timesteps"""

    sampling: ClassVar[tuple[str, ...]] = ("sampler", "sampling_steps")

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that ``channels`` suit group norm, and ``sampling_steps`` <= ``timesteps`` (see ``Generator``)."""
        if len(self.channels) < 2 or any(n % 8 for n in self.channels):
            raise UserError(
                f"generator.channels must be two or more multiples of 8, as group norm needs, "
                f"got {quote(list(self.channels))}."
            )
        if self.sampling_steps > self.timesteps:
            raise UserError(
                f"generator.sampling_steps must be at most generator.timesteps = {self.timesteps}, "
                f"got {self.sampling_steps}."
            )

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """Check that the examples are uint8 images (see ``Generator``)."""
        require_images("ddpm and private_ddpm", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check that the levels fit the image's sides, and that three 3x3 convolutions per level fit into memory."""
        halved = 2 ** (len(self.channels) - 1)
        if odd := [side for side in shape[1:] if side % halved]:
            raise UserError(
                f"generator.channels has {len(self.channels)} levels, so the image side must be a multiple "
                f"of {halved}, but {data} has a side of {odd[0]}."
            )
        memory_limit.require(
            "the generator", COPIES * 4 * sum(3 * 9 * n * n for n in self.channels), "generator.channels"
        )

    def sample(
        self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """Draw one uint8 image per label (see ``Generator``)."""
        model, draws = self._read(weights, shape, n_classes), seed_for(seed, "samples")
        return model.sample(labels, draws, sampler=self.sampler, steps=self.sampling_steps, progress=progress).cpu()

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return each image's loss, (n,), for membership inference; all images get equal diffusion times and noise."""
        model = self._read(weights, tuple(examples.x.shape[1:]), n_classes)
        return model.losses(examples.x, examples.y, seed_for(seed, "losses")).cpu()

    def _read(self, weights: Weights, shape: tuple[int, ...], n_classes: int):
        model = self.build(shape, n_classes, 0).to(default_device())
        model.unet.load_state_dict(dict(weights))
        return model

    def build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False):
        """Build the LightningModule. torch's default generator draws the weights, and ``seed`` decides the noise."""
        from lightning_modules import ddpm  # the import takes seconds, and most workers never need it

        return build_module(ddpm.DDPM, self, shape, n_classes, seed, flip)


@dataclass(frozen=True)
class DDPM(Diffusion):
    """A DDPM (Ho et al. 2020), conditional on the class."""

    even_batches: bool = False
    """split an epoch's images into batches of equal sizes, at most batch_size; otherwise the last batch may be smaller,
    but Adam takes an equally large step for it"""
    steps: Annotated[int | None, "[1, 1e9]"] = None
    """number of training steps of every client's generator, rounded up to whole epochs; it replaces epochs, so clients
    with few images train for more epochs; default: use epochs"""
    snr_gamma: Annotated[float | None, "(0, 1e6]"] = None
    """gamma of min-SNR weighting (Hang et al. 2023: 5): losses at diffusion times with little noise weigh less;
    default: all times have equal weights, as in Ho et al."""
    precision: Annotated[str, "fp32 | bf16"] = "fp32"
    """precision of training, by torch's autocast; synthetic images are always drawn in fp32"""

    def for_images(self, n: int) -> "DDPM":
        """Return the DDPM for n training images, with ``epochs`` set to the number of epochs that ``steps`` need."""
        if self.steps is None:
            return self
        batches = -(-n // batch_of(n, self.batch_size, self.even_batches))
        return replace(self, epochs=-(-self.steps // batches), steps=None)

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return the epochs and the batch size that are used for a generator with n training images, by name."""
        return {"epochs": self.epochs, "batch_size": min(n, batch_of(n, self.batch_size, self.even_batches))}

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """Train on a client's images (see ``Generator``). Fewer images than ``batch_size`` form one batch."""
        device = default_device()
        require_precision("generator.precision", self.precision, device)
        set_default_generator(seed, "initial weights")
        model = self.build(tuple(examples.x.shape[1:]), n_classes, seed, flip).to(device)
        model.on_fit_start()
        optimizer = model.configure_optimizers()

        def step(x: Tensor, y: Tensor) -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                loss = model.training_step((x, y), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.on_train_batch_end()

        size = batch_of(len(examples), self.batch_size, self.even_batches)
        return train(step, model.averaged, examples, size, epochs, seed, progress, as_loader=True)


@dataclass(frozen=True)
class PrivateDDPM(ByDPSGD, Diffusion):
    """A DDPM, conditional on the class, trained by DP-SGD with Opacus' accountants."""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check the constants of the DDPM and those of DP-SGD (see ``Generator``)."""
        Diffusion.check(self, fields)
        ByDPSGD.check(self, fields)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check the shape as ``DDPM`` does, and that the gradients of a physical batch fit into memory."""
        super().check_shape(shape, data)
        nbytes = 4 * self.physical_batch * sum(3 * 9 * n * n for n in self.channels)
        memory_limit.require("the gradients of a physical batch", nbytes, "generator.physical_batch")

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> Training:
        set_default_generator(seed, "initial weights")
        model = self.build(shape, n_classes, seed, flip).to(default_device())
        model.on_fit_start()
        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        functions = per_image(model, self.draws)
        return Training(model, optimizer, *functions, model.generator, model.on_train_batch_end, model.averaged)
