"""Gradients of the training step at other weights, for methods whose step is not the gradient at the current weights.

A method calls both functions in its loss function (``Work.local``), so the engine still chooses batches, clips, adds
noise, and takes the optimizer's step. Hooks of the module see only the engine's backward pass.
"""

import torch
from torch import Tensor

from fedcommons.core.steps import Batch
from fedcommons.core.training_process import TrainingProcess
from fedcommons.flat_tensors import Flat


def gradient_at(work: TrainingProcess, weights: Flat, batch: Batch, number: int) -> tuple[Tensor, Flat]:
    """Return the loss of a training step on ``batch`` at ``weights``, detached, and its gradient.

    The module keeps its weights, but the step updates BatchNorm's statistics and draws random numbers. With
    ``client.precision fp16-mixed``, no factor scales this loss, so small parts of the gradient may become zero.

    Args:
        work: training objects of the worker process.
        weights: point at which the gradient is computed, with the names and shapes of the module's weights.
        batch: argument of ``training_step``.
        number: argument of ``training_step``, the batch's number.
    """
    before = work.params.buffer.clone()
    work.params.buffer.copy_(weights.buffer)
    torch.clear_autocast_cache()  # autocast casts a weight only once, and would use the values before this copy
    try:
        value = work.module.training_step(batch, number)
        assert isinstance(value, Tensor)
        parts = torch.autograd.grad(value, list(work.named.values()), materialize_grads=True)
    finally:
        work.params.buffer.copy_(before)
        torch.clear_autocast_cache()
    return value.detach(), Flat(weights.layout, torch.cat([part.reshape(-1) for part in parts]))


def with_gradient(work: TrainingProcess, value: Tensor, gradient: Flat) -> Tensor:
    """Return a loss that equals ``value`` and has the gradient ``gradient`` with respect to the module's weights."""
    linear = [(gradient[name] * (weight - weight.detach())).sum() for name, weight in work.named.items()]
    return value + torch.stack(linear).sum()
