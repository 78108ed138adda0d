"""Accuracy and loss of the server model, in fixed chunks, through the executor."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fedcommons.federation.executor import Executor
from fedcommons.federation.worker import Worker
from fedcommons.tensors import Flat, data

CHUNK = 1000  # images in a job: fixed, so that no sum depends on the number of workers


@dataclass(frozen=True)
class ModelTask:
    """A model that jobs look at."""

    model: Flat

    @property
    def nbytes(self) -> int:
        return data(self.model).nbytes


def evaluate(executor: Executor, model: Flat, sizes: Mapping[str, int]) -> dict[str, float]:
    """``NAME/accuracy`` in [0, 1] and ``NAME/loss`` (mean cross entropy) for each named set of these sizes."""
    jobs = [(name, first) for name, n in sizes.items() for first in range(0, n, CHUNK)]
    sums = {name: [0.0, 0.0] for name in sizes}
    for (name, _), (loss, correct) in zip(jobs, executor.map(evaluate_chunk, ModelTask(model), jobs), strict=True):
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
    worker.work.load(task.model)
    worker.work.module.eval()
    with torch.no_grad():
        logits = worker.work.module(x)
        return float(F.cross_entropy(logits, y, reduction="sum")), int((logits.argmax(1) == y).sum())
