"""The DDPM of ``ddpm.py`` trained by DP-SGD, so that its images are differentially private (Dockhorn et al. 2023).

Each image's loss is averaged over ``draws`` random pairs of diffusion time t and noise eps. After each step the moving
average of the weights is updated (see ``dp_training.py``).

Departs from Fedssyn: the user sets the target epsilon, and every client's noise is computed from it. Fedssyn prints a
noise multiplier, which gives the paper's epsilon at one batch size only (see docs/notes/epsilon_of_the_paper.md).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.ddpm import DDPM, Diffusion
from fedcommons.generators.dp_training import ByDPSGD
from fedcommons.generators.generator import Progress, TrainedGenerator, Weights
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.noise import Noise
from fedcommons.runtime import memory_limit
from fedcommons.seeding import set_default_generator

if TYPE_CHECKING:  # the import takes seconds, and most workers never need it
    from lightning_modules import ddpm


@dataclass(frozen=True)
class PrivateDDPM(ByDPSGD, Diffusion):
    """A DDPM, conditional on the class, trained by DP-SGD with Opacus' accountants."""

    sampling: ClassVar[tuple[str, ...]] = Diffusion.sampling

    @property
    def plain(self) -> DDPM:
        """Return the DDPM with the same network and training constants, but without privacy."""
        return DDPM(**{field.name: getattr(self, field.name) for field in fields(Diffusion)})

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check the shape as ``DDPM`` does, and that the gradients of a physical batch fit into memory."""
        self.plain.check_shape(shape, data)
        nbytes = 4 * self.physical_batch * sum(3 * 9 * n * n for n in self.channels)
        memory_limit.require("the gradients of a physical batch", nbytes, "generator.physical_batch")

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
        """Train by DP-SGD (see ``Generator``); receipts state the sampling rate, noise multiplier and steps so far."""
        noise = noise or self.noise_alone(n_classes, flip, seed)
        set_default_generator(seed, "initial weights")
        model = self.plain.build(tuple(examples.x.shape[1:]), n_classes, seed, flip).to(default_device())
        model.on_fit_start()
        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        return self.train(
            model, optimizer, *per_image(model, self.draws), examples, epochs, noise,
            draws=model.generator, after=model.on_train_batch_end, weights=model.averaged, progress=progress,
        )  # fmt: skip

    def sample(
        self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """Draw one uint8 image per label, as the DDPM without privacy does."""
        return self.plain.sample(weights, shape, n_classes, labels, seed, progress)

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return each image's loss, (n,), for membership inference (see ``DDPM.losses``)."""
        return self.plain.losses(weights, examples, n_classes, seed)


def per_image(model: "ddpm.DDPM", draws: int) -> tuple[dp_sgd_vmap.Loss, dp_sgd_vmap.Draw]:
    """Return the loss of an image, averaged over ``draws`` pairs (time t, noise eps), and a function to draw them."""

    def loss(named: dict[str, Tensor], image: Tensor, label: Tensor, *noises: Tensor) -> Tensor:
        rows = image.expand(draws, *image.shape), label.expand(draws)
        return functional_call(model, named, (*rows, *noises))

    def draw(images: int, rows: dp_sgd_vmap.Rows) -> list[Tensor]:
        return [part.unflatten(0, (images, draws))[rows] for part in model.draw(images * draws)]

    return loss, draw
