"""A small convolutional network for images of any size."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Module):
    """Two convolutions (3x3, BatchNorm if asked for, ReLU, max-pool 2), a hidden layer, a linear layer.

    x: (B, C, H, W).
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        channels: tuple[int, ...] = (16, 32),
        hidden: int = 64,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        c, h, w = shape
        self.conv1 = nn.Conv2d(c, channels[0], 3, padding=1)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 3, padding=1)
        self.norm1 = nn.BatchNorm2d(channels[0]) if batch_norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(channels[1]) if batch_norm else nn.Identity()
        self.hidden = nn.Linear(channels[1] * (h // 4) * (w // 4), hidden)
        self.last = nn.Linear(hidden, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        # pooling first: the same numbers as after ReLU, which then has a quarter of the work
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        return F.relu(self.hidden(torch.flatten(x, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
