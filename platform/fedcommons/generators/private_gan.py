"""The GAN of ``gan.py`` with DP-SGD on the discriminator, the only network trained on real images (Xie et al. 2018).

The loss of a real image is its term in the loss of the discriminator D (with R1), plus the term of one synthetic image.
It is averaged over ``draws`` pairs of augmentation and synthetic image. D's layers process each image separately, and
the power iteration of spectral norm uses weights only, so every image has a separate gradient. The generator G learns
from D only, so its steps are post-processing. Labels of G's images are drawn uniformly, because the client's labels
would reveal its data. See ``dp_training.py``.

Reference: arXiv:1802.06739. Departs from the paper: gradients are clipped instead of weights, and the loss is the
logistic loss instead of Wasserstein's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcommons.core.worker import default_device
from fedcommons.generators.dp_training import ByDPSGD, Training, per_image, without_privacy
from fedcommons.generators.gan import GAN, Adversarial, Course
from fedcommons.generators.generator import Weights
from fedcommons.privacy import dp_sgd_vmap
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class PrivateGAN(ByDPSGD, Adversarial):
    """A conditional GAN whose discriminator is trained by DP-SGD."""

    @property
    def plain(self) -> GAN:
        return without_privacy(self, Adversarial, GAN)

    def training(self, shape: tuple[int, ...], n_classes: int, seed: int, flip: bool) -> Training:
        model = self.plain.build(shape, n_classes, seed, flip)
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

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        """Draw one uint8 image per label, as the GAN without privacy does."""
        return self.plain.sample(weights, shape, n_classes, labels, seed)
