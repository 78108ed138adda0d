"""The variational autoencoder of ``cvae.py`` trained by DP-SGD, so that its images are differentially private.

Each image's loss is averaged over ``draws`` random codes. The same noisy gradients train the encoder and the decoder
(see ``dp_training.py``). DP-SGD on a VAE is that of Abadi et al. (CCS 2016). There is no batch norm, because it would
make an image's gradient depend on other images.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.cvae import CVAE, Autoencoder
from fedcommons.generators.dp_training import ByDPSGD
from fedcommons.generators.generator import Progress, TrainedGenerator, Weights, state_of
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.privacy.noise import Noise


@dataclass(frozen=True)
class PrivateCVAE(ByDPSGD, Autoencoder):
    """A conditional variational autoencoder trained by DP-SGD."""

    sampling: ClassVar[tuple[str, ...]] = Autoencoder.sampling

    @property
    def plain(self) -> CVAE:
        """Return the CVAE with the same network and training constants, but without privacy."""
        return CVAE(**{field.name: getattr(self, field.name) for field in fields(Autoencoder)})

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
        model = self.plain.build(tuple(examples.x.shape[1:]), n_classes, seed, flip).to(default_device())

        def loss(named: dict[str, Tensor], image: Tensor, label: Tensor, *noises: Tensor) -> Tensor:
            rows = image.expand(self.draws, *image.shape), label.expand(self.draws)
            return functional_call(model, named, (*rows, *noises))

        def draw(images: int, rows: dp_sgd_vmap.Rows) -> list[Tensor]:
            return [part.unflatten(0, (images, self.draws))[rows] for part in model.draw(images * self.draws)]

        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        return self.train(
            model, optimizer, loss, draw, examples, epochs, noise,
            draws=model.generator, after=lambda: None, weights=lambda: state_of(model), progress=progress,
        )  # fmt: skip

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one uint8 image per label, as the CVAE without privacy does."""
        return self.plain.sample(weights, shape, n_classes, labels, seed)

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return each image's loss, (n,), for membership inference (see ``CVAE.losses``)."""
        return self.plain.losses(weights, examples, n_classes, seed)
