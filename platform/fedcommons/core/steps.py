"""Steps of local training: a step changes a module's weights by the gradient of the loss on one or several batches.

``LocalSGD`` chooses one kind of step for a whole training, so a step runs no code for an option that is off. Two kinds
are defined elsewhere: ``PrivateStep`` for DP-SGD (``privacy/dp_sgd``) and ``GraphStep`` for GPUs (``cuda_graphs``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

Batch = tuple[Tensor, ...]
"""(inputs, labels) or (inputs, labels, weights); for a method's loss function, ``ClientData.extra_columns`` follow."""

Loss = Callable[[Batch, int], Tensor]
"""Function of (batch, number) that returns the loss. A loss function of a method calls ``training_step`` itself.

number: k A + j for batch j of step k, both counted from 0; A is ``client.accumulate``, the number of batches per step.
For a method's loss function, k counts the steps of the whole local training. For ``training_step``, k counts the steps
of the epoch, so the argument ``batch_idx`` is the index of the batch in the epoch.

Additional forward passes must run in evaluation mode, in which no random numbers are drawn. So dropout in the training
step has the same random numbers as without additional passes.
"""

AddToGrad = Callable[[Mapping[str, nn.Parameter]], None]
"""Function that changes the gradients of the named parameters between the backward pass and the optimizer's step."""

Change = Callable[[], object]
"""Function that a step calls after the backward pass, such as the clipping of gradients or the optimizer's step."""

KINDS = {"bf16": torch.bfloat16, "fp16-mixed": torch.float16}
"""Value of ``LocalSGD.precision`` -> number type for ``torch.autocast``."""

SCALE = 1024.0
"""Initial factor of the loss in a local training in fp16; the ``GradScaler`` halves it when a gradient overflows."""


class NoLoss(ValueError):
    """Error: a loss function returned None instead of a number."""


class PlainStep(NamedTuple):
    """A step on the loss of one batch. changes: called after the backward pass; the last change updates the weights."""

    loss: Loss
    parameters: Sequence[nn.Parameter]
    changes: Sequence[Change]

    def __call__(self, batch: Batch, number: int) -> Tensor:
        value = self.loss(batch, number)
        if value is None:
            raise NoLoss
        for parameter in self.parameters:  # faster than zero_grad, which torch wraps in profiling
            parameter.grad = None
        value.backward()
        for change in self.changes:
            change()
        return value


@dataclass(frozen=True)
class AccumulatedStep:
    """A step on the mean loss over all examples of at most ``size`` batches; changes: see ``PlainStep``.

    backward: function that adds a loss's gradients to the parameters' gradients.
    """

    loss: Loss
    parameters: Sequence[nn.Parameter]
    changes: Sequence[Change]
    size: int
    backward: Callable[[Tensor], object] = Tensor.backward

    def __call__(self, batches: Sequence[Batch], number: int) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        n, values = sum(len(batch[1]) for batch in batches), []
        for at, batch in enumerate(batches, number * self.size):
            value = self.loss(batch, at) * (len(batch[1]) / n)
            self.backward(value)
            values.append(value.detach())
        for change in self.changes:
            change()
        return reduce(torch.add, values)


class ScaledStep:
    """A step in fp16, in which a factor of the loss prevents that small gradients are rounded to zero.

    step: computes the gradients and does not update the weights. skipped: number of steps without an update, because a
    gradient was not finite.
    """

    def __init__(self, step: AccumulatedStep, optimizer: torch.optim.Optimizer, device: str) -> None:
        self.optimizer, self.scaler, self.skipped = optimizer, GradScaler(device, init_scale=SCALE), 0
        changes = (partial(self.scaler.unscale_, optimizer), *step.changes)
        self.step = replace(step, changes=changes, backward=lambda loss: self.scaler.scale(loss).backward())

    def __call__(self, batches: Sequence[Batch], number: int) -> Tensor:
        value, before = self.step(batches, number), self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        return value


def autocast(loss: Callable[..., Any], device: str, precision: str) -> Loss:
    """Return the loss function with matrix products in bf16 or fp16, if ``precision`` is in ``KINDS``.

    Weights and gradients stay float32. For any other precision, return ``loss`` unchanged.
    """
    kind = KINDS.get(precision)
    if kind is None:
        return loss

    def cast(batch: Batch, number: int) -> Tensor:
        with torch.autocast(device, kind):
            value = loss(batch, number)
        return value.float() if value.dtype == kind else value

    return cast
