"""Accuracy and loss of the server model, in fixed chunks, through the executor.

If the module defines ``validation_step``, the metrics that it logs or returns are used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.nn import functional as F

from fedcommons.core.executor import Executor
from fedcommons.core.local import Work
from fedcommons.core.worker import Worker
from fedcommons.tensors import EMPTY, Flat, data

CHUNK = 1000  # images in a job: fixed, so that no sum depends on the number of workers
CLIENTS = 50  # in a job, where each is evaluated by itself


@dataclass(frozen=True)
class ModelTask:
    """A model to evaluate, with the module's buffers; None: BatchNorm uses the statistics of the batch."""

    model: Flat
    buffers: Flat | None = field(default_factory=lambda: EMPTY)

    @property
    def nbytes(self) -> int:
        return data(self.model).nbytes + (data(self.buffers).nbytes if self.buffers else 0)

    def load(self, work: Work) -> None:
        """Load this model into the worker's module, in evaluation mode."""
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

    With a ``validation_step``: all its metrics, averaged over the examples, and ``accuracy`` if it has none.

    ``buffers``: see ``ModelTask``; empty for the module's initial ones.
    """
    jobs = [(name, first) for name, n in sizes.items() for first in range(0, n, CHUNK)]
    sums: dict[str, float] = {}
    for (name, _), found in zip(jobs, executor.map(evaluate_chunk, ModelTask(model, buffers), jobs), strict=True):
        for metric, total in found.items():
            key = f"{name}/{metric}"
            sums[key] = sums.get(key, 0.0) + total
    return {key: total / sizes[key.partition("/")[0]] for key, total in sums.items()}


def evaluate_clients(
    executor: Executor, model: Flat, n_clients: int, buffers: Flat | None = EMPTY
) -> dict[str, list[float]]:
    """Each metric of ``evaluate`` on the own images of every client, a list by client; and ``n``, how many it holds."""
    jobs = [range(first, min(first + CLIENTS, n_clients)) for first in range(0, n_clients, CLIENTS)]
    found = executor.map(evaluate_some_clients, ModelTask(model, buffers), jobs)
    means = [of_client for some in found for of_client in some]
    return {metric: [of_client[metric] for of_client in means] for metric in means[0]}


def evaluate_some_clients(worker: Worker, task: ModelTask, clients: range) -> list[dict[str, float]]:
    """The metrics of these clients, means over each one's own images."""
    task.load(worker.work)
    found = []
    for client in clients:
        own = worker.data.own[client]
        sums: dict[str, float] = {}
        for first in range(0, len(own), CHUNK):
            for metric, total in _sums(
                worker.work, own.x[first : first + CHUNK], own.y[first : first + CHUNK], 0
            ).items():
                sums[metric] = sums.get(metric, 0.0) + total
        found.append({"n": len(own), **{metric: total / len(own) for metric, total in sums.items()}})
    return found


def evaluate_chunk(worker: Worker, task: ModelTask, job: tuple[str, int]) -> dict[str, float]:
    """Sums over the examples of one chunk, in evaluation mode, without augmentation."""
    name, first = job
    part = worker.data.sets[name]
    task.load(worker.work)
    return _sums(worker.work, part.x[first : first + CHUNK], part.y[first : first + CHUNK], first // CHUNK)


def _sums(work: Work, x: torch.Tensor, y: torch.Tensor, number: int) -> dict[str, float]:
    """Sums of the module's metrics over these examples."""
    with torch.no_grad():
        own = _own_metrics(work, (x, y), number)
        if own is not None and "accuracy" in own:
            return {name: float(value) * len(y) for name, value in own.items()}
        logits = work.module(x)
        if not (isinstance(logits, torch.Tensor) and logits.dim() == 2):
            raise ValueError("what the module returns is not (B, classes): let its validation_step log accuracy")
        accuracy = {"accuracy": int((logits.argmax(1) == y).sum())}
        if own is not None:
            return accuracy | {name: float(value) * len(y) for name, value in own.items()}
        return accuracy | {"loss": float(F.cross_entropy(logits, y, reduction="sum"))}


def _own_metrics(work: Work, batch: tuple[torch.Tensor, ...], number: int) -> dict[str, Any] | None:
    """What the module's ``validation_step`` logs, or returns as a mapping; None if it does not define one."""
    module = work.module
    if type(module).validation_step is LightningModule.validation_step:
        return None
    with work.logged as logged:
        returned = module.validation_step(batch, number)
    found = dict(returned) if isinstance(returned, Mapping) else {}
    if isinstance(returned, torch.Tensor):
        found["loss"] = returned
    return {**found, **logged.means}
