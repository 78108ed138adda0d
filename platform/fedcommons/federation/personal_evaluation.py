"""Each client's own model, of a method that has such models (``Personal``), on this client's own examples.

The server's process asks the method for the models of some clients at a time, and workers evaluate them, so that the
models and memories of all clients are never held at once. A client's numbers depend on its model, its examples and the
seed alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedcommons.core.algorithm import BUFFERS, Algorithm, Personal
from fedcommons.core.block_sum import cut
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import CHUNK, Each, ModelTask, by_metric, on_own
from fedcommons.core.executor import Executor
from fedcommons.core.returned import require_personal
from fedcommons.core.worker import Worker
from fedcommons.errors import somebodys
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.flat_tensors import EMPTY, Flat, Payload, flat, to_device
from fedcommons.seeding import set_default_generator

CLIENTS = 4
"""Clients in a job; as many jobs as a round has blocks are handed out at a time."""


@runtime_checkable
class Predicts(Protocol):
    """A method (``Personal``) whose clients predict classes otherwise than by the largest logit of their models."""

    def predictions(self, work: Work, personal: Payload, x: Tensor) -> Tensor | None:
        """Return the predicted class of each example, by which ``accuracy`` counts; None: the largest logit decides.

        Args:
            work: its module has the client's own weights and is in evaluation mode.
            personal: what ``personal`` gave for the client, its model and all else.
            x: (B, ...), examples.
        """
        ...


@dataclass(frozen=True)
class Job:
    """Some clients' models, each with the buffers it is evaluated with; others: what else ``personal`` gave."""

    models: Mapping[int, tuple[Flat, Flat]]
    on_tests: bool
    others: Mapping[int, Payload]


def personal_model(algorithm: Algorithm, now: Standing, client: int, *, keep_buffers: bool) -> tuple[Flat, Flat]:
    """The weights and the buffers that the client would use now; keep_buffers: see ``Plan``.

    Where the method gives no buffers: those that the client keeps, or the averaged ones (``federation.buffers``); empty
    where there are none yet.

    Raises:
        ClientError: the method failed, or gave something else.
    """
    whole = personal_payload(algorithm, now, client, keep_buffers=keep_buffers)
    return flat(whole, "model"), flat(whole, "buffers")


def personal_payload(algorithm: Algorithm, now: Standing, client: int, *, keep_buffers: bool) -> Payload:
    """Return all that the method's ``personal`` gives for a client, with ``buffers``; see ``personal_model``."""
    assert isinstance(algorithm, Personal)
    held = now.memory.get(client, {})
    memory = {name: x for name, x in held.items() if name != BUFFERS}
    with somebodys(algorithm, "personal", f"client {client}", f"round {now.round}"):
        message = algorithm.down(now.state, now.round + 1, client)
        given = algorithm.personal(now.state, memory, message)
        require_personal(given)
    kept = held.get(BUFFERS, EMPTY) if keep_buffers else now.buffers
    return {"buffers": kept, **given}


def evaluate_personal(
    algorithm: Algorithm, executor: Executor, at: ModelTask, now: Standing, plan: Plan, *, on_tests: bool
) -> Each:
    """Each metric of ``evaluate_clients`` of every client's own model, a list by client.

    at: seed and clock; its model is not used. on_tests: see ``evaluate_clients``.
    """
    n, found = plan.facts.n_clients, list[dict[str, float]]()
    task = replace(at, model=EMPTY, buffers=EMPTY)
    for first in range(0, n, CLIENTS * plan.blocks):
        clients = range(first, min(first + CLIENTS * plan.blocks, n))
        whole = {i: personal_payload(algorithm, now, i, keep_buffers=plan.keep_buffers) for i in clients}
        models = {i: (flat(one, "model"), flat(one, "buffers")) for i, one in whole.items()}
        rest = {i: {n: x for n, x in one.items() if n not in ("model", "buffers")} for i, one in whole.items()}
        jobs = [
            Job({i: models[i] for i in some}, on_tests, {i: rest[i] for i in some})
            for some in cut(clients, plan.blocks)
        ]
        found += [of for some in executor.map(evaluate_some_models, task, jobs) for of in some]
    return by_metric(found)


def evaluate_some_models(worker: Worker, task: ModelTask, job: Job) -> list[dict[str, float]]:
    """The metrics of these clients' models, means over each one's own examples."""
    found = []
    for client, (model, buffers) in job.models.items():
        with somebodys(worker.algorithm, "personal", f"client {client}", f"round {task.round}"):
            replace(task, model=model, buffers=buffers).load(worker.work)
        metrics = on_own(worker, task, client, job.on_tests)
        if isinstance(worker.algorithm, Predicts) and "accuracy" in metrics:
            personal = {**to_device(job.others[client], worker.work.device), "model": model, "buffers": buffers}
            metrics = {**metrics, **_by_own_rule(worker, worker.algorithm, task, client, personal, job.on_tests)}
        found.append(metrics)
    return found


def _by_own_rule(
    worker: Worker, algorithm: Predicts, task: ModelTask, client: int, personal: Payload, on_tests: bool
) -> dict[str, float]:
    """Return the accuracy by the method's own predictions; nothing where it makes none."""
    held = worker.data.tests if on_tests and worker.data.tests is not None else worker.data.own
    own, right = held[client], 0
    for first in range(0, len(own), CHUNK):
        set_default_generator(task.seed, "client", client, first)
        x, y = own.x[first : first + CHUNK], own.y[first : first + CHUNK]
        with torch.no_grad(), somebodys(algorithm, "predictions", f"client {client}", f"round {task.round}"):
            predicted = algorithm.predictions(worker.work, personal, x)
            if predicted is None:
                return {}
            if predicted.shape != y.shape:
                raise ValueError(f"it must give a class for each of {len(y)} examples, got {tuple(predicted.shape)}")
        right += int((predicted == y).sum())
    return {"accuracy": right / len(own)}
