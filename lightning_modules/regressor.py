"""The regressor that clients train where labels are floats; the same module trains under a plain Lightning Trainer."""

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from lightning_modules.classifier import optimizer_of


class Regressor(LightningModule):
    """A network with input normalisation, mean squared error and an optimizer with constant learning rate.

        loss = mean over the batch of  w ||f(x) - y||^2 / k

    x: images or features, as in ``Classifier``. y: targets, (B,) or (B, k) float. f(x): predictions, (B, k). w: example
    weights, 1 if the batch has none. ``loss`` is the only evaluation metric.
    """

    head = "network.last"  # the layer that maps the embedding to the prediction

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: str = "sgd",
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
    ) -> None:
        super().__init__()
        self.network = network
        self.lr, self.momentum, self.weight_decay, self.optimizer = lr, momentum, weight_decay, optimizer
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1), persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        """Return the network's input for images with pixels in 0..255: uint8 images or means of uint8 images."""
        return (x - self.mean) / self.std

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions (B, k) for inputs x."""
        return self.network(self.normalise(x) if x.dtype == torch.uint8 else x)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the mean (weighted) squared error of the batch."""
        x, y, *weight = batch
        errors = (self(x) - y.view(len(y), -1)).square().mean(1)
        return (weight[0] * errors if weight else errors).mean()

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the mean (weighted) squared error of the batch."""
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD or Adam with the module's learning rate ``lr``."""
        return optimizer_of(self.parameters(), self.optimizer, self.lr, self.momentum, self.weight_decay)
