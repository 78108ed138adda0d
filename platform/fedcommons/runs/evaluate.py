"""Evaluation in a run: metrics of the server model and the clients after a round, and the summary of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedcommons.config import registry, target
from fedcommons.config.dotted import is_ignored, recorded
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core import rejections
from fedcommons.core.algorithm import Personal
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import trainable_parameters
from fedcommons.core.evaluation import Each, ModelTask, evaluate, evaluate_clients, spread
from fedcommons.core.executor import Executor
from fedcommons.federation.personal_evaluation import evaluate_personal
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import EMPTY, flat, flatten
from fedcommons.privacy.mechanisms import mechanisms
from fedcommons.privacy.statement import statement
from fedcommons.runs import effective
from fedcommons.runs.build import Assembled
from fedcommons.runs.early_stopping import stop_of
from fedcommons.runs.user_metric import measured
from fedcommons.runs.worker import build_module, local_loop
from fedcommons.seeding import seed_for
from fedcommons.tracking.metric_names import NAMES
from fedcommons.tracking.run_folder import accuracies, last_of

OF_CLIENTS = ("clients/", "personal/")
"""Prefixes of the clients' metrics in rounds.jsonl; summary.json has the values of the last round."""


def observe(ready: Assembled, executor: Executor, now: Standing, last: int | None = None) -> dict[str, float]:
    """Return the metrics after a round, by name.

    In rounds of ``evaluate.every`` these are the server model's metrics on test and validation data, and the test
    metrics of the method's further models. In rounds of ``measure.every`` they are also the convergence parameters at
    the server model and the numbers of the user-defined measure. If the method has no server model, its metrics are
    missing. The module's random draws are keyed by round, data set and chunk.

    now: the state after the round. last: number of the run's last round; None: the planned number of rounds.
    """
    config, data, at = ready.config, ready.data, _at(ready, now)
    sizes = {name: len(examples) for name, examples in data.sets.items()}
    last = last or config.federation.rounds
    is_due = due(now.round, config.evaluate.every, last)
    metrics = evaluate(executor, at, sizes) if is_due and now.has_model else {}
    for name in now.state:
        if name.startswith("model/") and is_due:
            of_other = evaluate(executor, replace(at, model=flat(now.state, name)), {"test": sizes["test"]})
            metrics |= {f"{name.removeprefix('model/')}/{key}": value for key, value in of_other.items()}
    m, f = config.measure, config.federation
    if m.every and due(now.round, m.every, last):
        laboratory = Laboratory(executor, data, ready.shared.p, f.blocks, m.samples, config.seed)
        at = replace(at, buffers=now.buffers)
        for name, estimate in laboratory.measure(at, m.smoothness).items():
            metrics[f"convergence/{name}"] = estimate.value
            if estimate.standard_error:
                metrics[f"convergence/{name}_se"] = estimate.standard_error
        metrics["convergence/bytes"] = laboratory.nbytes(at, m.smoothness)
        if m.measure:
            metrics |= measured(executor, at, m.measure, m.constants)
    return metrics


def of_clients(
    ready: Assembled, executor: Executor, now: Standing, last: int | None = None
) -> tuple[Each, dict[str, float]]:
    """Return the metrics of each client for clients.jsonl, and their statistics over clients for rounds.jsonl.

    Both are empty if no evaluation of clients is requested. Each list has a value per client: ``n``, the number of the
    client's examples; the server model's metrics on these examples; and ``personal/NAME``, metrics of the client's
    personal model. The examples are the client's test examples. If no client has test examples, its training examples
    are used, and metrics are called ``train_NAME``. With ``measure.clients`` the training examples are always used, and
    the names have no prefix. last: see ``observe``.
    """
    c, n = ready.config, len(ready.data.real)
    if not (c.measure.clients or c.evaluate.clients):
        return {}, {}
    if not due(now.round, c.evaluate.every, last or c.federation.rounds):
        return {"n": []}, {}
    at, on_tests, models = _at(ready, now), ready.data.tests is not None, dict[str, Each]()
    if c.measure.clients:
        client_metrics = evaluate_clients(executor, at, n)
        return client_metrics, worst(client_metrics)
    if now.has_model:
        models["clients"] = evaluate_clients(executor, at, n, on_tests=on_tests)
    if isinstance(ready.algorithm, Personal):
        models["personal"] = evaluate_personal(ready.algorithm, executor, at, now, ready.plan, on_tests=on_tests)
    lists, numbers = dict[str, list[float]](), dict[str, float]()
    for which, client_metrics in models.items():
        lists["n"] = sizes = client_metrics.pop("n")
        named = client_metrics if on_tests else {f"train_{metric}": values for metric, values in client_metrics.items()}
        lists |= {f"personal/{m}" if which == "personal" else m: values for m, values in named.items()}
        for metric, values in named.items():
            numbers |= {f"{which}/{metric}_{what}": value for what, value in spread(metric, values, sizes).items()}
    return lists, numbers


def due(round: int, every: int, last: int) -> bool:
    """Check whether a task is due after a round: every ``every`` rounds, in round 0 and in the last round."""
    return round % every == 0 or round == last


def _at(ready: Assembled, now: Standing) -> ModelTask:
    """Return the task to evaluate the server model after a round, with an empty model if the method has none."""
    buffers = None if ready.config.federation.buffers == "keep" else now.buffers
    model = now.model if now.has_model else EMPTY
    seed, chunk = seed_for(ready.config.seed, "observed", now.round), ready.config.evaluate.chunk
    return ModelTask(model, buffers, seed, now.round, ready.steps, chunk)


def worst(clients: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the number of the first client with the lowest accuracy, and this accuracy, as metrics by name.

    clients: metrics by name, each with a value per client. The result is empty if there are no accuracies.
    """
    if "accuracy" not in clients:
        return {}
    accuracies = clients["accuracy"]
    return {"clients/worst": accuracies.index(min(accuracies)), "clients/worst_accuracy": min(accuracies)}


def summarise(
    ready: Assembled, lines: Sequence[Mapping[str, Any]], end: Standing, *, is_secret: bool
) -> dict[str, Any]:
    """Return the summary of a run. It has no times and paths, so a resumed run has the same summary.

    Args:
        lines: the lines of rounds.jsonl.
        end: the state after the last round.
        is_secret: the noise is secret, so that it cannot be drawn again from the seed.

    Accuracies and rounds-to-target are those of the server model on the test data. They are None for a method without a
    server model, whose clients have personal models. With ``evaluate.clients`` the summary also has the clients'
    metrics of the last round. Fields:
        p: the share of received examples in the clients' training data.
        disclosed: the share of the clients' examples that were released without a privacy guarantee, raw or in
            synthetic data computed from them. Model updates do not count.
        bytes_lost: the bytes of ``bytes_down`` that were sent to clients without a reply, if there are stragglers.
        stopped: the round and the reason, if the run ended before its last round.
        config: the experiment's fields by dotted name.
        effective: the values of fields that follow from a rule (see ``effective``).
        rejected: the number of rejected replies per client, and the reason of the client's first rejection.
    """
    c, flat, split, shared, ledger = ready.config, ready.config.flat, ready.prepared.partition, ready.shared, end.ledger
    sizes, facts, dp = [len(rows) for rows in split.rows], ready.plan.facts, ready.config.dp
    # A client may also disclose examples that it received. So its number is capped at its number of real examples.
    n_disclosed = sum(min(n, sizes[i]) for i, n in ledger.n_disclosed.items())
    own_code = {kind: name.rpartition("/")[2] for kind, name in c.chosen.items() if registry.is_user_defined(name)}
    rejected = sum(line.get("rejected", 0) for line in lines)
    privacy = statement(
        ledger,
        facts.n_clients,
        dp.delta,
        rejected,
        local=dp.local,
        secret=is_secret,
        user_code=own_code,
        views=shared.views,
    )
    if any((tables := mechanisms(ledger, shared.releases, dp.delta, dp.clip if dp.local else None)).values()):
        privacy["mechanisms"] = tables
    used = effective.of_data(flat, ready.prepared.dataset, ready.plan)
    if capabilities_of(ready.algorithm).trains_locally:
        used |= effective.of_local_steps(local_loop(c, ready.facts.augment), ready.data.clients, ledger)
    used |= effective.of_sharing(flat, shared, effective.constants_of(ready.prepared.stage, ready.prepared.client_data))
    used |= effective.of_generators(flat, ready.prepared.requests, shared.releases)
    if hasattr(ready.algorithm, "effective_constants"):
        model, section = (
            flatten(trainable_parameters(build_module(c, ready.facts))),
            registry.section("algorithm", c.algorithm),
        )
        used |= effective.of_algorithm(ready.algorithm, section, model, facts, c.client.epochs)
    after = accuracies(lines)

    def course(name: str) -> list[list[float]]:
        key = f"convergence/{name}"
        return [[line["round"], line[key]] for line in lines if key in line]

    return {
        "dataset": c.data.name,
        "algorithm": c.algorithm,
        "setting": c.sharing.setting,
        "alpha": flat.get("partition.alpha"),
        "n_clients": len(split.rows),
        "participation": c.federation.participation,
        "seed": c.seed,
        "learning_rate": c.client.lr,
        "target": c.target,
        "rounds_to_target": target.first(c.target, lines),
        "rounds": end.round,
        "last_accuracy": after[-1][1] if after else None,
        "best_accuracy": max((accuracy for _, accuracy in after), default=None),
        "validation_accuracy": last_of(lines, "validation/accuracy"),
        "p": shared.p,
        "disclosed": n_disclosed / sum(sizes),
        "bytes_down": end.traffic.down,
        "bytes_up": end.traffic.up,
        "bytes_once": end.traffic.once,
        **({"bytes_lost": end.traffic.lost} if "stragglers" in lines[-1] else {}),
        **({"stopped": reason} if (reason := stop_of(c).reason_to_stop(lines)) else {}),
        "rejected": rejections.records(end.rejected),
        "partition": split.fingerprint,
        "config": {n: list(v) if type(v) is tuple else v for n, v in recorded(flat).items() if not is_ignored(n)},
        **{name: points for name in NAMES if (points := course(name))},
        **({n: v for n, v in lines[-1].items() if n.startswith(OF_CLIENTS)} if c.evaluate.clients else {}),
        **shared.facts,
        "privacy": privacy,
        "effective": used,
        **({"audit": ready.audited.facts} if ready.audited else {}),
    }
