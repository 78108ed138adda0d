r"""A class for each pixel, and several labels for each image: two tasks of digits, with metrics of torchmetrics.

python examples/segmentation.py         trains a network that finds the ink of an image, for three rounds
python sweeps/run.py --data examples/segmentation.py:ink --model examples/segmentation.py:Pixels --partition iid
python sweeps/run.py --data examples/segmentation.py:traits --model examples/segmentation.py:Traits --partition iid
"""

from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torchmetrics.classification import MulticlassJaccardIndex, MultilabelF1Score

from fedcommons import experiment, run

QUICK = {"federation.rounds": 3, "client.epochs": 1, "measure.every": 0, "wandb": "off", "data.limit": None}


def ink() -> tuple[Any, Any]:
    """Return images with noise (n, 1, 8, 8) and, for each pixel, class 1 where the image without noise has ink."""
    images = load_digits().images / 16
    x = images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).numpy()
    return ((x - x.mean()) / x.std())[:, None].astype("float32"), (images > 0.5).astype("int64")


def traits() -> tuple[Any, Any]:
    """Return images (n, 1, 8, 8) and three labels of each digit (n, 3), 0 or 1: even, < 5, divisible by 3."""
    digits: Any = load_digits()
    x, y = digits.images, digits.target
    labels = np.stack([y % 2 == 0, y < 5, y % 3 == 0], axis=1)
    return ((x - x.mean()) / x.std())[:, None].astype("float32"), labels.astype("float32")


class Pixels(LightningModule):
    """Three convolutions with a class for each pixel; the metric is the mean intersection over union (IoU)."""

    def __init__(self, n_classes: int, lr: float) -> None:
        """Build the network."""
        super().__init__()
        self.lr, self.iou = lr, MulticlassJaccardIndex(n_classes)
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, n_classes, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, classes, 8, 8)."""
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean cross entropy over pixels."""
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the IoU; torchmetrics computes it over all test images."""
        self.iou(self(batch[0]), batch[1])
        self.log("iou", self.iou)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), self.lr)


class Traits(LightningModule):
    """A hidden layer and a logit for each of three labels; the metric is the macro F1 score."""

    def __init__(self, lr: float) -> None:
        """Build the network."""
        super().__init__()
        self.lr, self.f1 = lr, MultilabelF1Score(3)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, 3)."""
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean binary cross entropy over labels."""
        return binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the F1 score."""
        self.f1(self(batch[0]), batch[1].int())
        self.log("f1", self.f1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), self.lr)


if __name__ == "__main__":
    result = run(experiment("smoke", values=QUICK, data=ink(), partition="iid", model=f"{__file__}:Pixels", lr=0.2))
    print("IoU by round:", *result.rounds["test/iou"].round(2))
