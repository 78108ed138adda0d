"""Accuracy and loss of the server model, in fixed chunks, through the executor."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from fedcommons.core.executor import Executor
from fedcommons.core.local import Work
from fedcommons.core.worker import Worker
from fedcommons.tensors import EMPTY, Flat, data

CHUNK = 1000  # images in a job: fixed, so that no sum depends on the number of workers


@dataclass(frozen=True)
class ModelTask:
    """A model that jobs look at, with the module's buffers; None: BatchNorm takes the statistics of what it sees."""

    model: Flat
    buffers: Flat | None = field(default_factory=lambda: EMPTY)

    @property
    def nbytes(self) -> int:
        return data(self.model).nbytes + (data(self.buffers).nbytes if self.buffers else 0)

    def load(self, work: Work) -> None:
        """Bring the worker's module to this model, in evaluation mode."""
        work.load(self.model)
        work.load_buffers(self.buffers or work.initial_buffers)
        work.module.eval()
        if self.buffers is None:
            for layer in work.module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.train()


def evaluate(
    executor: Executor, model: Flat, sizes: Mapping[str, int], buffers: Flat | None = EMPTY
) -> dict[str, float]:
    """``NAME/accuracy`` in [0, 1] and ``NAME/loss`` (mean cross entropy) for each named set of these sizes.

    ``buffers``: see ``ModelTask``; empty: as the module was built.
    """
    jobs = [(name, first) for name, n in sizes.items() for first in range(0, n, CHUNK)]
    sums = {name: [0.0, 0.0] for name in sizes}
    for (name, _), (loss, correct) in zip(
        jobs, executor.map(evaluate_chunk, ModelTask(model, buffers), jobs), strict=True
    ):
        sums[name][0] += loss
        sums[name][1] += correct
    return {
        key: value
        for name, n in sizes.items()
        if n
        for key, value in ((f"{name}/accuracy", sums[name][1] / n), (f"{name}/loss", sums[name][0] / n))
    }


def evaluate_chunk(worker: Worker, task: ModelTask, job: tuple[str, int]) -> tuple[float, int]:
    """(sum of losses, number right) of one chunk, in evaluation mode, without augmentation."""
    name, first = job
    part = worker.data.sets[name]
    x, y = part.x[first : first + CHUNK], part.y[first : first + CHUNK]
    task.load(worker.work)
    with torch.no_grad():
        logits = worker.work.module(x)
        return float(F.cross_entropy(logits, y, reduction="sum")), int((logits.argmax(1) == y).sum())
