"""A class-conditional GAN with differentiable augmentation, our version of the GAN of Fedssyn's figure 4 (c).

The discriminator D is a small projection discriminator, regularised by spectral norm or by R1. The generator G is
convolutional with batch norm. Adam trains both networks on the logistic loss. Images are drawn from a moving average of
G's weights (see ``lightning_modules/gan.py``). The GAN is meant for few images. It is not state of the art.

Fedssyn states "a conditional GAN with differentiable augmentation", but not the networks, the loss, the regulariser,
the augmentations, the number of steps and the learning rates. These choices are ours. Many of them are constants below.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.cvae import require_levels
from fedcommons.generators.generator import Progress, Receipt, TrainedGenerator, Weights, require_images, state_of
from fedcommons.generators.training_loop import batch_of, batches
from fedcommons.runtime import memory_limit
from fedcommons.seeding import generator, seed_for, set_default_generator
from lightning_modules import gan

COPIES = 9
"""Number of copies of the weights in memory: two networks, their gradients, Adam's moments and the moving average."""


@dataclass(frozen=True)
class Adversarial:
    """The constants of a GAN with or without privacy. This is a base class, not a generator.

    sampling: names of the constants that only sampling uses (none).
    """

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """number of passes over the training images, the share generator.rho of the client's images"""
    batch_size: Annotated[int, "[1, 1e9]"] = 64
    """number of images per training step"""
    lr: Annotated[float, "(0, 1e38]"] = 5e-4
    """learning rate of Adam for both networks"""
    momentum: Annotated[float, "[0, 1)"] = 0.0
    """beta_1 of Adam (beta_2 is always 0.99)"""
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (64, 128, 256)
    """channels of the discriminator's convolutions, each of which halves the image; the generator mirrors them"""
    latent: Annotated[int, "[1, 1e6]"] = 64
    """number of standard normal variables from which the generator computes an image"""
    regulariser: Annotated[str, "spectral | r1"] = "spectral"
    """regulariser of the discriminator: spectral norm of its layers, or r1, the squared gradient norm at real images"""
    gamma: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of the regulariser r1"""
    augment: Annotated[str, "none | translation | all"] = "all"
    """augmentation of real and synthetic images before the discriminator; all: colour, translation and cutout"""
    ema_decay: Annotated[float, "[0, 1)"] = 0.99
    """final decay of the moving average of the generator's weights, which is reached after a warm-up"""
    norm_bias: bool = True
    """whether the generator has biases before BatchNorm; they have no effect, and Adam moves them by rounding noise"""

    sampling: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class GAN(Adversarial):
    """A GAN with differentiable augmentation (Zhao et al. 2020), conditional on the class."""

    even_batches: bool = False
    """split an epoch's images into batches of equal sizes, at most batch_size; otherwise the last batch may be smaller,
    but Adam takes an equally large step for it"""

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return the batch size that is used for a generator with n training images, as {"batch_size": number}."""
        return {"batch_size": min(n, batch_of(n, self.batch_size, self.even_batches))}

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """Check that the examples are uint8 images (see ``Generator``)."""
        require_images("gan and private_gan", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check that the convolutions fit the image's side and the networks fit into memory (see ``Generator``)."""
        require_levels(self.channels, shape, data)
        least = sum(16 * a * b for a, b in zip(self.channels, self.channels[1:], strict=False))
        memory_limit.require("the generator", COPIES * 4 * least, "generator.channels")

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """Train on a client's images (see ``Generator``). Fewer images than ``batch_size`` form one batch."""
        course = Course(self, self.build(tuple(examples.x.shape[1:]), n_classes, seed, flip))
        size, generators = batch_of(len(examples), self.batch_size, self.even_batches), dict[int, TrainedGenerator]()
        for epoch, x, y in batches(examples, size, max(epochs), seed, default_device(), progress):
            course.discriminator_step(x, y)
            course.generator_step(y)
            if epoch in epochs:
                generators[epoch] = TrainedGenerator(course.averaged(), Receipt())  # Receipt(): no privacy guarantee
        return generators

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one uint8 image per label (see ``Generator``)."""
        network = self.build(shape, n_classes, seed).generator
        network.load_state_dict(dict(weights))
        network.eval().to(device := default_device())
        z = torch.randn(len(labels), self.latent, generator=generator(seed, "samples")).to(device)
        with torch.no_grad():
            batches = zip(z.split(256), labels.to(device).split(256), strict=True)
            images = torch.cat([network(*batch).tanh() for batch in batches])
        return ((images + 1) * 127.5).round().to(torch.uint8).cpu()

    def build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False) -> gan.GAN:
        """Build both networks; ``seed`` decides their initial weights and all their later random draws."""
        set_default_generator(seed, "initial weights")
        return gan.GAN(
            shape=shape,
            n_classes=n_classes,
            channels=self.channels,
            latent=self.latent,
            regulariser=self.regulariser,
            gamma=self.gamma,
            augment=self.augment,
            norm_bias=self.norm_bias,
            flip=flip,
            seed=seed_for(seed, "noise"),
        )


class Course:
    """The state of a GAN's training: both networks, their optimizers, and the moving average of G's weights."""

    def __init__(self, constants: Adversarial, model: gan.GAN) -> None:
        self.model = model.to(default_device())
        how = {"lr": constants.lr, "betas": (constants.momentum, 0.99), "fused": True}
        self.of_discriminator = torch.optim.Adam(model.discriminator.parameters(), **how)
        self.of_generator = torch.optim.Adam(model.generator.parameters(), **how)
        self.decay, self.steps = constants.ema_decay, 0
        self.average = [p.detach().clone() for p in model.generator.parameters()]

    def discriminator_step(self, x: Tensor, y: Tensor) -> None:
        """Update the discriminator D on the real images x with labels y, and on one synthetic image per label in y."""
        with torch.no_grad():
            fakes = self.model.images(y)
        for_real, for_fakes = self.model.draw(len(y)), self.model.draw(len(y))
        loss = self.model(x, y, fakes, y, for_real, for_fakes)
        self.of_discriminator.zero_grad()
        loss.backward()
        self.of_discriminator.step()

    def generator_step(self, y: Tensor) -> None:
        """Update the generator G and the moving average of its weights, by synthetic images of the classes y (B,)."""
        self.model.discriminator.iterate()
        weights = list(self.model.generator.parameters())
        gradients = torch.autograd.grad(self.model.of_generator(y), weights)
        for p, g in zip(weights, gradients, strict=True):
            p.grad = g
        self.of_generator.step()
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        for average, p in zip(self.average, weights, strict=True):
            average.lerp_(p.detach(), 1 - keep)

    def averaged(self) -> dict[str, Tensor]:
        """Return the moving average of G's weights and the statistics of G's batch norm, by name, on the CPU."""
        network = self.model.generator
        averages = {name: t for (name, _), t in zip(network.named_parameters(), self.average, strict=True)}
        return {**state_of(network), **{name: t.cpu().clone() for name, t in averages.items()}}
