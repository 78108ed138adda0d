"""Evaluation of personalised models (methods of type ``Personal``): each client's model on the client's examples.

The server's process requests the models of a few clients at a time from the method, and workers evaluate the models.
So the models and memories of all clients are never in RAM at the same time. A client's metrics depend only on the
client's model, the client's examples and the seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fedcommons.core.algorithm import BUFFERS, Adapts, Algorithm, Personal
from fedcommons.core.block_sum import cut
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import CHUNK, Each, ModelTask, by_metric, on_own
from fedcommons.core.executor import Executor
from fedcommons.core.returned import require_personal
from fedcommons.core.updates import without_errors
from fedcommons.core.worker import Worker
from fedcommons.errors import user_code_context
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.flat_tensors import EMPTY, Flat, Payload, copy, flat, to_device
from fedcommons.seeding import seed_for, set_default_generator

CLIENTS = 4
"""Maximum number of clients per job. The executor gets at most ``Plan.blocks`` jobs at a time."""


@runtime_checkable
class Predicts(Protocol):
    """A personalised method whose clients predict classes by another rule than the largest logit of the model."""

    def predictions(self, work: Work, personal: Payload, x: Tensor) -> Tensor | None:
        """Return the predicted class of each example for ``accuracy``; None: the class with the largest logit.

        Args:
            work: the worker; ``work.module`` has the weights of the client's model and is in evaluation mode.
            personal: all tensors that the method's ``personal`` returned for the client, including the model.
            x: (B, ...), a batch of B examples.
        """
        ...


@dataclass(frozen=True)
class Job:
    """The personalised models that one worker evaluates.

    models: client -> weights, module buffers, and all other tensors that the method's ``personal`` returned.
    on_tests: evaluate on the client's test examples.
    """

    models: Mapping[int, Payload]
    on_tests: bool


def personal_model(algorithm: Algorithm, now: Standing, client: int, *, keep_buffers: bool) -> tuple[Flat, Flat]:
    """Return the weights and the module buffers of a client's personalised model in the state ``now``.

    If the method returns no buffers, return the averaged buffers or, with ``keep_buffers``, the buffers in the client's
    memory. These buffers are empty before round 1 and for a module without buffers.

    Raises:
        ClientError: the method raised an error, or its ``personal`` returned tensors of a wrong form.
    """
    whole = personal_payload(algorithm, now, client, keep_buffers=keep_buffers)
    return flat(whole, "model"), flat(whole, "buffers")


def personal_payload(algorithm: Algorithm, now: Standing, client: int, *, keep_buffers: bool) -> Payload:
    """Return the tensors of the method's ``personal`` for a client, with the buffers of ``personal_model``."""
    assert isinstance(algorithm, Personal)
    client_memory = now.memory.get(client, {})
    memory = {name: x for name, x in without_errors(client_memory).items() if name != BUFFERS}
    with user_code_context(algorithm, "personal", f"client {client}", f"round {now.round}"):
        message = algorithm.down(now.state, now.round + 1, client)
        payload = algorithm.personal(now.state, memory, message)
        require_personal(payload)
    buffers = client_memory.get(BUFFERS, EMPTY) if keep_buffers else now.buffers
    return {"buffers": buffers, **payload}


def evaluate_personal(
    algorithm: Algorithm, executor: Executor, at: ModelTask, now: Standing, plan: Plan, *, on_tests: bool
) -> Each:
    """Evaluate every client's personalised model on the client's examples; return each metric as a list over clients.

    at: seed, round and step of the evaluation; ``at.model`` is not used. on_tests: use the clients' test examples
    instead of the training examples.
    """
    n, metrics = plan.facts.n_clients, list[dict[str, float]]()
    task = replace(at, model=EMPTY, buffers=EMPTY)
    for first in range(0, n, CLIENTS * plan.blocks):
        clients = range(first, min(first + CLIENTS * plan.blocks, n))
        jobs = [
            Job({i: personal_payload(algorithm, now, i, keep_buffers=plan.keep_buffers) for i in some}, on_tests)
            for some in cut(clients, plan.blocks)
        ]
        metrics += chain.from_iterable(executor.map(evaluate_some_models, task, jobs))
    return by_metric(metrics)


def evaluate_some_models(worker: Worker, task: ModelTask, job: Job) -> list[dict[str, float]]:
    """Return for each client of the job the metrics of its model, as means over the client's examples."""
    results = []
    for client, personal in job.models.items():
        client_model = replace(task, model=flat(personal, "model"), buffers=flat(personal, "buffers"))
        with user_code_context(worker.algorithm, "personal", f"client {client}", f"round {task.round}"):
            client_model.load(worker.work)
        if isinstance(worker.algorithm, Adapts):
            adapt(worker, worker.algorithm, client_model, client)
        metrics = on_own(worker, task, client, job.on_tests)
        if isinstance(worker.algorithm, Predicts) and "accuracy" in metrics:
            personal = to_device(personal, worker.work.device)
            metrics = {**metrics, **_by_own_rule(worker, worker.algorithm, task, client, personal, job.on_tests)}
        results.append(metrics)
    return results


def adapt(worker: Worker, algorithm: Adapts, at: ModelTask, client: int) -> None:
    """Adapt the loaded model ``at`` to the client's training examples and load the result for evaluation."""
    work, rows, seed = worker.work, worker.data.clients[client], seed_for(at.seed, "adapt", client)
    set_default_generator(seed, "client")
    work.begin(0, rows)  # outside of rounds, so no learning rate schedule applies
    with user_code_context(algorithm, "adapt", f"client {client}", f"round {at.round}"):
        model = copy(algorithm.adapt(work, at.on(work.device), rows, seed))
        replace(at, model=model, buffers=copy(work.buffers)).load(work)


def _by_own_rule(
    worker: Worker, algorithm: Predicts, task: ModelTask, client: int, personal: Payload, on_tests: bool
) -> dict[str, float]:
    """Return the accuracy of the method's ``predictions``; an empty dict if ``predictions`` returns None."""
    data_sets = worker.data.tests if on_tests and worker.data.tests is not None else worker.data.real
    examples, right = data_sets[client], 0
    for first in range(0, len(examples), CHUNK):
        set_default_generator(task.seed, "client", client, first)
        x, y = examples.x[first : first + CHUNK], examples.y[first : first + CHUNK]
        with torch.no_grad(), user_code_context(algorithm, "predictions", f"client {client}", f"round {task.round}"):
            predicted = algorithm.predictions(worker.work, personal, x)
            if predicted is None:
                return {}
            if predicted.shape != y.shape:
                raise ValueError(f"it must return a class for each of {len(y)} examples, got {tuple(predicted.shape)}")
        right += int((predicted == y).sum())
    return {"accuracy": right / len(examples)}
