"""The DDPM of ``ddpm.py`` trained by DP-SGD, so that its images are differentially private (Dockhorn et al. 2023).

Each image's loss is averaged over ``draws`` random pairs of diffusion time t and noise eps. After each step the moving
average of the weights is updated (see ``dp_training.py``).

Departs from Fedssyn: the user sets the target epsilon, and every client's noise is computed from it. Fedssyn prints a
noise multiplier, which gives the paper's epsilon at one batch size only (see docs/notes/epsilon_of_the_paper.md).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.ddpm import DDPM, Diffusion
from fedcommons.generators.dp_training import ByDPSGD, Training, per_image, without_privacy
from fedcommons.generators.generator import Progress, Weights
from fedcommons.runtime import memory_limit
from fedcommons.seeding import set_default_generator


@dataclass(frozen=True)
class PrivateDDPM(ByDPSGD, Diffusion):
    """A DDPM, conditional on the class, trained by DP-SGD with Opacus' accountants."""

    sampling: ClassVar[tuple[str, ...]] = Diffusion.sampling

    @property
    def plain(self) -> DDPM:
        return without_privacy(self, Diffusion, DDPM)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check the shape as ``DDPM`` does, and that the gradients of a physical batch fit into memory."""
        self.plain.check_shape(shape, data)
        nbytes = 4 * self.physical_batch * sum(3 * 9 * n * n for n in self.channels)
        memory_limit.require("the gradients of a physical batch", nbytes, "generator.physical_batch")

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> Training:
        set_default_generator(seed, "initial weights")
        model = self.plain.build(shape, n_classes, seed, flip).to(default_device())
        model.on_fit_start()
        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        functions = per_image(model, self.draws)
        return Training(model, optimizer, *functions, model.generator, model.on_train_batch_end, model.averaged)

    def sample(
        self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """Draw one uint8 image per label, as the DDPM without privacy does."""
        return self.plain.sample(weights, shape, n_classes, labels, seed, progress)

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return each image's loss, (n,), for membership inference (see ``DDPM.losses``)."""
        return self.plain.losses(weights, examples, n_classes, seed)
