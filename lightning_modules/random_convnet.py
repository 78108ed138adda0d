"""Image features of a random, untrained ConvNet after differentiable augmentation, as in dataset condensation."""

from torch import Tensor, nn

from lightning_modules.gan import augmented
from lightning_modules.networks.convnet import ConvNet

LAYERS = 4
"""Number of layers per block of ``ConvNet``: convolution, instance norm, ReLU, average-pool."""


class RandomConvNet(nn.Module):
    """The first ``depth`` blocks of ``ConvNet``, with ``width`` channels, random weights and augmentation of images."""

    def __init__(self, shape: tuple[int, ...], width: int, depth: int, augment: str, flip: bool) -> None:
        super().__init__()
        self.network = ConvNet(shape, 1, width).requires_grad_(False)
        self.network.features = self.network.features[: LAYERS * depth]
        self.augment, self.flip = augment, flip

    def forward(self, x: Tensor, uniforms: Tensor) -> Tensor:
        """Return features (n, D) of images (n, C, H, W) in [-1, 1]; uniforms: augmentation's random numbers, (n, 8)."""
        if self.augment != "none":
            x = augmented(x, uniforms, self.augment, self.flip)
        return self.network.embed(x)


def blocks(shape: tuple[int, ...]) -> int:
    """Return the number of blocks, 1 to 3, that reduce images of ``shape`` (C, H, W) to maps of about 4x4 pixels."""
    return min(3, max(1, (min(shape[1:]) + 7).bit_length() - 3))
