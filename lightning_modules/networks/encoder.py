"""The base network of FedDPMS: the autoencoder ``lightning_modules.vae`` without its decoder."""

from typing import Annotated

from torch import Tensor, nn


def convolutions(channels_in: int, channels: tuple[int, ...], depth: int, batch_norm: bool = False) -> list[nn.Module]:
    """Return, for each entry of ``channels``, ``depth`` convolutions 3x3 with ReLU, and max-pool 2; last: Flatten.

    batch_norm: whether there is a BatchNorm after every convolution.
    """
    layers: list[nn.Module] = []
    for c in channels:
        for _ in range(depth):
            layers += [nn.Conv2d(channels_in, c, 3, padding=1), nn.ReLU()]
            layers += [nn.BatchNorm2d(c)] if batch_norm else []
            channels_in = c
        layers.append(nn.MaxPool2d(2))
    return [*layers, nn.Flatten()]


def smallest_maps(shape: tuple[int, ...], channels: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of the last pooling layer's output for images of ``shape``.

    Raises:
        ValueError: height or width of an image is no multiple of 2^len(channels).
    """
    halved = 2 ** len(channels)
    if len(shape) != 3 or not channels or shape[1] % halved or shape[2] % halved:
        raise ValueError(
            f"it halves an image {len(channels)} times (model.channels), so height and width must be multiples of "
            f"{halved}, and examples are {shape}"
        )
    return channels[-1], shape[1] // halved, shape[2] // halved


class Encoder(nn.Module):
    """``vae`` without decoder: convolutions (3x3, ReLU, max-pool 2), a linear layer to the code, one to the logits.

    FedDPMS (table 3) has ``latent=32`` for Fashion-MNIST, and ``latent=128, channels=(32, 64), depth=2`` for CIFAR.
    Input: images (B, C, H, W).

    Args:
        latent: l, length of a code
        channels: channels of the blocks of convolutions, each of which halves the image
        depth: convolutions in a block
        batch_norm: a BatchNorm after every convolution, as in the authors' released code
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        latent: Annotated[int, "[1, 1e6]"] = 32,
        channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (16, 32),
        depth: Annotated[int, "[1, 100]"] = 1,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        c, h, w = smallest_maps(shape, channels)
        self.encoder = nn.Sequential(*convolutions(shape[0], channels, depth, batch_norm))
        self.code = nn.Linear(c * h * w, latent)
        self.last = nn.Linear(latent, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.code(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
