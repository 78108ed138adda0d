"""FedMix's commons: means of images and labels, shared once before the federation.

Yoon et al., ICLR 2021, arXiv:2107.00233, algorithm 1.   M (``size``): images in a mean.

Departs from the paper: a client's images are cut into groups of M to 2 M - 1, so that no mean has less than M (a
client with fewer images makes one mean of all). Nothing is added for privacy.
"""

import numpy as np
import torch
from torch.nn import functional as F

from fedcommons.accounting.communication import Traffic
from fedcommons.data.clients import Clients
from fedcommons.data.datasets import Examples
from fedcommons.seeds import numpy_generator


def mean_images(clients: Clients, size: int, n_classes: int, seed: int) -> Examples:
    """Each client's means: x (m, C, H, W) float32 in 0..255, y (m, classes) label frequencies."""
    images, labels = [], []
    for client, data in enumerate(clients):
        order = numpy_generator(seed, "means", client).permutation(len(data))
        for group in np.array_split(order, max(1, len(data) // size)):
            rows = torch.from_numpy(group)
            images.append(data.x[rows].float().mean(0))
            labels.append(F.one_hot(data.y[rows], n_classes).float().mean(0))
    return Examples(torch.stack(images), torch.stack(labels))


def traffic(means: Examples, n_clients: int) -> Traffic:
    """Every mean goes up once and comes down to the N - 1 other clients."""
    return Traffic(once=n_clients * (means.x.nbytes + means.y.nbytes))
