"""The training batches of small generators, whose networks are faster than the overhead of Lightning's Trainer."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Progress
from fedcommons.seeding import generator


def batch_of(n: int, batch_size: int, is_even: bool) -> int:
    """Return the batch size for n images: ``batch_size``; if even, the smallest with equally many batches per epoch."""
    return -(-n // -(-n // batch_size)) if is_even else batch_size


def batches(
    examples: Examples, batch_size: int, epochs: int, seed: int, device: torch.device,
    progress: Progress | None = None, *, as_loader: bool = False,
) -> Iterator[tuple[int, Tensor, Tensor]]:  # fmt: skip
    """Yield (finished epochs, images, labels) for all batches; each epoch is one pass over the examples.

    Finished epochs are 0 except after the last batch of an epoch. The order is keyed by ``seed`` alone. Fewer images
    than ``batch_size`` form one batch. as_loader: use the orders of a DataLoader in a Trainer, which draws a seed
    before each order, and one more order after a short last batch.
    """
    x, y, order = examples.x.to(device), examples.y.to(device), generator(seed, "order")
    steps, done = -(-len(y) // batch_size), 0
    for epoch in range(1, epochs + 1):
        if as_loader:
            torch.empty((), dtype=torch.int64).random_(generator=order)
        shuffled = torch.randperm(len(y), generator=order)
        if as_loader and len(y) % batch_size:
            torch.randperm(len(y), generator=order)
        for number, rows in enumerate(shuffled.to(device).split(batch_size), 1):
            yield (epoch if number == steps else 0), x[rows], y[rows]
            done += 1
            if progress:
                progress(done, epochs * steps)
