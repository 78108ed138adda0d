"""The training batches of small generators, for whose fast steps Lightning's Trainer has too much overhead."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Progress
from fedcommons.seeding import generator


def batch_of(n: int, batch_size: int, is_even: bool) -> int:
    """Return ``batch_size``; if ``is_even``, the smallest batch size with the same number of batches of n images."""
    return -(-n // -(-n // batch_size)) if is_even else batch_size


def batches(
    examples: Examples, batch_size: int, epochs: int, seed: int, device: torch.device,
    progress: Progress | None = None, *, as_loader: bool = False,
) -> Iterator[tuple[int, Tensor, Tensor]]:  # fmt: skip
    """Yield (epoch or 0, images, labels) for all batches; each epoch is one pass over the examples.

    The first value is the epoch's number (from 1) for the last batch of an epoch, and 0 for other batches. The order of
    the examples depends on ``seed`` only. Fewer images than ``batch_size`` form one batch. as_loader: draw the
    same orders as a DataLoader in Lightning's Trainer. The DataLoader draws a seed before each order. If the last batch
    is smaller than the others, the DataLoader also draws one unused order per epoch.
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
