"""Evaluation of a model on common data sets or on each client's examples, in chunks of fixed size.

The executor's workers evaluate the chunks. The metrics are accuracy and loss, or the metrics that the module's
``validation_step`` logs or returns. Before each chunk, the random generators are seeded by the task's seed, the data
set (or client) and the chunk.
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
from fedcommons.errors import user_code_context
from fedcommons.flat_tensors import EMPTY, Flat, data
from fedcommons.seeding import set_default_generator
from lightning_modules.classifier import by_example

CHUNK = 1000  # default number of examples per chunk; fixed, so that no sum depends on the number of workers
CLIENTS = 50  # number of clients per job of the executor if the model is evaluated on each client's data

Totals = dict[str, tuple[float, int]]
"""Name of a metric -> (sum, number of terms); the metric's value is the quotient."""

Each = dict[str, list[float]]
"""Name of a metric -> list with a value per client, in the order of the clients."""


@dataclass(frozen=True)
class ModelTask:
    """A model to evaluate, with the module's buffers (BatchNorm's statistics).

    buffers: None means that BatchNorm uses the statistics of the batch. seed: seed for random numbers that the module
    draws (latent codes of a VAE, noise). round: number of the round after which the model is evaluated. step: number of
    local steps per round of a client with the mean number of examples. A module can read ``round`` and ``step`` for a
    schedule (``core.trainer_shim``). chunk: number of examples that the module sees at once.
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
        """Return the model on ``device``; a process copies the model only once for all jobs of this task."""
        copies: dict[torch.device, Flat] = self.__dict__.setdefault("_copies", {})
        if device not in copies:
            copies[device] = Flat(self.model.layout, self.model.buffer.detach().to(device))
        return copies[device]

    def load(self, work: Work) -> None:
        """Load this model and the buffers into the worker's module, and set the module to evaluation mode."""
        work.load(self.on(work.device))
        work.load_buffers(self.buffers or work.initial_buffers)
        work.clock.set(self.round, self.round * work.loop.epochs, self.round * self.step)
        work.module.eval()
        if self.buffers is None:
            for layer in work.module.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.train()


def evaluate(executor: Executor, at: ModelTask, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return ``NAME/accuracy`` in [0, 1] and ``NAME/loss`` (mean cross entropy) for each data set NAME.

    If the module has a ``validation_step``, the result contains the metrics of this function instead: numbers are
    averaged over the examples, and torchmetrics objects cover the whole data set. ``accuracy`` is added if it is
    missing and the module returns logits, (B, classes). sizes: name of each data set -> number of examples.
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
    """Return, per client, each metric of ``evaluate`` on the client's examples, and the number ``n`` of examples.

    on_tests: evaluate on the clients' test examples, if any, instead of their real training examples. Metrics of a
    client without examples are nan.
    """
    jobs = [(on_tests, range(first, min(first + CLIENTS, n_clients))) for first in range(0, n_clients, CLIENTS)]
    return by_metric([metrics for results in executor.map(evaluate_some_clients, at, jobs) for metrics in results])


def evaluate_some_clients(worker: Worker, task: ModelTask, job: tuple[bool, range]) -> list[dict[str, float]]:
    """Return, for each client of a job (on_tests, clients), the metrics averaged over the client's examples."""
    on_tests, clients = job
    task.load(worker.work)
    return [on_own(worker, task, client, on_tests) for client in clients]


def on_own(worker: Worker, task: ModelTask, client: int, on_tests: bool) -> dict[str, float]:
    """Return metrics of the model loaded in ``worker`` on one client's examples, and the number ``n`` of examples."""
    all_data = worker.data.tests if on_tests and worker.data.tests is not None else worker.data.real
    examples = all_data[client]
    return {
        "n": len(examples),
        **_means(_of_chunks(worker, task, examples, range(0, len(examples), task.chunk), "client", client)),
    }


def by_metric(of_clients: Sequence[Mapping[str, float]]) -> Each:
    """Convert a list of the clients' metrics to lists by metric name; nan stands for a metric that a client lacks."""
    names = dict.fromkeys(name for metrics in of_clients for name in metrics)
    return {name: [metrics.get(name, nan) for metrics in of_clients] for name in names}


def spread(metric: str, values: Sequence[float], sizes: Sequence[float]) -> dict[str, float]:
    """Return statistics of a metric over the N clients that have examples.

    v_i: value of client i (``values``);  n_i: number of examples of client i (``sizes``).  mean: sum v_i / N.
    weighted_mean: sum n_i v_i / sum n_i.  std: sqrt(sum (v_i - mean)^2 / N).  worst_decile: the mean over the
    ceil(N/10) clients with the smallest accuracies, or the largest losses (Li et al., "Fair resource allocation in
    federated learning", ICLR 2020, arXiv:1905.10497, tables 1 and 2). Only metrics with accuracy or loss in
    the name have ``worst_decile``. All statistics are nan if a value is not finite.
    """
    pairs = [(v, n) for v, n in zip(values, sizes, strict=True) if n]
    names, is_loss = ["mean", "weighted_mean", "std"], "loss" in metric
    names += ["worst_decile"] if is_loss or "accuracy" in metric else []
    if not pairs or not all(isfinite(v) for v, _ in pairs):
        return dict.fromkeys(names, nan)
    mean = fsum(v for v, _ in pairs) / len(pairs)
    weighted = fsum(n * v for v, n in pairs) / fsum(n for _, n in pairs)
    std = sqrt(fsum((v - mean) ** 2 for v, _ in pairs) / len(pairs))
    worst = sorted((v for v, _ in pairs), reverse=is_loss)[: -(-len(pairs) // 10)]
    return dict(zip(names, (mean, weighted, std, fsum(worst) / len(worst)), strict=False))


def evaluate_chunk(worker: Worker, task: ModelTask, job: tuple[str, int]) -> Totals:
    """Return the sums of the metrics over the chunk of a job (name of the data set, index of the first example).

    For a module with torchmetrics objects, the job of the first chunk evaluates all chunks of the data set in order.
    The reason: some torchmetrics objects of several jobs cannot be merged, and others depend on the order of merging.
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
    """Return metric -> (sum over the chunks, number of examples); for a torchmetrics object (value, 1)."""
    totals, work = Totals(), worker.work
    with work.logged:
        for first in firsts:
            set_default_generator(task.seed, *key, first)
            rows = slice(first, first + task.chunk)
            x, y = examples.x[rows], examples.y[rows]
            sums = judged(work, x, y, first // task.chunk, worker.data.n_classes)
            _add(totals, {metric: (total, len(y)) for metric, total in sums.items()})
    return totals | {metric: (float(value), 1) for metric, value in work.logged.values().items()}


def judged(work: Work, x: Tensor, y: Tensor, number: int, n_classes: int | None, called: str = "") -> dict[str, float]:
    """Return metric -> sum over the examples (x, y). Metrics that the module logs as torchmetrics objects are omitted.

    number: batch index for ``validation_step``. n_classes: number of classes; None: not known; 0: labels are not
    classes. called: name of the module in messages; if empty, the module's file and class.

    Raises:
        ValueError: the module returns no logits, and its ``validation_step`` logs no metric.
        ClientError: the module's code failed.
    """
    at = f"round {work.clock.round}"
    with torch.no_grad():
        with user_code_context(called or work.module, "", "validation_step", at):
            metrics, objects = _own_metrics(work, (x, y), number)
            sums = {name: float(value) * len(y) for name, value in metrics.items()}
        names = {*metrics, *objects}
        is_by_position = y.dim() > 1 and not y.is_floating_point()
        if "accuracy" in names or (names and not is_by_position and (n_classes == 0 or y.is_floating_point())):
            return sums  # the module logs accuracy itself, or labels are not classes
        updates = work.logged.metrics.updates
        with user_code_context(called or work.module, "", "forward", at), work.logged:
            logits = work.module(work.inputs(x, y))
        of_classes = (
            isinstance(logits, Tensor)
            and n_classes != 0
            and logits.dim() == 2
            and logits.shape[1] == (n_classes or logits.shape[1])
        )
        if work.logged.metrics.updates != updates:
            raise ValueError(
                "its forward updates a metric, and forward is called again to compute accuracy: update the metric in "
                "validation_step, or log accuracy there"
            )
        if is_by_position and isinstance(logits, Tensor) and logits.shape[:1] + logits.shape[2:] == y.shape:
            loss = {} if names else {"loss": float(by_example(F.cross_entropy(logits, y, reduction="none"), y).sum())}
            return {"accuracy": float(by_example((logits.argmax(1) == y).float(), y).sum()), **loss, **sums}
        if of_classes:
            loss = {} if names else {"loss": float(F.cross_entropy(logits, y, reduction="sum"))}
            return {"accuracy": int((logits.argmax(1) == y).sum()), **loss, **sums}
        if names:
            return sums
        shape = tuple(logits.shape[1:]) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"its forward returns {shape} for an example, no logits of {n_classes or 'the'} classes, and its "
            "validation_step logs no metric: log accuracy, or another metric of the module, in validation_step"
        )


def _own_metrics(work: Work, batch: tuple[Tensor, ...], number: int) -> tuple[dict[str, Any], Set[str]]:
    """Return the metrics that ``validation_step`` logs or returns, and the names of the logged torchmetrics objects."""
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
