"""Conditional variational autoencoder (Kingma and Welling, ICLR 2014, arXiv:1312.6114; Sohn et al., NeurIPS 2015).

x: an image with pixels in [0, 1];  y: its class;  z: its code, l numbers;  mu, v: mean and log-variance of q(z | x),
the encoder's distribution of the code;  g(z, y): logits of the decoded pixels;  x^ = sigmoid(g): the decoded image.

    loss = R(x, g(mu + e^(v/2) eps, y)) + beta KL,   KL = sum over l of (mu^2 + e^v - 1 - v) / 2,   eps ~ N(0, I)

R, the reconstruction loss, is summed over the pixels: their binary cross entropy, or their squared errors. A new image
is x^ of a code z whose coordinates are independent N(0, 1), truncated to [-w, w].

The networks are those of FedCVAE (Heinbaugh et al., ICLR 2023), whose encoder uses only the image; here their sizes are
options. If height or width is no multiple of 2^levels for ``levels`` convolutions, images are padded with zeros and
decoded images are cropped.

A bias in front of BatchNorm has no effect, as BatchNorm subtracts the mean, and its gradient is rounding noise. Adam
divides a gradient by its magnitude, so it moves such a bias by the learning rate in each step. ``norm_bias`` false
leaves these biases out.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.networks.convnet import padding


class Encoder(nn.Module):
    """Encoder of images (B, C, H, W) in [0, 1] to mean and log-variance (B, l) of their codes.

    channels: channels of the 4x4 convolutions, each of which halves the image. hidden: width of the linear layer after
    them. latent: l, length of a code. norm_bias: whether convolutions before BatchNorm have biases.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        channels: tuple[int, ...],
        hidden: int,
        latent: int,
        batch_norm: bool = False,
        norm_bias: bool = True,
    ) -> None:
        super().__init__()
        self.margin, (height, width) = padding(shape, len(channels))
        layers: list[nn.Module] = []
        for before, after in zip((shape[0], *channels), channels, strict=False):
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1, bias=norm_bias or not batch_norm)]
            layers += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
        self.smallest = height * width >> 2 * len(channels)  # number of pixels in a feature map of the last convolution
        size = channels[-1] * self.smallest
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, hidden), nn.Linear(hidden, 2 * latent))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.layers(F.pad(x, self.margin)).chunk(2, 1)
        return mean, log_variance


class Decoder(nn.Module):
    """Decoder of codes (B, l) and classes (B,) to pixel logits (B, C, H, W); channels: those of the encoder."""

    def __init__(
        self,
        shape: tuple[int, ...],
        n_classes: int,
        channels: tuple[int, ...],
        latent: int,
        batch_norm: bool = False,
        norm_bias: bool = True,
    ) -> None:
        super().__init__()
        (left, _, top, _), (height, width) = padding(shape, len(channels))
        self.rows, self.columns = slice(top, top + shape[1]), slice(left, left + shape[2])
        self.latent, self.n_classes = latent, n_classes
        smallest = channels[-1], height >> len(channels), width >> len(channels)
        size = smallest[0] * smallest[1] * smallest[2]
        layers: list[nn.Module] = [nn.Linear(latent + n_classes, size), nn.ReLU(), nn.Unflatten(1, smallest)]
        for before, after in zip(reversed(channels), reversed(channels[:-1]), strict=False):
            layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1, bias=norm_bias or not batch_norm)]
            layers += [nn.BatchNorm2d(after, eps=1e-3), nn.ReLU()] if batch_norm else [nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(channels[0], shape[0], 4, stride=2, padding=1))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        one_hot = (y[:, None] == torch.arange(self.n_classes, device=y.device)).to(z.dtype)
        return self.layers(torch.cat([z, one_hot], 1))[..., self.rows, self.columns]


class CVAE(nn.Module):
    """Encoder, decoder and their loss. All random numbers come from a generator seeded with ``seed``.

    beta: weight of the KL term. reconstruction: loss per pixel, ``cross_entropy`` or ``squares``. flip: whether to
    mirror images with probability 1/2. The other arguments are those of ``Encoder``.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        n_classes: int,
        channels: tuple[int, ...],
        hidden: int,
        latent: int,
        beta: float = 1.0,
        reconstruction: str = "cross_entropy",
        batch_norm: bool = False,
        norm_bias: bool = True,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(shape, channels, hidden, latent, batch_norm, norm_bias)
        self.decoder = Decoder(shape, n_classes, channels, latent, batch_norm, norm_bias)
        self.beta, self.reconstruction, self.flip = beta, reconstruction, flip
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, n: int) -> list[Tensor]:
        """Draw noise for the codes of n images, (n, l), and with ``flip`` whether to mirror each, (n, 1, 1, 1)."""
        draws = [torch.randn(n, self.decoder.latent, generator=self.generator)]
        if self.flip:
            draws.append(torch.rand(n, 1, 1, 1, generator=self.generator) < 0.5)
        device = next(self.parameters()).device
        return [part.to(device) for part in draws]

    def forward(self, images: Tensor, labels: Tensor, eps: Tensor, mirrored: Tensor | None = None) -> Tensor:
        """Return the mean loss of uint8 images with noise ``eps`` (B, l); mirrored: which images are mirrored."""
        return self.of_each(images, labels, eps, mirrored).mean()

    def of_each(self, images: Tensor, labels: Tensor, eps: Tensor, mirrored: Tensor | None = None) -> Tensor:
        """Return the loss of each uint8 image, (B,), with noise ``eps`` (B, l); mirrored: which images are mirrored."""
        x = images / 255
        if mirrored is not None:
            x = torch.where(mirrored, x.flip(-1), x)
        mean, log_variance = self.encoder(x)
        decoded = self.decoder(mean + (log_variance / 2).exp() * eps, labels)
        return reconstruction(decoded, x, self.reconstruction) + self.beta * divergence(mean, log_variance)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return KL(N(mu, e^v) || N(0, I)) of each row, (B,), for mean mu and log-variance v, each (B, l)."""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2


def reconstruction(decoded: Tensor, x: Tensor, kind: str) -> Tensor:
    """Return each image's reconstruction loss (``kind``: cross_entropy or squares), (B,), summed over the pixels of x.

    decoded: pixel logits.
    """
    if kind == "cross_entropy":
        of_pixels = F.binary_cross_entropy_with_logits(decoded, x, reduction="none")
    else:
        of_pixels = (decoded.sigmoid() - x).square()
    return of_pixels.flatten(1).sum(1)


def truncated_normal(n: int, latent: int, bound: float, generator: torch.Generator) -> Tensor:
    """Sample (n, latent) independent N(0, 1) numbers truncated to [-bound, bound], by the inverse CDF."""
    low = torch.special.ndtr(torch.tensor(-bound, dtype=torch.float64))
    uniform = torch.rand(n, latent, generator=generator, dtype=torch.float64)
    return torch.special.ndtri(low + (1 - 2 * low) * uniform).clamp(-bound, bound).float()


@torch.no_grad()
def decode(
    decoder: Decoder, z: Tensor, labels: Tensor, activation: Callable[[Tensor], Tensor] = torch.sigmoid,
    batch_size: int = 256,
) -> Tensor:  # fmt: skip
    """Return the images (n, C, H, W) of codes z and class labels, by the decoder in evaluation mode.

    activation: function from the decoder's results to pixels.
    """
    decoder.eval()
    device = next(decoder.parameters()).device
    batches = zip(z.to(device).split(batch_size), labels.to(device).split(batch_size), strict=True)
    return torch.cat([activation(decoder(*batch)) for batch in batches])
