"""The classifier that clients train, and what the regressor shares; both train under a plain Lightning Trainer."""

from collections.abc import Iterable
from math import prod

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""Label of a position that has no label, such as a position after the end of a sequence."""


class Predictor(LightningModule):
    """A network with input normalisation and an optimizer with constant learning rate; subclasses define the loss.

    The module itself scales images x, uint8 (B, C, H, W), to [0, 1] and normalises them by ``mean`` and ``std`` per
    channel. Floating-point features and tokens (int64) stay unchanged. A batch is (x, y) or (x, y, weight); the weights
    multiply the examples' losses.

    inputs: name and shape of each input that x (B, D) contains; the network's ``forward`` gets them as arguments.
    """

    head = "network.last"  # the layer that maps the embedding to the logits or the prediction

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
        inputs: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> None:
        super().__init__()
        self.network, self.inputs = network, inputs
        self.lr, self.momentum, self.weight_decay, self.optimizer = lr, momentum, weight_decay, optimizer
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1), persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        """Return the network's input for images with pixels in 0..255: uint8 images or means of uint8 images."""
        return (x - self.mean) / self.std

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes) or predictions (B, k) for images, features or tokens x."""
        if self.inputs:
            columns = x.split([prod(shape) for _, shape in self.inputs], 1)
            named = zip(self.inputs, columns, strict=True)
            return self.network(**{name: column.reshape(len(x), *shape) for (name, shape), column in named})
        return self.network(self.normalise(x) if x.dtype == torch.uint8 else x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD or Adam with the module's learning rate ``lr``."""
        return optimizer_of(self.parameters(), self.optimizer, self.lr, self.momentum, self.weight_decay)


def by_example(values: Tensor, y: Tensor) -> Tensor:
    """Return the mean of ``values`` (B, ...) over each example's positions whose label y is not ``IGNORED``, (B,)."""
    has_label = (y != IGNORED).flatten(1)
    return (values.flatten(1) * has_label).sum(1) / has_label.sum(1).clamp(min=1)


class Classifier(Predictor):
    """A ``Predictor`` with cross-entropy loss; for labels per position y (B, ...), the logits are (B, classes, ...).

    Labels y may also be probabilities of the classes, floats (B, classes).
    """

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the mean (weighted) cross entropy of the batch."""
        x, y, *weight = batch
        if y.dim() > 1 and not y.is_floating_point():
            losses = by_example(F.cross_entropy(self(x), y, reduction="none"), y)
            return (weight[0] * losses if weight else losses).mean()
        if weight:
            return (weight[0] * F.cross_entropy(self(x), y, reduction="none")).mean()
        return F.cross_entropy(self(x), y)


def optimizer_of(
    parameters: Iterable[nn.Parameter], name: str, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return Adam, which ignores ``momentum``, if ``name`` is adam, and SGD otherwise."""
    if name == "adam":
        return torch.optim.Adam(parameters, lr, weight_decay=weight_decay)
    return torch.optim.SGD(parameters, lr, momentum=momentum, weight_decay=weight_decay)
