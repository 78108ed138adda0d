"""Under DP-SGD only the optimizer's step may change the weights, and only the engine what that step reads."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedcommons.privacy.release import Release

WRITTEN = Release(why="the loss or add_to_grad writes the weights")
"""Of a training in which not only the optimizer has changed the weights: nothing protects it."""

STEERED = Release(why="the loss or add_to_grad changes the optimizer")
"""Of a training in which a learning rate, say, may follow the data: nothing protects it."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


class Written:
    """Whether anything but the optimizer's step has changed the weights, or anything at all what the step reads.

    weights: a vector. Bits are compared, as nan differs from nan. Nothing waits for a GPU before ``found`` is read.
    """

    def __init__(self, weights: Tensor, optimizer: Optimizer) -> None:
        self._now, self._optimizer = weights.detach().view(BITS[weights.element_size()]), optimizer
        self._kept, self._any = self._now.clone(), self._now.new_zeros((), dtype=torch.bool)
        self._settings: list[Any] = []
        self._tensors: list[Tensor] = []
        self._is_steered, self._steered = False, self._any.clone()

    def keep(self) -> None:
        """Keep the weights after a step."""
        self._kept.copy_(self._now)

    def begin(self) -> None:
        """Keep what a step reads in the optimizer: parameter groups and state (momentum)."""
        self._settings, tensors = self._read()
        self._tensors = [tensor.clone() for tensor in tensors]

    def look(self) -> None:
        """Compare with what was kept."""
        self._any |= (self._now != self._kept).any()
        settings, tensors = self._read()
        self._is_steered |= settings != self._settings
        for now, kept in zip(tensors, self._tensors, strict=False):
            if now.shape == kept.shape:
                self._steered |= ~torch.isclose(now, kept, rtol=0, atol=0, equal_nan=True).all().to(self._any.device)

    @property
    def found(self) -> Release | None:
        """What is left of the training's protection if they differed once, else None."""
        if self._any:
            return WRITTEN
        return STEERED if self._is_steered or self._steered else None

    def _read(self) -> tuple[list[Any], list[Tensor]]:
        """Return what the optimizer's next step reads: plain values, and tensors."""
        plain: list[Any] = []
        tensors: list[Tensor] = []
        for value in _leaves([self._optimizer.param_groups, self._optimizer.state]):
            if isinstance(value, torch.nn.Parameter):
                plain += [id(value), value.requires_grad]
            elif isinstance(value, Tensor):
                plain += [id(value), value.dtype, value.shape]
                tensors.append(value.detach())
            else:
                plain.append(repr(value))  # nan equals nan
        return plain, tensors


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for pair in value.items():
            yield from _leaves(pair)
    elif isinstance(value, list | tuple):
        yield type(value).__name__
        for part in value:
            yield from _leaves(part)
    else:
        yield value
