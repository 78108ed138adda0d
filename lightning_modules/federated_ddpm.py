"""A diffusion model for federated training: the model of ``ddpm.py``, with torch's default random generator."""

from typing import Annotated

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from lightning_modules.classifier import optimizer_of


class FederatedDDPM(LightningModule):
    """The class-conditional U-Net of ``DDPM`` and its loss, with times and noise from torch's default generator.

    The engine seeds torch's generator by round and client; DDPM's own generator would continue from client to client.
    There is no moving average of the weights, as every round starts from the server's weights. ``ddpm.sample`` uses the
    current weights.

    Args:
        channels: channels of the U-Net's levels, multiples of 8; each level halves the image
        timesteps: T, number of diffusion steps in training
        schedule: schedule of the noise variance: linear (Ho et al.) or squaredcos_cap_v2 (cosine)
        prediction: what the network predicts: epsilon (the noise), sample (the image) or v_prediction (v)
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        lr: float,
        momentum: float,
        weight_decay: float,
        optimizer: str,
        channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (16, 32),
        timesteps: Annotated[int, "[1, 1e6]"] = 1000,
        schedule: Annotated[str, "linear | squaredcos_cap_v2"] = "squaredcos_cap_v2",
        prediction: Annotated[str, "epsilon | v_prediction | sample"] = "epsilon",
    ) -> None:
        super().__init__()
        from lightning_modules.ddpm import DDPM  # imported only here, as importing diffusers takes seconds

        self.ddpm = DDPM(
            shape=shape,
            n_classes=n_classes,
            channels=channels,
            lr=lr,
            timesteps=timesteps,
            schedule=schedule,
            prediction=prediction,
        )
        self.timesteps, self.lr, self.momentum = timesteps, lr, momentum
        self.weight_decay, self.optimizer = weight_decay, optimizer

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Return the network's prediction at time 0 for images (B, C, H, W) in 0..255 of classes y (default: 0)."""
        labels = torch.zeros(len(x), dtype=torch.long, device=x.device) if y is None else y
        return self.ddpm.unet(x / 127.5 - 1, 0, class_labels=labels).sample

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error of the prediction, with a random time and noise per image."""
        x, y = batch
        t = torch.randint(self.timesteps, (len(x),), device=x.device)
        return self.ddpm(x, y, t, torch.randn(x.shape, device=x.device))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the training loss of the batch as ``loss``."""
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD or Adam with the module's learning rate ``lr``."""
        return optimizer_of(self.parameters(), self.optimizer, self.lr, self.momentum, self.weight_decay)
