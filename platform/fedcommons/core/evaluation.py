"""Accuracy and loss of a model, on common sets or on clients' own examples, in fixed chunks, through the executor.

If the module defines ``validation_step``, the metrics that it logs or returns are used. What a module draws while it is
evaluated is keyed by round, set (or client) and chunk.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import fsum, isfinite, nan, sqrt
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection

from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.data.examples import Examples
from fedcommons.errors import somebodys
from fedcommons.flat_tensors import EMPTY, Flat, data
from fedcommons.seeding import set_default_generator

CHUNK = 1000  # examples that are evaluated at once, by default: fixed, so that no sum depends on the number of workers
CLIENTS = 50  # in a job, where each is evaluated by itself

Totals = dict[str, tuple[float, int]]
"""Metrics by name: a sum and the number of its terms, whose quotient is the metric."""

Each = dict[str, list[float]]
"""Metrics of clients by name, lists by client."""


@dataclass(frozen=True)
class ModelTask:
    """A model to evaluate, with the module's buffers; None: BatchNorm uses the statistics of the batch.

    seed: of what the module draws (a VAE's codes, noise layers), so that these numbers depend on nothing else. round,
    step: after which the model is evaluated, for modules with a schedule (``core.clock``); step: K of a mean client.
    chunk: the number of examples that the module sees at once.
    """

    model: Flat
    buffers: Flat | None = field(default_factory=lambda: EMPTY)
    seed: int = 0
    round: int = 0
    step: int = 0
    chunk: int = CHUNK

    @property
    def nbytes(self) -> int:
        return data(self.model).nbytes + (data(self.buffers).nbytes if self.buffers else 0)

    def on(self, device: torch.device) -> Flat:
        """The model there, copied once for all jobs that a process has of this task."""
        held: dict[torch.device, Flat] = self.__dict__.setdefault("_copies", {})
        if device not in held:
            held[device] = Flat(self.model.layout, self.model.buffer.detach().to(device))
        return held[device]

    def load(self, work: Work) -> None:
        """Load this model into the worker's module, in evaluation mode."""
        work.load(self.on(work.device))
        work.load_buffers(self.buffers or work.initial_buffers)
        work.clock.set(self.round, self.round * work.loop.epochs, self.round * self.step)
        work.module.eval()
        if self.buffers is None:
            for layer in work.module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.train()


def evaluate(executor: Executor, at: ModelTask, sizes: Mapping[str, int]) -> dict[str, float]:
    """``NAME/accuracy`` in [0, 1] and ``NAME/loss`` (mean cross entropy) for each named set of these sizes.

    With a ``validation_step``: all its metrics, numbers averaged over the examples and torchmetrics objects over the
    whole set, and ``accuracy`` if it has none and what the module returns are logits, (B, classes).
    """
    jobs = [(name, first) for name, n in sizes.items() for first in range(0, n, at.chunk)]
    totals: Totals = {}
    for (name, _), chunk in zip(jobs, executor.map(evaluate_chunk, at, jobs), strict=True):
        _add(totals, {f"{name}/{metric}": total for metric, total in chunk.items()})
    return _means(totals)


def _add(totals: Totals, others: Totals) -> None:
    for metric, (total, n) in others.items():
        before, count = totals.get(metric, (0.0, 0))
        totals[metric] = before + total, count + n


def _means(totals: Totals) -> dict[str, float]:
    return {metric: total / n for metric, (total, n) in totals.items()}


def evaluate_clients(executor: Executor, at: ModelTask, n_clients: int, *, on_tests: bool = False) -> Each:
    """Each metric of ``evaluate`` on every client's own examples, a list by client; and ``n``, how many these are.

    on_tests: on its test examples, else on its training examples. Of a client without any the metrics are nan.
    """
    jobs = [(on_tests, range(first, min(first + CLIENTS, n_clients))) for first in range(0, n_clients, CLIENTS)]
    return by_metric([of for some in executor.map(evaluate_some_clients, at, jobs) for of in some])


def evaluate_some_clients(worker: Worker, task: ModelTask, job: tuple[bool, range]) -> list[dict[str, float]]:
    """The metrics of these clients, means over each one's own examples."""
    on_tests, clients = job
    task.load(worker.work)
    return [on_own(worker, task, client, on_tests) for client in clients]


def on_own(worker: Worker, task: ModelTask, client: int, on_tests: bool) -> dict[str, float]:
    """The metrics, on one client's own examples, of the model that the worker has loaded, and ``n``."""
    held = worker.data.tests if on_tests and worker.data.tests is not None else worker.data.own
    own = held[client]
    return {"n": len(own), **_means(_of_chunks(worker, task, own, range(0, len(own), task.chunk), "client", client))}


def by_metric(of_clients: Sequence[Mapping[str, float]]) -> Each:
    """Clients' metrics by name; nan where a client has none."""
    names = dict.fromkeys(name for of in of_clients for name in of)
    return {name: [of.get(name, nan) for of in of_clients] for name in names}


def spread(metric: str, values: Sequence[float], sizes: Sequence[float]) -> dict[str, float]:
    """What a metric is over clients i = 1 .. N that have examples, n_i each (``sizes``), with values v_i.

    mean: sum v_i / N;  weighted_mean: sum n_i v_i / sum n_i;  std: sqrt(sum (v_i - mean)^2 / N);  worst_decile:
    the mean over the ceil(N/10) clients with the smallest accuracies, or the largest losses (Li et al., "Fair resource
    allocation in federated learning", ICLR 2020, arXiv:1905.10497, tables 1 and 2). Of a metric that is neither it is
    not known which clients are the worst. nan where a value is not finite.
    """
    held = [(v, n) for v, n in zip(values, sizes, strict=True) if n]
    names, is_loss = ["mean", "weighted_mean", "std"], "loss" in metric
    names += ["worst_decile"] if is_loss or "accuracy" in metric else []
    if not held or not all(isfinite(v) for v, _ in held):
        return dict.fromkeys(names, nan)
    mean = fsum(v for v, _ in held) / len(held)
    weighted = fsum(n * v for v, n in held) / fsum(n for _, n in held)
    std = sqrt(fsum((v - mean) ** 2 for v, _ in held) / len(held))
    few = sorted((v for v, _ in held), reverse=is_loss)[: -(-len(held) // 10)]
    return dict(zip(names, (mean, weighted, std, fsum(few) / len(few)), strict=False))


def evaluate_chunk(worker: Worker, task: ModelTask, job: tuple[str, int]) -> Totals:
    """Sums over the examples of one chunk, in evaluation mode, without augmentation.

    A module with torchmetrics objects sees all chunks of a set in order, in the job of the first one: not every such
    object can be merged with another, and the sum of states would depend on how they are merged.
    """
    name, first = job
    part, is_whole = worker.data.sets[name], bool(worker.work.logged.metrics.objects)
    if is_whole and first:
        return {}
    task.load(worker.work)
    firsts = range(0, len(part), task.chunk) if is_whole else (first,)
    return _of_chunks(worker, task, part, firsts, name)


def _of_chunks(
    worker: Worker, task: ModelTask, examples: Examples | ClientData, firsts: Iterable[int], *key: str | int
) -> Totals:
    """Sums over the chunks that begin at ``firsts``, and the values of torchmetrics objects over all of them.

    key: what keys the module's draws, with the first example of each chunk.
    """
    totals, work = Totals(), worker.work
    with work.logged:
        for first in firsts:
            set_default_generator(task.seed, *key, first)
            rows = slice(first, first + task.chunk)
            x, y = examples.x[rows], examples.y[rows]
            found = judged(work, x, y, first // task.chunk, worker.data.n_classes)
            _add(totals, {metric: (total, len(y)) for metric, total in found.items()})
    return totals | {metric: (float(value), 1) for metric, value in work.logged.values().items()}


def judged(work: Work, x: Tensor, y: Tensor, number: int, n_classes: int | None, called: str = "") -> dict[str, float]:
    """Sums of the module's metrics over these examples; number: of the batch; n_classes: None where not known, 0
    where labels are no classes. What torchmetrics objects say is no part of it.

    called: what the module is called in a sentence; by its file and class where it is empty.

    Raises:
        ValueError: the module has neither metrics of its own nor logits.
        ClientError: it failed.
    """
    at = f"round {work.clock.round}"
    with torch.no_grad():
        with somebodys(called or work.module, "", "validation_step", at):
            own, objects = _own_metrics(work, (x, y), number)
            sums = {name: float(value) * len(y) for name, value in own.items()}
        names = {*own, *objects}
        if "accuracy" in names or (names and (n_classes == 0 or y.is_floating_point())):
            return sums  # of labels that are no classes there is none
        updates = work.logged.metrics.updates
        with somebodys(called or work.module, "", "forward", at), work.logged:
            logits = work.module(work.inputs(x, y))
        of_classes = (
            isinstance(logits, Tensor)
            and n_classes != 0
            and logits.dim() == 2
            and logits.shape[1] == (n_classes or logits.shape[1])
        )
        if work.logged.metrics.updates != updates:
            raise ValueError(
                "its forward updates a metric, and is called once more for accuracy: update it in validation_step, or "
                "log accuracy there"
            )
        if of_classes:
            loss = {} if names else {"loss": float(F.cross_entropy(logits, y, reduction="sum"))}
            return {"accuracy": int((logits.argmax(1) == y).sum()), **loss, **sums}
        if names:
            return sums
        shape = tuple(logits.shape[1:]) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"its forward returns {shape} for an example, no logits of {n_classes or 'the'} classes, and its "
            "validation_step logs no metric: let it log accuracy, or what else the module is judged by"
        )


def _own_metrics(work: Work, batch: tuple[Tensor, ...], number: int) -> tuple[dict[str, Any], Set[str]]:
    """What the module's ``validation_step`` logs, or returns as a mapping, and the names of the torchmetrics objects
    that it has logged; nothing if it does not define one.
    """
    module = work.module
    if type(module).validation_step is LightningModule.validation_step:
        return {}, set()
    with work.logged as logged:
        returned = module.validation_step(batch, number)
        metrics = dict(returned) if isinstance(returned, Mapping) else {}
        for name in [name for name, value in metrics.items() if isinstance(value, Metric | MetricCollection)]:
            module.log(name, metrics.pop(name))
        if isinstance(returned, MetricCollection):
            module.log_dict(returned)
    if isinstance(returned, Tensor):
        metrics["loss"] = returned
    return {**metrics, **logged.means}, logged.objects
