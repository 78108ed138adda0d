"""DP-MERF's generator: a small network whose images match target means of random features per class.

Harder, Adamczewski and Park, "DP-MERF", AISTATS 2021, arXiv:2002.11603. The network and its training follow the paper's
released code (ParkLabML/DP-MERF).   z ~ N(0, I_5): a code;  y: a class;  C: number of classes;  B: batch size;
phi: random features;  m_c: noisy mean of the features of class c (``random_features.means``).

    G(z, y): FC 200, BN, ReLU, FC to 16 maps with a quarter of the image side, BN,
             [enlarge to half of the side, conv 5x5 to 8 maps, ReLU], [enlarge to the side, conv 5x5], sigmoid
    a step:  draw y_k uniformly and descend   sum_c | 1/B sum_{k: y_k = c} phi(G(z_k, y_k)) - m_c/C |^2

The network has 166,161 weights for MNIST. The optimizer is Adam with the learning rate 0.01, which falls by a tenth
after each fifth of the steps. Maps are enlarged bilinearly. If 4 does not divide a side, the side of the first maps is
rounded up.

Departs from the paper: all classes have equal weights. (In the paper a class is weighted by its noisy share.) Images
are rounded to uint8. ``norm_bias`` false omits the biases in front of BatchNorm. The released code has these biases,
although they have no effect and Adam moves them by rounding noise.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedcommons.data.examples import Examples
from fedcommons.seeding import generator, keyed_globals
from fedcommons.sharing.random_features import BLOCK, Fourier, bounded, means

CODE = 5
"""Length of a code z."""

BATCH = 100
"""B, number of images in a batch."""

LR = 0.01
"""Adam's learning rate at the first step."""


class Generator(nn.Module):
    """The network G; ``shape``: (channels, height, width) of an image; ``norm_bias``: use biases before BatchNorm."""

    def __init__(self, shape: tuple[int, ...], n_classes: int, norm_bias: bool = True) -> None:
        super().__init__()
        channels, *whole = shape
        half, seed = ([-(-side // by) for side in whole] for by in (2, 4))
        self.layers = nn.Sequential(
            nn.Linear(CODE + n_classes, 200, bias=norm_bias),
            nn.BatchNorm1d(200),
            nn.ReLU(),
            nn.Linear(200, size := 16 * seed[0] * seed[1], bias=norm_bias),
            nn.BatchNorm1d(size),
            nn.Unflatten(1, (16, *seed)),
            nn.UpsamplingBilinear2d(size=(half[0], half[1])),
            nn.Conv2d(16, 8, 5, padding=2),
            nn.ReLU(),
            nn.UpsamplingBilinear2d(size=(whole[0], whole[1])),
            nn.Conv2d(8, channels, 5, padding=2),
            nn.Sigmoid(),
        )
        self.n_classes = n_classes

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Return images (n, C, H, W) in [0, 1] for codes z (n, 5) and classes y (n,)."""
        return self.layers(torch.cat([z, one_hot(y, self.n_classes).to(z)], 1))


def generate_images(
    features: Fourier,
    noisy: Tensor,
    shape: tuple[int, ...],
    per_class: int,
    steps: int,
    seed: int,
    *,
    norm_bias: bool = True,
) -> Examples:
    """Train a generator on noisy sums of features and draw images; arguments as for ``random_features.fit_images``."""
    return sample_images(train(features, noisy, shape, steps, seed, norm_bias=norm_bias), per_class, seed)


def train(
    features: Fourier, noisy: Tensor, shape: tuple[int, ...], steps: int, seed: int, *, norm_bias: bool = True
) -> Generator:
    """Train G for ``steps`` steps on the noisy sums of features, (classes, D + 1); return G in evaluation mode."""
    wanted = means(noisy) / len(noisy)
    draws = generator(seed, "codes of batches")
    with keyed_globals(seed, "first weights of the generator"):
        network = Generator(shape, len(noisy), norm_bias).to(wanted.device)
    optimizer = torch.optim.Adam(network.parameters(), LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (5 * step // steps))
    for _ in range(steps):
        y = torch.randint(len(noisy), (BATCH,), generator=draws).to(wanted.device)
        z = torch.randn(BATCH, CODE, generator=draws).to(wanted.device)
        optimizer.zero_grad()
        phi = bounded(features, network(z, y).flatten(1))
        has = one_hot(y, len(noisy)).to(phi).T @ phi / BATCH
        ((has - wanted) ** 2).sum().backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def sample_images(network: Generator, per_class: int, seed: int) -> Examples:
    """Draw ``per_class`` uint8 images of each class from a trained generator; ``seed`` decides the codes."""
    labels = torch.arange(network.n_classes).repeat_interleave(per_class)
    codes = torch.randn(len(labels), CODE, generator=generator(seed, "codes of images"))
    device = next(network.parameters()).device
    with torch.no_grad():
        parts = [
            network(z.to(device), y.to(device)) for z, y in zip(codes.split(BLOCK), labels.split(BLOCK), strict=True)
        ]
    return Examples((255 * torch.cat(parts)).round().to(torch.uint8).cpu(), labels)
