"""Under DP-SGD only the optimizer's step may change the weights: its gradients alone are clipped and noised."""

import torch
from torch import Tensor

from fedcommons.core.release import Release

WRITTEN = Release(why="the loss or add_to_grad writes the weights")
"""Of a training in which not only the optimizer has changed the weights: nothing protects it."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


class Written:
    """Whether anything but the optimizer's step has changed the weights, a vector.

    Bits are compared, as nan differs from nan. Nothing waits for a GPU before ``found`` is read.
    """

    def __init__(self, weights: Tensor) -> None:
        self._now = weights.detach().view(BITS[weights.element_size()])
        self._kept, self._any = self._now.clone(), self._now.new_zeros((), dtype=torch.bool)

    def keep(self) -> None:
        """Keep the weights after a step."""
        self._kept.copy_(self._now)

    def look(self) -> None:
        """Compare the weights with those that were kept."""
        self._any |= (self._now != self._kept).any()

    @property
    def found(self) -> bool:
        """Whether they differed once."""
        return bool(self._any)
