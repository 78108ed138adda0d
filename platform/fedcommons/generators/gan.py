"""A class-conditional GAN with differentiable augmentation, our version of the GAN of Fedssyn's figure 4 (c).

The discriminator D is a small projection discriminator, regularised by spectral norm or by R1. The generator G is
convolutional with batch norm. Adam trains both networks on the logistic loss. Images are drawn from a moving average of
G's weights (see ``lightning_modules/gan.py``). The GAN is meant for few images. It is not state of the art.

``PrivateGAN`` has DP-SGD on the discriminator, the only network trained on real images (Xie et al. 2018,
arXiv:1802.06739, but gradients are clipped instead of weights, and the loss is the logistic loss instead of
Wasserstein's). The loss of a real image is its term in the loss of D (with R1), plus the term of one synthetic image.
It is averaged over ``draws`` pairs of augmentation and synthetic image. D's layers process each image separately, and
the power iteration of spectral norm uses weights only, so every image has a separate gradient. G learns from D only, so
its steps are post-processing. Labels of G's images are drawn uniformly, because the client's labels would reveal its
data. See ``dp_training.py``.

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
from fedcommons.generators.dp_training import ByDPSGD, Training, per_image
from fedcommons.generators.generator import Progress, TrainedGenerator, Weights, build_module, require_images
from fedcommons.generators.training_loop import batch_of, loaded, state_of, train
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.runtime import memory_limit
from fedcommons.seeding import generator, seed_for, set_default_generator
from lightning_modules import cvae, gan

COPIES = 9
"""Number of copies of the weights in memory: two networks, their gradients, Adam's moments and the moving average."""


@dataclass(frozen=True)
class Adversarial:
    """The constants and the networks of a GAN with or without privacy. This is a base class, not a generator.

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

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """Check that the examples are uint8 images (see ``Generator``)."""
        require_images("gan and private_gan", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check that the convolutions fit the image's side and the networks fit into memory (see ``Generator``)."""
        require_levels(self.channels, shape, data)
        least = sum(16 * a * b for a, b in zip(self.channels, self.channels[1:], strict=False))
        memory_limit.require("the generator", COPIES * 4 * least, "generator.channels")

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one uint8 image per label (see ``Generator``)."""
        network = loaded(self.build(shape, n_classes, seed).generator, weights)
        z = torch.randn(len(labels), self.latent, generator=generator(seed, "samples"))
        images = cvae.decode(network, z, labels, torch.tanh)
        return ((images + 1) * 127.5).round().to(torch.uint8).cpu()

    def build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False) -> gan.GAN:
        """Build both networks; ``seed`` decides their initial weights and all their later random draws."""
        set_default_generator(seed, "initial weights")
        return build_module(gan.GAN, self, shape, n_classes, seed, flip)


@dataclass(frozen=True)
class GAN(Adversarial):
    """A GAN with differentiable augmentation (Zhao et al. 2020), conditional on the class."""

    even_batches: bool = False
    """split an epoch's images into batches of equal sizes, at most batch_size; otherwise the last batch may be smaller,
    but Adam takes an equally large step for it"""

    def effective_constants(self, n: int) -> dict[str, int]:
        """Return the batch size that is used for a generator with n training images, as {"batch_size": number}."""
        return {"batch_size": min(n, batch_of(n, self.batch_size, self.even_batches))}

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """Train on a client's images (see ``Generator``). Fewer images than ``batch_size`` form one batch."""
        course = Course(self, self.build(tuple(examples.x.shape[1:]), n_classes, seed, flip))

        def step(x: Tensor, y: Tensor) -> None:
            course.discriminator_step(x, y)
            course.generator_step(y)

        size = batch_of(len(examples), self.batch_size, self.even_batches)
        return train(step, course.averaged, examples, size, epochs, seed, progress)


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


@dataclass(frozen=True)
class PrivateGAN(ByDPSGD, Adversarial):
    """A conditional GAN whose discriminator is trained by DP-SGD."""

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> Training:
        model = self.build(shape, n_classes, seed, flip)
        course, draws = Course(self, model), self.draws

        def classes(n: int) -> Tensor:
            return torch.randint(n_classes, (n,), generator=model.draws).to(default_device())

        def after() -> None:
            """Update the generator G; its random draws depend on a seed for this step.

            With one seed for all steps, the draws would depend on the earlier batches' sizes, which are private.
            """
            model.draws.manual_seed(seed_for(seed, "step of the generator", course.steps))
            course.generator_step(classes(self.batch_size))

        def draw(images: int, rows: dp_sgd_vmap.Rows) -> list[Tensor]:
            n = images * draws
            of_each = classes(n), model.codes(n), model.draw(n), model.draw(n)
            of_rows = [part.unflatten(0, (images, draws))[rows] for part in of_each]
            y, z, for_real, for_fakes = (part.flatten(0, 1) for part in of_rows)
            model.generator.eval()  # batch statistics would depend on the batch's size, which is private
            with torch.no_grad():
                fakes = model.images(y, z)
            model.generator.train()
            return [part.unflatten(0, (-1, draws)) for part in (fakes, y, for_real, for_fakes)]

        loss, _ = per_image(model, draws, "discriminator.")
        return Training(model.discriminator, course.of_discriminator, loss, draw, model.draws, after, course.averaged)
