"""The variational autoencoder of ``cvae.py`` trained by DP-SGD, so that its images are differentially private.

Each image's loss is averaged over ``draws`` random codes. The same noisy gradients train the encoder and the decoder
(see ``dp_training.py``). DP-SGD is that of Abadi et al. (CCS 2016). There is no batch norm, because it would
make an image's gradient depend on other images.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.cvae import CVAE, Autoencoder
from fedcommons.generators.dp_training import ByDPSGD, Training, per_image, without_privacy
from fedcommons.generators.generator import Weights, state_of


@dataclass(frozen=True)
class PrivateCVAE(ByDPSGD, Autoencoder):
    """A conditional variational autoencoder trained by DP-SGD."""

    sampling: ClassVar[tuple[str, ...]] = Autoencoder.sampling

    @property
    def plain(self) -> CVAE:
        return without_privacy(self, Autoencoder, CVAE)

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> Training:
        model = self.plain.build(shape, n_classes, seed, flip).to(default_device())
        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        return Training(
            model, optimizer, *per_image(model, self.draws), model.generator, lambda: None, lambda: state_of(model)
        )

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one uint8 image per label, as the CVAE without privacy does."""
        return self.plain.sample(weights, shape, n_classes, labels, seed)

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return each image's loss, (n,), for membership inference (see ``CVAE.losses``)."""
        return self.plain.losses(weights, examples, n_classes, seed)
