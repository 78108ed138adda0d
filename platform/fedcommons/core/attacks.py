"""Byzantine clients: clients that send false updates or train on false data. The engine simulates their attack.

u_i: update of client i (``core/updates.py``);  m: number of Byzantine clients among a round's n replies;  s: scale;
mu, sigma: mean and standard deviation of each coordinate over the m Byzantine clients' own updates.

sign_flip   u_i <- -s u_i
gaussian    u_i <- s e, with independent standard normal numbers e      (Blanchard et al., NeurIPS 2017: s = 200)
alie        u_i <- mu - s z sigma, with the standard normal quantile z of (n - floor(n/2) - 1)/(n - m)
            (Baruch et al., "A little is enough", NeurIPS 2019, arXiv:1902.06156, algorithm 3)
label_flip  class y becomes C - 1 - y, with C classes              (Fang et al., USENIX Security 2020, arXiv:1911.11815)
backdoor    half of the images get a white square in the lower right corner and the class ``target``
            (Gu et al., BadNets, 2017, arXiv:1708.06733); with s > 1, u_i <- s u_i replaces the server model
            (Bagdasaryan et al., AISTATS 2020, arXiv:1807.00459, equation 3)

The server's process changes the updates after it has received them, so time, bytes and the privacy ledger are those of
honest clients. Data attacks change the Byzantine clients' training rows after the partition: a sharing strategy and
convergence measures use the changed rows, and ``partition.json`` describes the rows before the attack.

Departs from the papers: z is limited to the quantiles of 0.5 and 0.99, for rounds with few clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Dataset, Examples
from fedcommons.errors import UserError
from fedcommons.seeding import generator, numpy_generator

SIDE = 3
"""Number of pixels of a side of the backdoor's square."""


@dataclass(frozen=True)
class Attack:
    """An attack: its name, the numbers of the Byzantine clients, s, and the class of the backdoor."""

    name: str
    clients: frozenset[int]
    scale: float = 1.0
    target: int = 0

    @property
    def is_on_data(self) -> bool:
        """Return whether the attack changes the clients' training data."""
        return self.name in ("label_flip", "backdoor")

    @property
    def is_on_updates(self) -> bool:
        """Return whether the attack changes the clients' updates."""
        return not self.is_on_data or self.scale != 1

    def false_updates(self, updates: Tensor, clients: Sequence[int], n: int, round: int, seed: int) -> Tensor:
        """Return the false updates (m, d) that m Byzantine clients send; n: number of replies in the round."""
        if self.name == "gaussian":
            draws = [generator(seed, "attack", round, client) for client in clients]
            return self.scale * torch.stack(
                [torch.randn(len(u), generator=g).to(u) for u, g in zip(updates, draws, strict=True)]
            )
        if self.name == "alie":
            share = (n - n // 2 - 1) / max(1, n - len(clients))
            z = NormalDist().inv_cdf(min(max(share, 0.5), 0.99))
            return (updates.mean(0) - self.scale * z * updates.std(0, correction=0)).expand_as(updates)
        return updates * (-self.scale if self.name == "sign_flip" else self.scale)

    def poisoned(self, train: Examples, rows: Sequence[np.ndarray], n_classes: int, seed: int) -> Examples:
        """Return the training examples after a data attack; rows: each client's row numbers."""
        if not self.is_on_data:
            return train
        x, y = train.x.clone(), train.y.clone()
        for client in self.clients:
            if self.name == "label_flip":
                y[rows[client]] = n_classes - 1 - y[rows[client]]
                continue
            order = numpy_generator(seed, "backdoor", client).permutation(rows[client])
            chosen = torch.from_numpy(order[: (len(order) + 1) // 2])
            x[chosen], y[chosen] = with_square(x[chosen], train.x), self.target
        return replace(train, x=x, y=y)

    def triggered(self, dataset: Dataset) -> Examples | None:
        """Return the test images of other classes with the square and the label ``target``; None without a backdoor."""
        if self.name != "backdoor":
            return None
        others = dataset.test[dataset.test.y != self.target]
        y = torch.full_like(others.y, self.target)
        return replace(others, x=with_square(others.x, dataset.train.x), y=y)


def attack_of(
    name: str, share: float, scale: float, target: int, n_clients: int, dataset: Dataset, seed: int
) -> Attack:
    """Return the attack ``name`` of floor(share N) of N clients, drawn uniformly without replacement.

    Raises:
        UserError: the share is above 0 and less than one client, or the attack is not defined for the data set.
    """
    m, classes, shape = int(share * n_clients + 1e-9), dataset.n_classes, dataset.shape
    if share and not m:
        raise UserError(f"attack.share {share:g} of {n_clients} clients is less than one client.")
    clients = numpy_generator(seed, "byzantine").choice(n_clients, m, replace=False)
    attack = Attack(name, frozenset(clients.tolist()), scale, target)
    if attack.is_on_data and classes is None:
        raise UserError(f"attack.name {name} changes classes, and the labels of {dataset.name} are not classes.")
    if name == "backdoor" and (len(shape) != 3 or min(shape[1:]) < SIDE):
        raise UserError(f"attack.name backdoor needs images of {SIDE} x {SIDE} pixels or more, got examples {shape}.")
    if name == "backdoor" and classes is not None and target >= classes:
        raise UserError(f"attack.target must be a class of {dataset.name}, 0 to {classes - 1}, got {target}.")
    return attack


def with_square(x: Tensor, train: Tensor) -> Tensor:
    """Return a copy of the images x (n, C, H, W) with a white square in the lower right corner.

    White is 255 for uint8 images, else the largest value of the training images.
    """
    x = x.clone()
    x[..., -SIDE:, -SIDE:] = 255 if train.dtype == torch.uint8 else train.max()
    return x
