"""The convex experiment: federated softmax regression, full-batch local steps, all clients in one batch, float64.

a_i   images of client i, pixels in [0, 1]                 (N, n, d), n per client
b_i   labels of these images, one-hot                      (N, n, K)
x     server model, one for each noise level               (d, S, K); 0 at the start, no bias
y_i   local models                                         (N, d, S, K)
f_i   loss of client i:  -1/(n K) sum_j sum_k b_ijk log softmax(a_ij x)_k
s     noise level, one of S;  z ~ N(0, I/d) is drawn anew for every client and step
E     full-batch steps of a client in a round;  R rounds
p     share of every client's real images that is swapped through the pool, in [0, 1]

A round: y_i = x;  E times  y_i <- y_i - lr (grad f_i(y_i) + s z);  x = mean of y_i over all clients.

Source: Fedssyn (Li et al., TMLR 2024), appendix A.3.1, equations A.5 and A.6, figure A.3.
Departs from the paper: equation A.5b lacks the minus sign, which is added here. The paper states no start (the authors'
code has PyTorch's random start), no learning rate and no number of rounds. There is no bias, as in A.5a; the authors'
code has a bias, and no noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.config.schema import Partition
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset, Examples
from fedcommons.data.federated import ClientDatasets
from fedcommons.runs import load_data
from fedcommons.seeding import generator, numpy_generator
from fedcommons.sharing.exchange import share
from fedcommons.sharing.real import ShuffledReal


@dataclass(frozen=True)
class Labelled:
    """n images of d pixels, and their labels of K classes.

    ``a``: pixels in [0, 1], of shape (..., n, d). ``b``: one-hot labels, of shape (..., n, K).
    """

    a: Tensor
    b: Tensor

    @staticmethod
    def from_examples(examples: Examples, n_classes: int, rows: np.ndarray | slice = slice(None)) -> "Labelled":
        """Return the images and labels at ``rows``; for ``rows`` of shape (N, n), a is (N, n, d) and b is (N, n, K)."""
        part = examples[rows]
        pixels = part.x.flatten(part.y.dim()).double() / 255
        return Labelled(pixels, F.one_hot(part.y, n_classes).double())


def balanced(dataset: Dataset, most: int, seed: int) -> Dataset:
    """Draw equal numbers of training images per class: ``most``, or the number in the smallest class if it is less."""
    y = dataset.train.y.numpy()
    n = min(most, np.bincount(y, minlength=dataset.classes).min())
    rows_of_classes = [
        numpy_generator(seed, "images of class", c).choice(np.flatnonzero(y == c), n, replace=False)
        for c in range(dataset.classes)
    ]
    return replace(dataset, train=dataset.train[np.sort(np.concatenate(rows_of_classes))])


def clients(dataset: Dataset, name: str, p: float, seed: int) -> Labelled:
    """Return the images of K clients (one per class) after shuffled_real has swapped the share p of the images.

    name: the partition, iid or single_class. ``dataset`` must have an equal number n of images per class. Every client
    has n images, of which int(p n) are swapped.
    """
    cut = Partition(name, n_clients=dataset.classes)
    before = load_data.partition_rows(
        cut.name, cut.constants, dataset.train.y.numpy(), dataset.classes, seed, n_clients=cut.n_clients
    )
    client_data = ClientDatasets(Clients(dataset.train, before.rows), dataset.classes, dataset.flip, seed)
    rows = share(ShuffledReal(p), client_data).data.clients.rows
    return Labelled.from_examples(dataset.train, dataset.classes, np.stack(list(rows)))


def loss(x: Tensor, data: Labelled) -> Tensor:
    """Return the losses (noise levels S,) on ``data`` of S models x, (pixels d, S, classes K); no noise is added."""
    logits = (data.a @ x.flatten(1)).unflatten(1, x.shape[1:])
    return -(data.b[:, None] * logits.log_softmax(-1)).sum(-1).mean(0) / x.shape[-1]


def gradient(y: Tensor, data: Labelled) -> Tensor:
    """Return the gradients, without noise, of all clients' losses at the clients' models y.

    The models and the gradients have the shape (N, d, S, K). N: clients; d: pixels; S: noise levels; K: classes.
    """
    _, n, n_classes = data.b.shape
    logits = (data.a @ y.flatten(2)).unflatten(2, y.shape[2:])  # shape (clients N, images n, noise levels S, classes K)
    error = logits.softmax(-1) - data.b[:, :, None]
    return (data.a.mT @ error.flatten(2)).view(y.shape) / (n * n_classes)


def zeta_sq(data: Labelled) -> float:
    """Return (1/N) sum_i ||grad f_i - grad f||^2 at weights 0, without noise; f_i: loss of client i, f: their mean."""
    n_clients, d, n_classes = len(data.a), data.a.shape[2], data.b.shape[2]
    gradients = gradient(data.a.new_zeros(n_clients, d, 1, n_classes), data)
    return float((gradients - gradients.mean(0)).square().sum() / n_clients)


def train(
    data: Labelled, test: Labelled, *, lr: float, steps: int, rounds: int, noises: Sequence[float], seed: int
) -> tuple[Tensor, Tensor]:
    """Train ``rounds`` rounds of ``steps`` local steps; return the last models and test losses (rounds + 1, S).

    noises: the S noise levels s, each with a separate server model; models: (pixels d, S, classes K). Row r of the
    losses belongs to the model after round r; round 0 is the start. A gradient gets the noise s z. The random z do not
    depend on s, the swapped share p or the partition.
    """
    n_clients, d, n_classes = len(data.a), data.a.shape[2], data.b.shape[2]
    s = data.a.new_tensor(noises)[:, None]
    x = data.a.new_zeros(d, len(noises), n_classes)
    losses = [loss(x, test)]
    for number in range(1, rounds + 1):
        draws = [generator(seed, "gradient noise", number, client) for client in range(n_clients)]
        y = x.expand(n_clients, *x.shape)
        for _ in range(steps):
            z = [torch.randn(d, 1, n_classes, generator=g, dtype=x.dtype) / d**0.5 for g in draws]
            y = y - lr * (gradient(y, data) + s * torch.stack(z))
        x = y.mean(0)
        losses.append(loss(x, test))
    return x, torch.stack(losses)
