"""FedDM's work, which is no local training: how much a run has of it, and what a piece of it costs.

Both are counted in the same pieces, so that a run's seconds are the sum of count times price.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from fedcommons.algorithms.feddm import FedDM
from fedcommons.algorithms.matching import is_owned
from fedcommons.data.clients import Clients

MANY = 32
"""Images in the larger of the two batches through which a price's line goes; the other has one."""


@dataclass(frozen=True)
class Matched:
    """Steps, and the images that go through the network in them; as prices, seconds of each."""

    steps: float = 0.0  # of a client, on the pixels
    real: float = 0.0  # its own images, forward
    synthetic: float = 0.0  # forward and backward; under DP-SGD as often as the largest class has images in a batch
    server_steps: float = 0.0
    server_images: float = 0.0  # forward and backward

    def times(self, factor: float) -> "Matched":
        """So many times as much of everything."""
        return Matched(*(factor * getattr(self, f.name) for f in fields(self)))

    def seconds(self, prices: "Matched") -> float:
        """Of so much work."""
        return sum(getattr(self, f.name) * getattr(prices, f.name) for f in fields(self))


NOTHING = Matched()


def work(method: FedDM, clients: Clients, n_classes: int, replying: Sequence[Sequence[int]], dp: bool) -> Matched:
    """The work of rounds in which these clients reply; Poisson batches have their expected sizes."""
    counts = clients.counts(n_classes)
    owned = is_owned(counts, method.least)
    batch = torch.where(owned, counts.clamp(max=method.match_batch), 0)
    sent = owned.sum(1) * method.ipc
    passes = sent * batch.max(1).values if dp else sent
    joins = torch.tensor([i for of in replying for i in of], dtype=torch.long)
    images = [int(sent[list(of)].sum()) for of in replying]
    return Matched(
        steps=method.iterations * len(joins),
        real=method.iterations * int(batch.sum(1)[joins].sum()),
        synthetic=method.iterations * int(passes[joins].sum()),
        server_steps=method.server_epochs * sum(-(-n // method.server_batch) for n in images),
        server_images=method.server_epochs * sum(images),
    )


def prices(seconds: Callable[..., float], times: int) -> Matched:
    """What each costs, from rounds of one client and class, with one of everything but for what is named.

    seconds: of such a round with so many ``iterations`` (0), images in a batch (``real``), synthetic images (``ipc``)
    and ``epochs`` of the server; times: steps that two rounds differ in, so that they stand out.
    """

    def one(without: float, **more: int) -> float:
        return max(0.0, seconds(**more) - without) / times

    bare, larger = seconds(), seconds(ipc=MANY)
    step, server = one(bare, iterations=times), one(bare, epochs=1 + times)
    slopes = (
        (one(bare, iterations=times, real=MANY), step),
        (one(larger, iterations=times, ipc=MANY), step),
        (one(larger, epochs=1 + times, ipc=MANY), server),
    )
    real, synthetic, image = (max(0.0, many - few) / (MANY - 1) for many, few in slopes)
    return Matched(max(0.0, step - real - synthetic), real, synthetic, max(0.0, server - image), image)
