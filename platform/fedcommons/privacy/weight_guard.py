"""Detection of changes that DP-SGD does not protect: user code that writes to the weights or to the optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedcommons.privacy.release import Release

WRITTEN = Release(reason="the loss or add_to_grad writes the weights")
"""The privacy ledger entry of a training in which user code has changed the weights; it states no guarantee."""

STEERED = Release(reason="the loss or add_to_grad changes the optimizer")
"""The privacy ledger entry of a training in which user code has changed the optimizer; it states no guarantee."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by number of bytes, to compare the bits of floating point weights."""


class Written:
    """A detector of writes to the weights outside ``optimizer.step()``, and of writes to the optimizer's inputs.

    weights: all weights of the module, as a vector. The detector compares bits of the weights, because nan is not
    equal to nan. Only the property ``unprotected`` waits until a GPU has finished.
    """

    def __init__(self, weights: Tensor, optimizer: Optimizer) -> None:
        self._now, self._optimizer = weights.detach().view(BITS[weights.element_size()]), optimizer
        self._before, self._any = self._now.clone(), self._now.new_zeros((), dtype=torch.bool)
        self._settings: list[Any] = []
        self._tensors: list[Tensor] = []
        self._is_steered, self._steered = False, self._any.clone()

    def keep(self) -> None:
        """Store a copy of the weights, directly after an optimizer step."""
        self._before.copy_(self._now)

    def begin(self) -> None:
        """Store copies of the inputs of the optimizer's next step: parameter groups and state, such as momentum."""
        self._settings, tensors = self._read()
        self._tensors = [tensor.clone() for tensor in tensors]

    def look(self) -> None:
        """Store whether weights or optimizer differ from the copies that ``keep`` and ``begin`` have stored."""
        self._any |= (self._now != self._before).any()
        settings, tensors = self._read()
        self._is_steered |= settings != self._settings
        for now, stored in zip(tensors, self._tensors, strict=False):
            if now.shape == stored.shape:
                self._steered |= ~torch.isclose(now, stored, rtol=0, atol=0, equal_nan=True).all().to(self._any.device)

    @property
    def unprotected(self) -> Release | None:
        """Return ``WRITTEN`` if ``look`` saw changed weights, ``STEERED`` if it saw a changed optimizer, else None."""
        if self._any:
            return WRITTEN
        return STEERED if self._is_steered or self._steered else None

    def _read(self) -> tuple[list[Any], list[Tensor]]:
        """Return the inputs of the optimizer's next step: a list of comparable plain values, and a list of tensors."""
        plain: list[Any] = []
        tensors: list[Tensor] = []
        for value in _leaves([self._optimizer.param_groups, self._optimizer.state]):
            if isinstance(value, torch.nn.Parameter):
                plain += [id(value), value.requires_grad]
            elif isinstance(value, Tensor):
                plain += [id(value), value.dtype, value.shape]
                tensors.append(value.detach())
            else:
                plain.append(repr(value))  # as text, because nan is not equal to nan
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
