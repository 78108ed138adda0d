"""A variational autoencoder that classifies images by their codes: the model of FedVAE and FedDPMS.

"Federated learning in non-iid settings aided by differentially private synthetic data" (FedDPMS), 2022, section 3.2 and
table 4; Kingma and Welling, ICLR 2014, arXiv:1312.6114.

x: an image with pixels in [0, 1];  y: its class;  mu, v: mean and log-variance of its code;  z: the code, drawn from
N(mu, e^v) in training, mu in evaluation;  F(z): logits;  x^: the image decoded from z;  CE: cross entropy;  lambda:
``trade_off``;  l: ``latent``, length of a code.
With ``normalise`` the encoder's input is (x - m) / s, with the data set's mean m and standard deviation s, as for other
models; decoder and reconstruction stay in [0, 1].

    loss = CE(F(z), y) + lambda (KL + MSE),   MSE = ||x^ - x||^2,   KL = mean over l numbers of (mu^2 + e^v - 1 - v)/2

The paper does not say which terms are sums and which are means. Here they are as in the authors' code. That code
replaces the MSE by a cross entropy of the pixels (``reconstruction``). It classifies the encoder's features instead of
z (``classify``), by two linear layers with l numbers between them.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.classifier import optimizer_of
from lightning_modules.networks.encoder import convolutions, smallest_maps


class VAEClassifier(LightningModule):
    """Encoder, decoder and classifier, with their joint loss (``training_step``) and the ``cross_entropy`` alone.

    encoder: module from images (B, C, H, W) to (B, features). decoder: module from codes (B, l) to images in [0, 1].
    latent: l, length of a code. trade_off: weight of the autoencoder's loss. classify: the classifier's input, ``code``
    or ``features``. reconstruction: ``squares`` or ``cross_entropy``. normalised: mean and standard deviation of each
    channel, by which the encoder normalises images in [0, 1]; None: no normalisation.
    """

    head = "classifier"  # the layer that maps the code to the logits

    centre: Tensor
    spread: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        features: int,
        latent: int,
        n_classes: int,
        *,
        trade_off: float,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        optimizer: str = "adam",
        classify: str = "code",
        reconstruction: str = "squares",
        normalised: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.mean, self.log_variance = nn.Linear(features, latent), nn.Linear(features, latent)
        last = nn.Linear(latent, n_classes)
        self.classifier = nn.Sequential(nn.Linear(features, latent), last) if classify == "features" else last
        self.decoder = decoder
        self.trade_off, self.classify, self.reconstruction = trade_off, classify, reconstruction
        self.lr, self.momentum, self.weight_decay, self.optimizer = lr, momentum, weight_decay, optimizer
        self.normalised = normalised is not None
        for name, values in zip(("centre", "spread"), normalised or ((0.0,), (1.0,)), strict=True):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        """Return the module's input, in [0, 1], for images with pixels in 0..255."""
        return x / 255

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance, each (B, l), of the codes of images x: uint8, or floating-point in [0, 1]."""
        return self._moments(self._features(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes) of images x: uint8, or floating-point in [0, 1]."""
        features = self._features(x)
        return self.classifier(features if self.classify == "features" else self._code(*self._moments(features)))

    def cross_entropy(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the mean (weighted) cross entropy of the batch: the loss without the autoencoder's terms."""
        x, y, *weight = batch
        return _mean(F.cross_entropy(self(x), y, reduction="none"), weight)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the batch's mean (weighted) joint loss: cross entropy plus ``trade_off`` times the autoencoder's."""
        x, y, *weight = batch
        images = self.normalise(x) if x.dtype == torch.uint8 else x
        features = self._features(images)
        mean, log_variance = self._moments(features)
        z = self._code(mean, log_variance)
        logits = self.classifier(features if self.classify == "features" else z)
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).mean(1) / 2
        autoencoder_loss = (kl + self._reconstruction(self.decoder(z), images)) * self.trade_off
        return _mean(F.cross_entropy(logits, y, reduction="none") + autoencoder_loss, weight)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD or Adam with the module's learning rate ``lr``."""
        return optimizer_of(self.parameters(), self.optimizer, self.lr, self.momentum, self.weight_decay)

    def _features(self, x: Tensor) -> Tensor:
        images = self.normalise(x) if x.dtype == torch.uint8 else x
        return self.encoder((images - self.centre) / self.spread if self.normalised else images)

    def _moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(features), self.log_variance(features)

    def _reconstruction(self, decoded: Tensor, images: Tensor) -> Tensor:
        """Return the reconstruction error of each image, (B,), summed over the pixels."""
        if self.reconstruction == "cross_entropy":
            return F.binary_cross_entropy(decoded, images, reduction="none").flatten(1).sum(1)
        return (decoded - images).square().flatten(1).sum(1)

    def _code(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean


def _mean(each: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return (weight[0] * each if weight else each).mean()


def vae(
    shape: tuple[int, ...],
    n_classes: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    optimizer: str,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
    latent: Annotated[int, "[1, 1e6]"] = 32,
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (16, 32),
    depth: Annotated[int, "[1, 100]"] = 1,
    trade_off: Annotated[float, "[0, 1e38]"] = 0.05,
    batch_norm: bool = False,
    classify: Annotated[str, "code | features"] = "code",
    reconstruction: Annotated[str, "squares | cross_entropy"] = "squares",
    normalise: bool = False,
) -> VAEClassifier:
    """The model of FedVAE and FedDPMS: convolutions as in ``Encoder``, and a symmetric decoder.

    Args:
        latent: l, length of a code (paper: 32 for Fashion-MNIST, 128 for CIFAR)
        channels: channels of the blocks of convolutions, each of which halves the image (paper: 16,32; 32,64)
        depth: convolutions in a block (paper: 1 for Fashion-MNIST, 2 for CIFAR)
        trade_off: lambda, weight of the autoencoder's loss in the sum with the classifier's loss
        batch_norm: BatchNorm after every convolution except the decoder's last (authors' code; paper: none)
        classify: the classifier's input: the code (paper), or the encoder's features (authors' code)
        reconstruction: loss per pixel: squares of the errors (paper), or cross_entropy (authors' code)
        normalise: normalise the encoder's input by the data set's mean and standard deviation, as other models do
    """
    c, h, w = smallest_maps(shape, channels)
    layers: list[nn.Module] = [nn.Linear(latent, c * h * w), nn.ReLU(), nn.Unflatten(1, (c, h, w))]
    for out in [*reversed(channels[:-1]), shape[0]]:
        layers.append(nn.Upsample(scale_factor=2))
        for inner in [c] * (depth - 1) + [out]:
            layers += [nn.ConvTranspose2d(c, inner, 3, padding=1), nn.ReLU()]
            layers += [nn.BatchNorm2d(inner)] if batch_norm else []
        c = out
    layers[-2 if batch_norm else -1 :] = [nn.Sigmoid()]
    encoder = nn.Sequential(*convolutions(shape[0], channels, depth, batch_norm))
    return VAEClassifier(
        encoder, nn.Sequential(*layers), channels[-1] * h * w, latent, n_classes,
        trade_off=trade_off, lr=lr, momentum=momentum, weight_decay=weight_decay, optimizer=optimizer,
        classify=classify, reconstruction=reconstruction, normalised=(mean, std) if normalise else None,
    )  # fmt: skip
