"""The network that makes images of noise for DENSE and Co-Boosting.

z (B, l) -> linear, to 2w maps of a quarter of the sides, BatchNorm -> twice [twice as large, convolution 3x3,
BatchNorm, LeakyReLU 0.2], to 2w and to w maps -> convolution 3x3, sigmoid: pixels in (0, 1).
l: ``latent``;  w: ``width``.
"""

from torch import Tensor, nn

SCALE = 0.02
"""Standard deviation of the first weights."""


class Upsampler(nn.Module):
    """Noise (B, latent) to images (B, C, H, W) in (0, 1) of any size; what is above H or W is cut off.

    With 256 numbers of noise, width 64 and 3x32x32 images it has the layers of the generator of DENSE's released code.
    There convolutions before BatchNorm have no bias, as here with ``norm_bias`` false, and BatchNorm's first scales are
    drawn from N(1, 0.02^2), not 1.
    """

    def __init__(self, shape: tuple[int, ...], latent: int, width: int, norm_bias: bool = True) -> None:
        super().__init__()
        channels, self.height, self.width = shape
        h, w = -(-self.height // 4), -(-self.width // 4)
        self.layers = nn.Sequential(
            nn.Linear(latent, 2 * width * h * w),
            nn.Unflatten(1, (2 * width, h, w)),
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=norm_bias),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=norm_bias),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )
        for layer in self.layers:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, SCALE)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)[..., : self.height, : self.width]
