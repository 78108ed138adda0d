"""Evaluation of clients that join after training: each client tests the received model, adapts it and tests again.

A new client receives the server model x. If the method has no server model, the client receives the personal model of a
client that never took part, in which layers that are not sent have their initial values. The client then trains this
model on its training examples, by the method's ``adapt`` if the method has this function (``Adapts``), else by local
SGD. It sends nothing, so training adds no privacy noise and the ledger has no entry. Workers get the new clients'
examples with this job only, after the last round, so no object of a worker can carry these examples into training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedcommons.core.algorithm import Adapts, Algorithm, State
from fedcommons.core.block_sum import cut
from fedcommons.core.evaluation import Each, ModelTask, by_metric, on_own
from fedcommons.core.executor import Executor
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.new_clients import NewClients
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation.personal_evaluation import Predicts, adapt, personal_payload
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.flat_tensors import EMPTY, copy, flat
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class Adaptation:
    """The input that all jobs share: the received model, the new clients, and the number of epochs (0: no training)."""

    received: ModelTask
    new: NewClients
    epochs: int


def received_model(algorithm: Algorithm, at: ModelTask, now: Standing, plan: Plan) -> ModelTask:
    """Return the task to evaluate the model that a new client receives; ``at``: the task to evaluate the server model.

    Raises:
        ClientError: the method has no server model, and its ``down`` or ``personal`` failed for an unknown client.
    """
    if now.has_model:
        return at
    payload = personal_payload(algorithm, now, plan.facts.n_clients, keep_buffers=plan.keep_buffers)
    return replace(at, model=flat(payload, "model"), buffers=flat(payload, "buffers"))


def require_received_model(algorithm: Algorithm, name: str, state: State, plan: Plan) -> None:
    """Check before any work that the method ``name`` has a model for a client that never took part.

    Raises:
        UserError: the method has no such model, or its clients predict by a rule of the method.
    """
    if isinstance(algorithm, Predicts):
        raise UserError(f"evaluate.new_clients is not defined for {name}, whose clients predict by their own rule.")
    try:
        received_model(algorithm, ModelTask(EMPTY), Standing(0, state), plan)
    except ClientError as error:
        raise UserError(f"evaluate.new_clients: {name} has no model for a new client: {sentence(error)}") from error


def evaluate_new_clients(executor: Executor, task: Adaptation, blocks: int) -> Each:
    """Return each metric as a list over new clients; ``adapted_NAME`` are the metrics of the adapted models."""
    jobs = cut(range(len(task.new.numbers)), blocks)
    return by_metric([metrics for part in executor.map(adapt_some_clients, task, jobs) for metrics in part])


def adapt_some_clients(worker: Worker, task: Adaptation, clients: Sequence[int]) -> list[dict[str, float]]:
    """Return, per new client, the metrics of both models on the client's test examples, and their number ``n``."""
    work, new, received, results = worker.work, task.new, task.received, list[dict[str, float]]()
    data = RunData(new.clients, new.clients, n_classes=worker.data.n_classes, tests=new.tests).to(work.device)
    loop, worker = replace(work.loop, epochs=task.epochs, dp=None), replace(worker, data=data)
    for i in clients:
        received.load(work)
        results.append(metrics := on_own(worker, received, i, on_tests=True))
        if task.epochs and isinstance(worker.algorithm, Adapts):
            received.load(work)  # the evaluation may have changed the statistics of BatchNorm
            adapt(worker, worker.algorithm, received, i)
        elif task.epochs:
            work.begin(0)  # outside of rounds, so no learning rate schedule applies
            received.load(work)
            trained = loop.run(work, received.on(work.device), data.real[i], seed_for(received.seed, "adaptation", i))
            replace(received, model=copy(trained.model), buffers=copy(work.buffers)).load(work)
        if task.epochs:
            after = on_own(worker, received, i, on_tests=True)
            metrics |= {f"adapted_{name}": value for name, value in after.items() if name != "n"}
    return results
