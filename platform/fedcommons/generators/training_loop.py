"""The training loop of generators, whose fast steps need no Trainer of Lightning, and their weights."""

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedcommons.core.worker import default_device
from fedcommons.data.examples import Examples
from fedcommons.generators.generator import Progress, Receipt, TrainedGenerator, Weights
from fedcommons.seeding import generator

M = TypeVar("M", bound=nn.Module)


def batch_of(n: int, batch_size: int, is_even: bool) -> int:
    """Return ``batch_size``; if ``is_even``, the smallest batch size with the same number of batches of n images."""
    return -(-n // -(-n // batch_size)) if is_even else batch_size


def train(
    step: Callable[[Tensor, Tensor], object], weights: Callable[[], Weights], examples: Examples, batch_size: int,
    epochs: Collection[int], seed: int, progress: Progress | None = None, *, as_loader: bool = False,
) -> dict[int, TrainedGenerator]:  # fmt: skip
    """Call ``step(images, labels)`` for every batch; return the ``weights()`` after each number of ``epochs``.

    An epoch is one pass over the examples, whose order depends on ``seed`` only. Fewer images than ``batch_size`` form
    one batch. The weights have no privacy guarantee. as_loader: draw the same orders as a DataLoader in Lightning's
    Trainer. The DataLoader draws a seed before each order. If the last batch is smaller than the others, the DataLoader
    also draws one unused order per epoch.
    """
    device, order = default_device(), generator(seed, "order")
    x, y = examples.x.to(device), examples.y.to(device)
    generators, done, total = dict[int, TrainedGenerator](), 0, max(epochs) * -(-len(y) // batch_size)
    for epoch in range(1, max(epochs) + 1):
        if as_loader:
            torch.empty((), dtype=torch.int64).random_(generator=order)
        shuffled = torch.randperm(len(y), generator=order)
        if as_loader and len(y) % batch_size:
            torch.randperm(len(y), generator=order)
        for rows in shuffled.to(device).split(batch_size):
            step(x[rows], y[rows])
            done += 1
            if progress:
                progress(done, total)
        if epoch in epochs:
            generators[epoch] = TrainedGenerator(weights(), Receipt())
    return generators


def loaded(module: M, weights: Weights) -> M:
    """Load trained weights into a module, move the module to this process's device, and return it."""
    module.load_state_dict(dict(weights))
    return module.to(default_device())


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the module's weights and buffers, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}
