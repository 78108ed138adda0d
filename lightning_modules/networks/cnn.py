"""A small convolutional network for images of any size."""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CNN(nn.Module):
    """Two convolutions (3x3, optional BatchNorm, ReLU, max-pool 2), a hidden layer with ReLU, a linear layer.

    Input: images (B, C, H, W).

    Args:
        channels: channels of the two convolutions
        hidden: width of the hidden layer
        batch_norm: whether BatchNorm follows each convolution
        norm_bias: whether convolutions before BatchNorm have biases, which have no effect but which Adam moves
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (16, 32),
        hidden: Annotated[int, "[1, 1e6]"] = 64,
        batch_norm: bool = False,
        norm_bias: bool = True,
    ) -> None:
        super().__init__()
        if not (norm_bias or batch_norm):
            raise ValueError("model.norm_bias false changes nothing without model.batch_norm true")
        if len(channels) != 2:
            raise ValueError(f"model.channels must be two positive numbers, got {list(channels)}")
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise ValueError(f"it needs images of at least 4x4, and examples are {shape}")
        c, h, w = shape
        self.conv1 = nn.Conv2d(c, channels[0], 3, padding=1, bias=norm_bias)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 3, padding=1, bias=norm_bias)
        self.norm1 = nn.BatchNorm2d(channels[0]) if batch_norm else nn.Identity()
        self.norm2 = nn.BatchNorm2d(channels[1]) if batch_norm else nn.Identity()
        self.hidden = nn.Linear(channels[1] * (h // 4) * (w // 4), hidden)
        self.last = nn.Linear(hidden, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        # ReLU follows the pooling: the result is that of ReLU before the pooling, with a quarter of the work.
        x = F.relu(F.max_pool2d(self.norm1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.norm2(self.conv2(x)), 2))
        return F.relu(self.hidden(torch.flatten(x, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
