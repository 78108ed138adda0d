"""Each client's own model, of a method that has such models (``Personal``), on this client's own examples.

The server's process asks the method for the models of some clients at a time, and workers evaluate them, so that the
models and memories of all clients are never held at once. A client's numbers depend on its model, its examples and the
seed alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedcommons.core.algorithm import BUFFERS, Algorithm, Personal, require_personal
from fedcommons.core.executor import Executor
from fedcommons.core.reduction import cut
from fedcommons.core.worker import Worker
from fedcommons.errors import somebodys
from fedcommons.federation.evaluation import Each, ModelTask, by_metric, on_own
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.tensors import EMPTY, Flat, flat

CLIENTS = 4
"""Clients in a job; as many jobs as a round has blocks are handed out at a time."""


@dataclass(frozen=True)
class Job:
    """Some clients' models, each with the buffers it is evaluated with."""

    models: Mapping[int, tuple[Flat, Flat]]
    on_tests: bool


def personal_model(algorithm: Algorithm, now: Standing, client: int, *, keep_buffers: bool) -> tuple[Flat, Flat]:
    """The weights and the buffers that the client would use now; keep_buffers: see ``Plan``.

    Where the method gives no buffers: those that the client keeps, or the averaged ones (``federation.buffers``); empty
    where there are none yet.

    Raises:
        ClientError: the method failed, or gave something else.
    """
    assert isinstance(algorithm, Personal)
    held = now.memory.get(client, {})
    memory = {name: x for name, x in held.items() if name != BUFFERS}
    with somebodys(algorithm, "personal", f"client {client}", f"round {now.round}"):
        message = algorithm.down(now.state, now.round + 1, client)
        given = algorithm.personal(now.state, memory, message)
        require_personal(given)
    kept = held.get(BUFFERS, EMPTY) if keep_buffers else now.buffers
    whole = {"buffers": kept, **given}
    return flat(whole, "model"), flat(whole, "buffers")


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
        models = {i: personal_model(algorithm, now, i, keep_buffers=plan.keep_buffers) for i in clients}
        jobs = [Job({i: models[i] for i in some}, on_tests) for some in cut(clients, plan.blocks)]
        found += [of for some in executor.map(evaluate_some_models, task, jobs) for of in some]
    return by_metric(found)


def evaluate_some_models(worker: Worker, task: ModelTask, job: Job) -> list[dict[str, float]]:
    """The metrics of these clients' models, means over each one's own examples."""
    found = []
    for client, (model, buffers) in job.models.items():
        with somebodys(worker.algorithm, "personal", f"client {client}", f"round {task.round}"):
            replace(task, model=model, buffers=buffers).load(worker.work)
        found.append(on_own(worker, task, client, job.on_tests))
    return found
