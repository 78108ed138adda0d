"""A class-conditional variational autoencoder (Kingma and Welling, ICLR 2014; networks of FedCVAE, ICLR 2023).

``PrivateCVAE`` is trained by DP-SGD (Abadi et al., CCS 2016), so that its images are differentially private. Each
image's loss is averaged over ``draws`` random codes. The same noisy gradients train the encoder and the decoder (see
``dp_training.py``). It has no batch norm, because batch norm would make an image's gradient depend on other images.

Departs from FedCVAE: by default there is no batch norm, so that every image has a separate gradient. Images may have
any side. The loss of images with three channels is also the cross entropy of pixels, unless ``reconstruction`` is
``squares``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.dp_training import ByDPSGD, Training, per_image
from fedcommons.generators.generator import Progress, TrainedGenerator, Weights, build_module, require_images
from fedcommons.generators.training_loop import batch_of, loaded, state_of, train
from fedcommons.runtime import memory_limit
from fedcommons.seeding import generator, set_default_generator
from lightning_modules import cvae

COPIES = 4
"""Number of copies of the weights in memory: weights, gradient and Adam's two moments."""


@dataclass(frozen=True)
class Autoencoder:
    """The constants and the network of a CVAE with or without privacy. This is a base class, not a generator.

    sampling: names of the constants that only sampling uses.
    """

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """number of passes over the training images, the share generator.rho of the client's images"""
    batch_size: Annotated[int, "[1, 1e9]"] = 32
    """number of images per training step"""
    lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """learning rate of Adam"""
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (32, 32, 64, 64)
    """channels of the convolutions, each of which halves the image; the decoder mirrors them"""
    hidden: Annotated[int, "[1, 1e6]"] = 500
    """number of units of the encoder's linear layer"""
    latent: Annotated[int, "[1, 1e6]"] = 10
    """dimension of a code"""
    beta: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of the codes' KL divergence from N(0, I)"""
    reconstruction: Annotated[str, "cross_entropy | squares"] = "cross_entropy"
    """reconstruction loss, summed over pixels: binary cross_entropy, or squares of the errors"""
    truncate: Annotated[float, "[0.01, 100]"] = 3.0
    """w: codes of synthetic images are standard normal numbers truncated to [-w, w]"""

    sampling: ClassVar[tuple[str, ...]] = ("truncate",)

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """Check that the examples are uint8 images (see ``Generator``)."""
        require_images("cvae and private_cvae", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check that the convolutions fit the image's side and the network fits into memory (see ``Generator``)."""
        require_levels(self.channels, shape, data)
        least = sum(2 * 16 * a * b for a, b in zip(self.channels, self.channels[1:], strict=False))
        memory_limit.require("the generator", COPIES * 4 * (least + 4 * self.hidden), "generator.channels")

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one uint8 image per label (see ``Generator``)."""
        model = loaded(self.build(shape, n_classes, seed), weights)
        z = cvae.truncated_normal(len(labels), self.latent, self.truncate, generator(seed, "samples"))
        images = cvae.decode(model.decoder, z, labels)
        return (255 * images).round().to(torch.uint8).cpu()

    @torch.no_grad()
    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int, *, draws: int = 16) -> Tensor:
        """Return each image's loss, (n,), averaged over ``draws`` codes with equal noise, for membership inference."""
        model, device = loaded(self.build(tuple(examples.x.shape[1:]), n_classes, seed), weights), default_device()
        model.eval()
        noise = torch.randn(draws, 1, self.latent, generator=generator(seed, "losses")).to(device)
        columns = zip(examples.x.to(device).split(256), examples.y.to(device).split(256), strict=True)
        losses_of_parts = [torch.stack([model.of_each(x, y, eps) for eps in noise]).mean(0) for x, y in columns]
        return torch.cat(losses_of_parts).cpu()

    def build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False) -> cvae.CVAE:
        """Build the networks; ``seed`` decides their initial weights and all their later random draws."""
        set_default_generator(seed, "initial weights")
        return build_module(cvae.CVAE, self, shape, n_classes, seed, flip)


@dataclass(frozen=True)
class CVAE(Autoencoder):
    """A variational autoencoder whose decoder is conditional on the class."""

    batch_norm: bool = False
    """whether a BatchNorm follows each convolution, as in FedCVAE"""
    norm_bias: bool = True
    """whether layers have biases before BatchNorm; they have no effect, and Adam moves them by rounding noise"""
    even_batches: bool = False
    """split an epoch's images into batches of equal sizes, at most batch_size; otherwise the last batch may be smaller,
    but Adam takes an equally large step for it"""

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return the batch size that is used for a generator with n training images, as {"batch_size": number}."""
        return {"batch_size": min(n, batch_of(n, self.batch_size, self.even_batches))}

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check the shape as ``Autoencoder`` does, and that ``norm_bias`` has an effect (see ``Generator``)."""
        if not (self.norm_bias or self.batch_norm):
            raise UserError("generator.norm_bias false changes nothing without generator.batch_norm true.")
        super().check_shape(shape, data)

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """Train on a client's images (see ``Generator``). Fewer images than ``batch_size`` form one batch."""
        model = self.build(tuple(examples.x.shape[1:]), n_classes, seed, flip).to(default_device())
        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)

        def step(x: Tensor, y: Tensor) -> None:
            if self.batch_norm and len(y) * model.encoder.smallest == 1:  # BatchNorm needs two values per channel
                x, y = x.repeat(2, 1, 1, 1), y.repeat(2)
            loss = model(x, y, *model.draw(len(y)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        size = batch_of(len(examples), self.batch_size, self.even_batches)
        return train(step, partial(state_of, model), examples, size, epochs, seed, progress)


@dataclass(frozen=True)
class PrivateCVAE(ByDPSGD, Autoencoder):
    """A conditional variational autoencoder trained by DP-SGD."""

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> Training:
        model = self.build(shape, n_classes, seed, flip).to(default_device())
        optimizer = torch.optim.Adam(model.parameters(), self.lr, fused=True)
        functions = per_image(model, self.draws)
        return Training(model, optimizer, *functions, model.generator, lambda: None, partial(state_of, model))


def require_levels(channels: tuple[int, ...], shape: tuple[int, ...], data: str) -> None:
    """Check that an image of this ``shape`` can be halved once per entry of ``channels``.

    Raises:
        UserError: ``channels`` is empty, or 2^(number of entries) is larger than the image's smaller side.
    """
    side = min(shape[1:])
    if not channels or 2 ** len(channels) > side:
        raise UserError(
            f"generator.channels must have 1 to {side.bit_length() - 1} levels, as each halves the image and {data} "
            f"has a side of {side}, got {len(channels)}."
        )
