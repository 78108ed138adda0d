"""FedMix: first-order mixup with mean images, which clients share instead of single images.

Yoon et al., "FedMix: Approximation of mixup under mean augmented federated learning", ICLR 2021, arXiv:2107.00233,
equation 4 and algorithm 2.   x, y: an image as network input, and its label;  M (``mean_size``): number of images per
mean;  x_bar, y_bar: mean of M images of one client, and the class frequencies of their labels;  lambda (``mix``): share
of the mean image;  u = (1 - lambda) x.

Before round 1 every client shares the means of groups of its images, as in algorithm 1.

Departs from the paper: every step samples one mean from the means of all clients, including the client itself. The
loss term with the gradient has no extra factor (1 - lambda), as in equation 4; ``box=True`` adds the factor, as in the
paper's algorithm box. A client splits its images into groups of M to 2 M - 1 images. A client with fewer than M images
shares one mean of all its images. The means have no noise, so they are not private.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import Common, Message, Reply
from fedcommons.core.averaging import weighted_reply
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.features import Head
from fedcommons.core.local_training import Batch
from fedcommons.data.clients import ClientData, Clients
from fedcommons.data.examples import Examples
from fedcommons.flat_tensors import Payload, flat
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator, numpy_generator


@dataclass(frozen=True)
class FedMix:
    """Loss (1 - lambda) CE(f(u), y) + lambda CE(f(u), y_bar) + lambda <grad_u CE(f(u), y), x_bar>, per example.

    x, y: image and label;  x_bar, y_bar: mean image and class frequencies;  lambda: ``mix``;  u = (1 - lambda) x;  CE:
    cross entropy;  f: logits. The engine shares the means before round 1 and stores them in ``ClientData.commons``. The
    module's ``training_step`` must be a cross entropy, and its ``normalise`` must map images to the network's input.

    Raises:
        ValueError: ``ClientData.commons`` is None.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        averages=True, computes_inputs=True, watches_head=True, needs_classes=True
    )

    mix: Annotated[float, "[0, 1]"] = 0.05
    """lambda, share of the mean image in the mixture"""
    mean_size: Annotated[int, "[1, 1e9]"] = 64
    """M, number of images in a mean; 1 shares every image unchanged"""
    box: bool = False
    """true: multiply the loss term with the gradient by 1 - lambda, as in the paper's algorithm box"""

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        """Return the mean images of all clients. The engine sends each mean to all other clients."""
        means = mean_images(clients, self.mean_size, n_classes, seed)
        what = ("means of images", "means of labels")
        releases = [Release(client, what, n_disclosed=n) for client, n in enumerate(clients.sizes)]
        return Common(means, releases=releases)

    start, down, merge = FedAvg.start, FedAvg.down, FedAvg.merge

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        x, module = flat(message.common, "model"), work.module
        if data.commons is None:
            raise ValueError("FedMix needs data.commons, the means that clients share before round 1")
        means, mix = data.commons, self.mix
        head = Head(module)
        # Floating-point features need no normalisation.
        see: Any = nn.Identity() if data.x.is_floating_point() else module.normalise
        factor = mix * (1 - mix) if self.box else mix

        def loss(batch: Batch, step: int) -> Tensor:
            images, labels, *weights = batch
            j = int(torch.randint(len(means), (), generator=generator(seed, "means", step)))
            x_bar, y_bar = see(means.x[j]), means.y[j]
            u = ((1 - mix) * see(images)).requires_grad_()
            value = work.loss((u, labels, *weights), step)  # mean of CE(f(u), y) over the batch
            mean_loss = F.cross_entropy(head.outputs, y_bar.expand(len(labels), -1), reduction="none")
            mean_loss = (mean_loss * weights[0] if weights else mean_loss).mean()
            (gradient,) = torch.autograd.grad(value, u, create_graph=True)
            return (1 - mix) * value + mix * mean_loss + factor * (gradient * x_bar).sum()

        with head.watched():
            trained = work.local(x, data, seed, loss=loss)
        return weighted_reply(x, trained, work.weight(data))


def mean_images(clients: Clients, size: int, n_classes: int, seed: int) -> Examples:
    """Return the m mean images of all clients, (m, C, H, W), float32 in 0..255, and class frequencies (m, classes)."""
    images, labels = [], []
    for client, data in enumerate(clients):
        order = numpy_generator(seed, "means", client).permutation(len(data))
        for group in np.array_split(order, max(1, len(data) // size)):
            rows = torch.from_numpy(group)
            images.append(data.x[rows].float().mean(0))
            labels.append(F.one_hot(data.y[rows], n_classes).float().mean(0))
    return Examples(torch.stack(images), torch.stack(labels))
