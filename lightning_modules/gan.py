"""Class-conditional GAN (Goodfellow et al., NeurIPS 2014) with differentiable augmentation (Zhao et al., NeurIPS 2020).

G: generator of images in [-1, 1];  D: discriminator, a logit;  T: random augmentation, sampled for every image;
x: a real image;  y: its class;  z: l numbers from N(0, I);  W: weight matrix of a layer, with largest singular value
sigma(W);  gamma: weight of the gradient penalty.

    D minimises softplus(-D(T x, y)) + softplus(D(T G(z, y), y)) + gamma/2 ||grad_x D(T x, y)||^2
    G minimises softplus(-D(T G(z, y), y))

D is a projection discriminator (Miyato and Koyama, ICLR 2018), D(x, y) = (w + e_y) . f(x) + b, with features f(x),
class embedding e_y, and trained w and b. With the regulariser ``spectral`` (Miyato et al., ICLR 2018) its layers use
W/sigma(W), and gamma is 0. With ``r1`` (Mescheder et al., ICML 2018) its layers use W. G is the decoder of ``cvae.py``
with BatchNorm, followed by tanh.

D processes each image separately: it has no BatchNorm, and the power iteration for sigma(W) is a separate step,
``iterate``. So the gradient of one image does not depend on other images.
"""

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional as F

from lightning_modules.cvae import Decoder
from lightning_modules.networks.convnet import padding

SHIFT, HOLE = 8, 2
"""Divisors of height and width (Zhao et al.): images shift by up to 1/8, and the cutout square has sides of 1/2."""


class Normed(nn.Module):
    """A layer with weights W/sigma(W); power iteration for u and v estimates the norm sigma(W) = u^T W v."""

    u: Tensor
    v: Tensor

    def __init__(self, layer: nn.Conv2d | nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.layer = layer
        rows, columns = layer.weight.flatten(1).shape
        self.register_buffer("u", F.normalize(torch.randn(rows), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(columns), dim=0))

    @property
    def weight(self) -> Tensor:
        """Return W/sigma(W); its derivative includes that of sigma(W) (Miyato et al., equation 12)."""
        w = self.layer.weight
        return w / (self.u @ w.flatten(1) @ self.v)

    @torch.no_grad()
    def iterate(self, steps: int) -> None:
        """Run ``steps`` steps of the power iteration, which improve the estimate of sigma(W)."""
        matrix = self.layer.weight.flatten(1)
        for _ in range(steps):
            self.v.copy_(F.normalize(matrix.T @ self.u, dim=0))
            self.u.copy_(F.normalize(matrix @ self.v, dim=0))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Conv2d):
            return F.conv2d(x, self.weight, self.layer.bias, self.layer.stride, self.layer.padding)
        if isinstance(self.layer, nn.Embedding):
            return F.embedding(x, self.weight)
        return F.linear(x, self.weight, self.layer.bias)


class Discriminator(nn.Module):
    """Discriminator from images (B, C, H, W) in [-1, 1] and classes (B,) to logits (B,).

    channels: channels of the convolutions, which halve the image. spectral: whether weights are normalised.
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, channels: tuple[int, ...], spectral: bool) -> None:
        super().__init__()
        self.margin, (height, width) = padding(shape, len(channels))
        layers: list[nn.Module] = []
        for before, after in zip((shape[0], *channels), channels, strict=False):
            conv = nn.Conv2d(before, after, 4, stride=2, padding=1)
            layers += [Normed(conv) if spectral else conv, nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        size = channels[-1] * (height * width >> 2 * len(channels))
        last, classes = nn.Linear(size, 1), nn.Embedding(n_classes, size)
        nn.init.normal_(classes.weight, std=size**-0.5)
        self.last, self.classes = (Normed(last), Normed(classes)) if spectral else (last, classes)
        self.iterate(20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.features(F.pad(x, self.margin))
        return self.last(features).squeeze(1) + (self.classes(y) * features).sum(1)

    def iterate(self, steps: int = 1) -> None:
        """Update the estimated singular values after the weights have changed; no effect without ``spectral``."""
        for layer in self.modules():
            if isinstance(layer, Normed):
                layer.iterate(steps)


class GAN(nn.Module):
    """Generator, discriminator and their losses. All random numbers come from a generator seeded with ``seed``.

    latent: l, length of a code. regulariser: ``spectral``, or ``r1`` with weight ``gamma``. augment: ``none``,
    ``translation``, or ``all``, which is colour, translation and cutout. norm_bias: whether the generator has biases
    before BatchNorm. flip: whether the augmentation also mirrors images.
    """

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        n_classes: int,
        channels: tuple[int, ...],
        latent: int,
        regulariser: str = "spectral",
        gamma: float = 1.0,
        augment: str = "translation",
        norm_bias: bool = True,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.generator = Decoder(shape, n_classes, channels, latent, batch_norm=True, norm_bias=norm_bias)
        self.discriminator = Discriminator(shape, n_classes, channels, regulariser == "spectral")
        self.gamma = gamma if regulariser == "r1" else 0.0
        self.augment, self.flip = augment, flip
        self.draws = torch.Generator().manual_seed(seed)

    def codes(self, n: int) -> Tensor:
        """Sample codes z ~ N(0, I) for n new images, (n, l)."""
        return torch.randn(n, self.generator.latent, generator=self.draws).to(next(self.parameters()).device)

    def images(self, y: Tensor, z: Tensor | None = None) -> Tensor:
        """Generate images (B, C, H, W) in [-1, 1] of the classes y (B,); z: codes (B, l); None: new random codes."""
        return self.generator(self.codes(len(y)) if z is None else z, y).tanh()

    def draw(self, n: int) -> Tensor:
        """Draw the augmentation's random numbers for n images: (n, 8), uniform in [0, 1)."""
        return torch.rand(n, 8, generator=self.draws).to(next(self.parameters()).device)

    def judged(self, x: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        """Return the discriminator's logits (B,) of images x in [-1, 1] after augmentation; uniforms: see ``draw``."""
        return self.discriminator(augmented(x, uniforms, self.augment, self.flip), y)

    def forward(
        self, images: Tensor, y: Tensor, fakes: Tensor, of_fakes: Tensor, for_images: Tensor, for_fakes: Tensor
    ) -> Tensor:
        """Return the discriminator's mean loss on uint8 images with classes y and on generated images ``fakes``.

        of_fakes: classes of the fakes. for_images, for_fakes: the augmentation's random numbers for images and fakes.
        """
        x = augmented(images / 127.5 - 1, for_images, self.augment, self.flip)
        loss = F.softplus(-self.discriminator(x, y)).mean()
        loss = loss + F.softplus(self.judged(fakes, of_fakes, for_fakes)).mean()
        return loss + self.gamma / 2 * slopes(self.discriminator, x, y).mean() if self.gamma else loss

    def of_generator(self, y: Tensor) -> Tensor:
        """Return the generator's mean loss on new images of the classes y (B,)."""
        return F.softplus(-self.judged(self.images(y), y, self.draw(len(y)))).mean()


def slopes(discriminator: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return per image ||grad_x D(x, y)||^2, (B,); the discriminator D must process each image separately."""
    return grad(lambda x: discriminator(x, y).sum())(x).square().flatten(1).sum(1)


def augmented(x: Tensor, uniforms: Tensor, kind: str, flip: bool = False) -> Tensor:
    """Return augmented images, differentiable in x; x: (B, C, H, W) in [-1, 1]; uniforms: (B, 8), uniform in [0, 1).

    The augmentation of Zhao et al. (``all``) has five operations. Brightness: b + x, b in [-1/2, 1/2]. Saturation: the
    distance to the mean over channels times a factor in [0, 2]. Contrast: the distance to the image's mean times a
    factor in [1/2, 3/2]. Translation: a shift by up to 1/8 of height and width, filled with zeros. Cutout: a square of
    half the height and width set to zero.
    """
    u = uniforms[:, :, None, None, None].unbind(1)  # eight tensors (B, 1, 1, 1)
    if flip:
        x = torch.where(u[7] < 0.5, x.flip(-1), x)
    if kind == "all":
        x = x + u[0] - 0.5
        x = _stretched(x, x.mean(1, keepdim=True), 2 * u[1])
        x = _stretched(x, x.mean((1, 2, 3), keepdim=True), u[2] + 0.5)
    if kind in ("translation", "all"):
        x = _moved(x, u[3], 2)
        x = _moved(x, u[4], 3)
    if kind == "all":
        x = torch.where(_covered(x, u[5], 2) & _covered(x, u[6], 3), 0.0, x)
    return x


def _stretched(x: Tensor, mean: Tensor, by: Tensor) -> Tensor:
    return (x - mean) * by + mean


def _moved(x: Tensor, u: Tensor, axis: int) -> Tensor:
    """Shift images along an axis by a whole number of pixels, uniform in -m..m; m: 1/8 of the axis' length."""
    side = x.shape[axis]
    most = (side + SHIFT // 2) // SHIFT
    places = _places(x, axis) - (u * (2 * most + 1)).floor().long() + most
    shifted = torch.take_along_dim(x, places.clamp(0, side - 1).expand_as(x), axis)
    return torch.where((places >= 0) & (places < side), shifted, 0.0)


def _covered(x: Tensor, u: Tensor, axis: int) -> Tensor:
    """Return whether each pixel index along the axis lies in the cutout square, whose place the uniform u decides."""
    side = x.shape[axis]
    first = (u * (side + 1)).floor() - side // HOLE // 2 - 0.5
    places = _places(x, axis)
    return (places > first) & (places < first + side // HOLE)


def _places(x: Tensor, axis: int) -> Tensor:
    """Return the pixel indices 0, 1, ... along an axis, with shape (1, 1, H, 1) or (1, 1, 1, W)."""
    return torch.arange(x.shape[axis], device=x.device).view([-1 if a == axis else 1 for a in range(4)])
