"""A beta-VAE that draws around the mean code of a class (Fedssyn, appendix A.4; Burgess et al. 2018, arXiv:1804.03599).

The encoder maps an image to the mean of its code. mu_c is the average of these means over the training images of class
c, and is stored with the weights. A sample of class c is decoded from a code z ~ N(mu_c, I).

Departs from the paper: images with sides below 64 are halved less often, and images that are not square are padded. The
last batch of an epoch is used even if it is smaller. (The code that the paper names drops it.) Pixels stay grey. (The
paper does not state whether it rounds pixels to 0 and 1.) One beta-VAE models all classes of a client and is trained
without labels. (In the paper each client has one class.)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Progress, TrainedGenerator, Weights, build_module, require_images
from fedcommons.generators.training_loop import loaded, state_of, train
from fedcommons.runtime import memory_limit as capacity
from fedcommons.seeding import seed_for, set_default_generator

COPIES = 4
"""Number of copies of the weights in memory: weights, gradient and Adam's two moments."""


@dataclass(frozen=True)
class BetaVAE:
    """The beta-VAE that Fedssyn uses for dSprites. The defaults are those of the paper, for images of 64x64."""

    epochs: Annotated[int, "[1, 1e9]"] = 360
    """number of passes over the training images, the share generator.rho of the client's images"""
    batch_size: Annotated[int, "[1, 1e9]"] = 256
    """number of images per training step"""
    lr: Annotated[float, "(0, 1e38]"] = 5e-4
    """learning rate of Adam"""
    latent: Annotated[int, "[1, 1e6]"] = 10
    """dimension of a code"""
    filters: Annotated[int, "[1, 1e5]"] = 32
    """number of channels of every convolution"""
    hidden: Annotated[int, "[1, 1e5]"] = 256
    """number of units of each linear layer"""
    gamma: Annotated[float, "[0, 1e30]"] = 100.0
    """weight of |KL - C| in the loss, with the codes' KL divergence from N(0, I) and the capacity C"""
    capacity: Annotated[float, "[0, 1e30]"] = 20.0
    """final value of the capacity C, in nats"""
    ramp: Annotated[int, "[1, 1e9]"] = 24
    """number of epochs in which C rises from 0 to its final value (paper: the first 1/15 of 360 epochs)"""

    sampling: ClassVar[tuple[str, ...]] = ()

    def check_type(self, dtype: torch.dtype, data: str) -> None:
        """Check that the examples are uint8 images (see ``Generator``)."""
        require_images("beta_vae", dtype, data)

    def check_shape(self, shape: tuple[int, ...], data: str) -> None:
        """Check that the network fits into memory (see ``Generator``)."""
        numbers = 2 * (16 * self.filters * self.hidden + self.hidden**2) + 2 * 16 * self.filters**2
        capacity.require("the generator", COPIES * 4 * numbers, "generator.filters and generator.hidden")

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False,
        progress: Progress | None = None,
    ) -> Mapping[int, TrainedGenerator]:  # fmt: skip
        """Train on a client's images (see ``Generator``). Fewer images than ``batch_size`` form one batch."""
        set_default_generator(seed, "initial weights")
        steps = self.ramp * -(-len(examples) // self.batch_size)
        model = self._build(tuple(examples.x.shape[1:]), n_classes, seed, flip, steps).to(default_device())
        optimizer = model.configure_optimizers()

        def step(x: Tensor, y: Tensor) -> None:
            loss = model.training_step((x, y), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        def weights() -> Weights:
            model.centre(examples.x, examples.y)
            return state_of(model)

        return train(step, weights, examples, self.batch_size, epochs, seed, progress, as_loader=True)

    def sample(
        self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int,
        progress: Progress | None = None,
    ) -> Tensor:  # fmt: skip
        """Draw one uint8 image per label (see ``Generator``). Classes without training images use codes z ~ N(0, I)."""
        model = loaded(self._build(shape, n_classes, 0), weights)
        return model.sample(labels, seed_for(seed, "samples"), progress=progress).cpu()

    def losses(self, weights: Weights, examples: Examples, n_classes: int, seed: int) -> Tensor:
        """Return each image's binary cross entropy + KL, (n,), for membership inference; all images get equal noise."""
        model = loaded(self._build(tuple(examples.x.shape[1:]), n_classes, 0), weights)
        return model.losses(examples.x, seed_for(seed, "losses")).cpu()

    def _build(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool = False, ramp: int = 1):
        """Build the LightningModule. torch's default generator draws the weights, and ``seed`` decides the noise."""
        from lightning_modules import beta_vae  # the import takes seconds, and most workers never need it

        return build_module(beta_vae.BetaVAE, self, shape, n_classes, seed, flip, ramp=ramp)
