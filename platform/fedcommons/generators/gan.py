"""A class-conditional GAN with differentiable augmentation, the GAN of Fedssyn's figure 4 (c) as we have it.

What ours is: a small projection discriminator on spectrally normed convolutions, or with R1, and a convolutional
generator with batch norm, both trained by Adam on the logistic loss; images come from a moving average of the
generator's weights (see ``lightning_modules/gan.py``). It is a GAN for few images, not a state-of-the-art one.

Fedssyn says "a conditional GAN with differentiable augmentation", and leaves open networks, loss, regulariser, which
augmentations, steps and rates. Each is a constant here.
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
"""Copies of the weights that a training holds: both networks, their gradients and Adam's moments, and the average."""


@dataclass(frozen=True)
class Adversarial:
    """The constants that a GAN has however it is trained. It is no generator itself.

    sampling: see ``Generator``.
    """

    epochs: Annotated[int, "[1, 1e9]"] = 500
    """passes over the client's images (the share rho)"""
    batch_size: Annotated[int, "[1, 1e9]"] = 64
    """images per step"""
    lr: Annotated[float, "(0, 1e38]"] = 5e-4
    """learning rate of both networks' Adam"""
    momentum: Annotated[float, "[0, 1)"] = 0.0
    """beta_1 of Adam; beta_2 is 0.99"""
    channels: Annotated[tuple[int, ...], "[1, 1e6]"] = (64, 128, 256)
    """channels of the discriminator's convolutions, each of which halves the image; the generator mirrors them"""
    latent: Annotated[int, "[1, 1e6]"] = 64
    """l, normal numbers of which the generator makes an image"""
    regulariser: Annotated[str, "spectral | r1"] = "spectral"
    """of the discriminator: spectral norm of its layers, or the squared norm of its gradient at real images"""
    gamma: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of r1"""
    augment: Annotated[str, "none | translation | all"] = "all"
    """what real and made images undergo before they are judged; all: colour, translation and cutout"""
    ema_decay: Annotated[float, "[0, 1)"] = 0.99
    """decay of the moving average of the generator's weights, reached by warm-up"""
    norm_bias: bool = True
    """biases in front of the generator's BatchNorm, which have no effect and which Adam moves by rounding noise; false:
    none"""

    sampling: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class GAN(Adversarial):
    """A GAN with differentiable augmentation (Zhao et al. 2020), conditional on the class."""

    even_batches: bool = False
    """split an epoch's images into batches of equal sizes, at most batch_size; else the last one has the rest, and Adam
    steps as far for one image as for many"""

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return the batch size of a client whose generator sees n images."""
        return {"batch_size": min(n, batch_of(n, self.batch_size, self.even_batches))}

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """See ``Generator``."""
        require_images("gan and private_gan", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """See ``Generator``."""
        require_levels(self.channels, shape, data)
        least = sum(16 * a * b for a, b in zip(self.channels, self.channels[1:], strict=False))
        memory_limit.require("the generator", COPIES * 4 * least, "generator.channels")

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """See ``Generator``; fewer images than ``batch_size`` make one batch."""
        course = Course(self, self.build(tuple(examples.x.shape[1:]), n_classes, seed, flip))
        size, kept = batch_of(len(examples), self.batch_size, self.even_batches), dict[int, TrainedGenerator]()
        for epoch, x, y in batches(examples, size, max(epochs), seed, default_device(), progress):
            course.discriminator_step(x, y)
            course.generator_step(y)
            if epoch in epochs:
                kept[epoch] = TrainedGenerator(course.averaged(), Receipt())  # nothing protects it
        return kept

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """See ``Generator``."""
        network = self.build(shape, n_classes, seed).generator
        network.load_state_dict(dict(weights))
        network.eval().to(device := default_device())
        z = torch.randn(len(labels), self.latent, generator=generator(seed, "samples")).to(device)
        with torch.no_grad():
            batches = zip(z.split(256), labels.to(device).split(256), strict=True)
            images = torch.cat([network(*batch).tanh() for batch in batches])
        return ((images + 1) * 127.5).round().to(torch.uint8).cpu()

    def build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False) -> gan.GAN:
        """The networks; all they draw, initial weights too, is keyed by ``seed``."""
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
    """The steps of a training, and the moving average of the generator's weights."""

    def __init__(self, constants: Adversarial, model: gan.GAN) -> None:
        self.model = model.to(default_device())
        how = {"lr": constants.lr, "betas": (constants.momentum, 0.99), "fused": True}
        self.of_discriminator = torch.optim.Adam(model.discriminator.parameters(), **how)
        self.of_generator = torch.optim.Adam(model.generator.parameters(), **how)
        self.decay, self.steps = constants.ema_decay, 0
        self.average = [p.detach().clone() for p in model.generator.parameters()]

    def discriminator_step(self, x: Tensor, y: Tensor) -> None:
        """One step of D on these images and as many made ones of the same classes."""
        with torch.no_grad():
            fakes = self.model.images(y)
        drawn, for_fakes = self.model.draw(len(y)), self.model.draw(len(y))
        loss = self.model(x, y, fakes, y, drawn, for_fakes)
        self.of_discriminator.zero_grad()
        loss.backward()
        self.of_discriminator.step()

    def generator_step(self, y: Tensor) -> None:
        """One step of G on images of these classes, after D has changed."""
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
        """G's averaged weights, and the statistics of its batch norm, on the CPU."""
        network = self.model.generator
        averages = {name: t for (name, _), t in zip(network.named_parameters(), self.average, strict=True)}
        return {**state_of(network), **{name: t.cpu().clone() for name, t in averages.items()}}
