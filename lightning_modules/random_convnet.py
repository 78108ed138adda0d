"""Features of images by a ConvNet that nobody trains, after differentiable augmentation, as in dataset condensation."""

from torch import Tensor, nn

from lightning_modules.gan import augmented
from lightning_modules.networks.convnet import ConvNet

LAYERS = 4
"""Of a block: convolution, instance norm, ReLU, average-pool."""


class RandomConvNet(nn.Module):
    """The first ``depth`` blocks of ``ConvNet``, as torch initialises it; augment, flip: see ``gan.augmented``."""

    def __init__(self, shape: tuple[int, ...], width: int, depth: int, augment: str, flip: bool) -> None:
        super().__init__()
        self.network = ConvNet(shape, 1, width).requires_grad_(False)
        self.network.features = self.network.features[: LAYERS * depth]
        self.augment, self.flip = augment, flip

    def forward(self, x: Tensor, drawn: Tensor) -> Tensor:
        """(n, D) of images (n, C, H, W) in [-1, 1]; drawn: (n, 8), uniform in [0, 1), of the augmentation."""
        if self.augment != "none":
            x = augmented(x, drawn, self.augment, self.flip)
        return self.network.embed(x)


def blocks(shape: tuple[int, ...]) -> int:
    """After so many images of this shape, padded by ``ConvNet``, have 4x4 places or a few more; at most three."""
    return min(3, max(1, (min(shape[1:]) + 7).bit_length() - 3))
