"""Checks of clients' personal models (``Personal``); other checks use these models if there is no server model."""

from fedcommons.core.algorithm import Adapts, Algorithm, Personal
from fedcommons.core.evaluation import ModelTask, evaluate, evaluate_clients
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import LocalSGD
from fedcommons.federation.personal_evaluation import evaluate_personal, personal_model
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.flat_tensors import Flat
from fedcommons.testing.comparing import copies, require, require_same
from fedcommons.testing.federations import Federation, digits


def models(algorithm: Algorithm, plan: Plan, now: Standing) -> list[Flat]:
    """Return the server model, or all clients' personal models if the method has no server model."""
    if now.has_model:
        return [now.model]
    n, keeps = plan.facts.n_clients, plan.keep_buffers
    return [personal_model(algorithm, now, i, keep_buffers=keeps)[0] for i in range(n)]


def losses(
    federation: Federation, algorithm: Algorithm, executor: Executor, plan: Plan, now: Standing
) -> dict[str, float]:
    """Return training losses by name: the server model's loss, and the mean loss of the clients' personal models.

    Before round 1, personal models of ``Adapts`` are not adapted yet, so that the loss is the untrained model's.
    """
    results = dict[str, float]()
    if now.has_model:
        sizes = {"train": len(federation.data.sets["train"])}
        results["the server model"] = evaluate(executor, ModelTask(now.model), sizes)["train/loss"]
    if isinstance(algorithm, Personal):
        at = ModelTask(federation.model)
        if isinstance(algorithm, Adapts) and not now.round:
            each = evaluate_clients(executor, at, plan.facts.n_clients)["loss"]
        else:
            each = evaluate_personal(algorithm, executor, at, now, plan, on_tests=False)["loss"]
        results["clients' own models"] = sum(each) / len(each)
    return results


def personal_models_are_whole_and_asking_changes_nothing(algorithm: Algorithm, local: LocalSGD) -> None:
    """Check the clients' personal models before round 1 and after each of three rounds.

    A model must have finite values and the names and shapes of the module's weights. Two calls of ``personal`` must
    return equal models and must not change their arguments.
    """
    if not isinstance(algorithm, Personal):
        return
    federation = digits(dropout=0.3, method=algorithm).training(local)
    plan = federation.plan(3, participation=0.4)
    start = federation.start(algorithm, plan)
    for now in (start, *(now for now, _ in federation.run(algorithm, plan, start=start))):
        for client in range(plan.facts.n_clients):
            _require_whole(algorithm, federation, plan, now, client)


def _require_whole(algorithm: Algorithm, federation: Federation, plan: Plan, now: Standing, client: int) -> None:
    message = algorithm.down(now.state, now.round + 1, client)
    sent = {"message.common: ": message.common, "message.individual: ": message.individual}
    inputs = {**sent, "memory: ": now.memory.get(client, {}), "the state: ": now.state}
    before, where = copies(inputs), f"of client {client} after round {now.round}"
    first, again = (personal_model(algorithm, now, client, keep_buffers=plan.keep_buffers) for _ in range(2))
    require_same(before, copies(inputs), "personal changed its arguments in place:")
    same = all(value.buffer.equal(repeated.buffer) for value, repeated in zip(first, again, strict=True))
    require(same or not first[0].buffer.isfinite().all(), f"a second call of personal returns another model {where}")
    model, _ = first
    has_layout = model.layout == federation.model.layout
    require(has_layout, f"the personal model {where} has other names or shapes than the module's weights")
    require(model.buffer.isfinite().all(), f"the personal model {where} has values that are not finite")
