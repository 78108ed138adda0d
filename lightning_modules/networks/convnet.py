"""ConvNet: the network of FedDM (arXiv:2207.09653, section 4.1) and of dataset condensation.

Gidaris and Komodakis, CVPR 2018, arXiv:1804.09458; with instance norm as in Zhao et al., ICLR 2021, arXiv:2006.05929.
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = 3


class ConvNet(nn.Module):
    """Three times [convolution 3x3, instance norm, ReLU, average-pool 2], then a linear layer.

    Input: images (B, C, H, W). 317,706 parameters for MNIST, 320,010 for CIFAR-10, 504,420 for CIFAR-100.

    Height and width are padded with zeros to a multiple of 8, so 28 becomes 32. An 8x8 image becomes 1x1, one number
    per channel. Below 8x8 there is one block per possible halving, because instance norm of a single pixel is zero.

    Args:
        width: channels of every convolution
        norm_bias: whether convolutions have biases, which have no effect before instance norm but which Adam moves
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        width: Annotated[int, "[1, 1e6]"] = 128,
        norm_bias: bool = True,
    ) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 2:
            raise ValueError(f"it needs images of at least 2x2, and examples are {shape}")
        channels = shape[0]
        self.blocks = min(BLOCKS, min(shape[1:]).bit_length() - 1)
        _, padded = padding(shape, self.blocks)
        layers: list[nn.Module] = []
        for _ in range(self.blocks):
            norm = nn.GroupNorm(width, width)  # One group per channel is instance norm.
            layers += [nn.Conv2d(channels, width, 3, padding=1, bias=norm_bias), norm, nn.ReLU(), nn.AvgPool2d(2)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.last = nn.Linear(width * (padded[0] * padded[1] >> 2 * self.blocks), n_classes)

    def embed(self, x: Tensor) -> Tensor:
        margin, _ = padding(x.shape[1:], self.blocks)
        return torch.flatten(self.features(F.pad(x, margin)), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))


def padding(shape: tuple[int, ...], levels: int) -> tuple[tuple[int, int, int, int], tuple[int, int]]:
    """Return zeros to add at left, right, top and bottom, and the padded height and width, multiples of 2^levels.

    If the height (width) needs an odd number of zeros, bottom (right) gets one more than top (left).
    """
    height, width = (-side % 2**levels for side in shape[1:])
    margin = width // 2, width - width // 2, height // 2, height - height // 2
    return margin, (shape[1] + height, shape[2] + width)
