"""Evaluation in a run: metrics of the server model and the clients after a round, and the summary of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedcommons.config import registry, target
from fedcommons.config.dotted import described, fields_with_rules, recorded_config
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core import rejections
from fedcommons.core.algorithm import Personal
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import trainable_parameters
from fedcommons.core.evaluation import Each, ModelTask, evaluate, evaluate_clients, spread
from fedcommons.core.executor import Executor
from fedcommons.federation.client_sampling import accounted
from fedcommons.federation.new_client_evaluation import Adaptation, evaluate_new_clients, received_model
from fedcommons.federation.personal_evaluation import evaluate_personal
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import EMPTY, flat, flatten
from fedcommons.privacy.mechanisms import mechanisms
from fedcommons.privacy.statement import statement
from fedcommons.privacy.user_level import user_level
from fedcommons.runs import effective
from fedcommons.runs.assemble import Assembled
from fedcommons.seeding import seed_for
from fedcommons.tracking.metric_names import NAMES
from fedcommons.tracking.record_schema import last_of
from fedcommons.tracking.run_folder import accuracies

OF_CLIENTS = ("clients/", "personal/", "new/")
"""Prefixes of the names of clients' metrics. The summary contains these metrics of the last round."""


def observe(ready: Assembled, executor: Executor, now: Standing, last: int) -> dict[str, float]:
    """Return the metrics after a round, by name.

    In rounds of ``evaluate.every`` these are the server model's metrics on test and validation data, and the test
    metrics of the method's further models. In rounds of ``measure.every`` they are also the convergence parameters at
    the server model. If the method has no server model, its metrics are missing. The module's random draws are keyed by
    round, data set and chunk.

    now: the state after the round. last: number of the run's last round.
    """
    e, data, at = ready.spec.evaluation, ready.data, model_task(ready, now)
    sizes = {name: len(examples) for name, examples in data.sets.items()}
    is_due = due(now.round, e.every, last)
    metrics = evaluate(executor, at, sizes) if is_due and now.has_model else {}
    if "attack/accuracy" in metrics:  # the label of the attacked images is the backdoor's class
        metrics["attack/success"] = metrics["attack/accuracy"]
    metrics = {name: value for name, value in metrics.items() if name not in ("attack/accuracy", "attack/loss")}
    for name in now.state:
        if name.startswith("model/") and is_due:
            of_other = evaluate(executor, replace(at, model=flat(now.state, name)), {"test": sizes["test"]})
            metrics |= {f"{name.removeprefix('model/')}/{key}": value for key, value in of_other.items()}
    if e.measure_every and due(now.round, e.measure_every, last):
        laboratory = Laboratory(executor, data, ready.shared.p, ready.plan.blocks, e.samples, ready.plan.seed)
        at = replace(at, buffers=now.buffers)
        for name, estimate in laboratory.measure(at, e.smoothness).items():
            metrics[f"convergence/{name}"] = estimate.value
            if estimate.standard_error:
                metrics[f"convergence/{name}_se"] = estimate.standard_error
        metrics["convergence/bytes"] = laboratory.nbytes(at, e.smoothness)
    return metrics


def of_clients(
    ready: Assembled, executor: Executor, now: Standing, last: int | None = None
) -> tuple[Each, dict[str, float]]:
    """Return the metrics of each client for clients.jsonl, and their statistics over clients for rounds.jsonl.

    Both are empty if no evaluation of clients is requested. A client metric is a list with a value per client: ``n``,
    the number of the client's examples; the server model's metrics on these examples; and ``personal/NAME``, metrics
    of the client's personal model. The examples are the client's test examples. If no client has test examples,
    training examples are used, and metrics are called ``train_NAME``. With ``measure.clients`` the training examples
    are always used, and the names have no prefix. last: see ``observe``.
    """
    e, n = ready.spec.evaluation, len(ready.data.real)
    if not (e.on_training or e.of_clients):
        return {}, {}
    if not due(now.round, e.every, last or ready.plan.facts.rounds):
        return {"n": []}, {}
    at, on_tests, models = model_task(ready, now), ready.data.tests is not None, dict[str, Each]()
    if e.on_training:
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


def of_new_clients(ready: Assembled, executor: Executor, now: Standing) -> dict[str, float]:
    """Return statistics over the clients that join after the last round; empty if there are no such clients.

    ``new/NAME`` are the received model's metrics on the new clients' test examples, and ``new/adapted_NAME`` are those
    of the models that the new clients have trained on their training examples.
    """
    if (new := ready.spec.new_clients) is None:
        return {}
    received = received_model(ready.algorithm, model_task(ready, now), now, ready.plan)
    task = Adaptation(received, new, ready.spec.evaluation.adapt_epochs)
    metrics = evaluate_new_clients(executor, task, ready.plan.blocks)
    sizes = metrics.pop("n")
    return {f"new/{m}_{what}": v for m, values in metrics.items() for what, v in spread(m, values, sizes).items()}


def due(round: int, every: int, last: int) -> bool:
    """Check whether a task is due after a round: every ``every`` rounds, in round 0 and in the last round."""
    return round % every == 0 or round == last


def model_task(ready: Assembled, now: Standing) -> ModelTask:
    """Return the task to evaluate the server model after a round, with an empty model if the method has none."""
    buffers = None if ready.plan.keep_buffers else now.buffers
    model = now.model if now.has_model else EMPTY
    seed, chunk = seed_for(ready.plan.seed, "observed", now.round), ready.spec.evaluation.chunk
    return ModelTask(model, buffers, seed, now.round, ready.steps, chunk)


def worst(clients: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the number of the first client with the lowest accuracy, and this accuracy, as metrics by name.

    clients: metrics by name, each with a value per client. The result is empty if there are no accuracies.
    """
    if "accuracy" not in clients:
        return {}
    accuracies = clients["accuracy"]
    return {"clients/worst": accuracies.index(min(accuracies)), "clients/worst_accuracy": min(accuracies)}


def _user_level(ready: Assembled, end: Standing) -> dict[str, Any]:
    """Return the statement of user-level central DP; empty if the server adds no noise."""
    plan, central = ready.plan, ready.plan.central
    if central is None:
        return {}
    n, share, rounds = plan.facts.n_clients, plan.participation, plan.facts.rounds
    q, steps = accounted(n, share, plan.seed, rounds, poisson=plan.poisson)
    return user_level(
        end.ledger, plan.leaks, noise=central.noise, clip=central.clip, last_clip=central.quantile and end.clip, q=q,
        steps=steps, rounds=rounds, delta=ready.spec.delta, secret=ready.spec.is_secret,
    )  # fmt: skip


def summarise(ready: Assembled, lines: Sequence[Mapping[str, Any]], end: Standing) -> dict[str, Any]:
    """Return the summary of a run. It has no times and paths, so a resumed run has the same summary.

    Args:
        lines: the lines of rounds.jsonl.
        end: the state after the last round.

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
    spec, shared, ledger, facts, dp = ready.spec, ready.shared, end.ledger, ready.plan.facts, ready.spec.local.dp
    sizes = [len(rows) for rows in spec.partition.rows]
    # The count may include examples that a client received, so the client's number of real examples limits it.
    n_disclosed = sum(min(n, sizes[i]) for i, n in ledger.n_disclosed.items())
    own_code = {kind: name.rpartition("/")[2] for kind, name in spec.names.items() if registry.is_user_defined(name)}
    rejected = sum(line.get("rejected", 0) for line in lines)
    privacy = statement(
        ledger,
        facts.n_clients,
        spec.delta,
        rejected,
        local=dp is not None,
        secret=spec.is_secret,
        user_code=own_code,
        views=shared.views,
    )
    if any((tables := mechanisms(ledger, shared.releases, spec.delta, dp.clip if dp else None)).values()):
        privacy["mechanisms"] = tables
    if section := _user_level(ready, end):
        privacy = {**privacy, "user_level": section, "noise": section["noise"], "delta": spec.delta}
        privacy["in_words"] = [*privacy["in_words"], section["in_words"]]
    left_open = fields_with_rules(spec.record)
    used = effective.of_data(left_open, spec.dataset, ready.plan, spec.by_rule)
    if capabilities_of(ready.algorithm).trains_locally:
        used |= effective.of_local_steps(spec.local, ready.data.clients, ledger)
    used |= effective.of_sharing(left_open, shared, effective.constants_of(spec.stage, spec.client_data))
    used |= effective.of_generators(left_open, spec.requests, shared.releases)
    if hasattr(ready.algorithm, "effective_constants"):
        model = flatten(trainable_parameters(ready.module()))
        section = registry.section("algorithm", spec.names["algorithm"])
        constants = effective.constants_of(ready.algorithm, model, facts, spec.local.epochs)
        used |= {f"{section}.{name}": value for name, value in constants.items()}
    after = accuracies(lines)
    observed = OF_CLIENTS if spec.evaluation.of_clients else ("new/",)

    def course(name: str) -> list[list[float]]:
        key = f"convergence/{name}"
        return [[line["round"], line[key]] for line in lines if key in line]

    return {
        **described(spec.record, len(sizes)),
        "rounds_to_target": target.first(spec.stop.goal, lines),
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
        **({"stopped": reason} if (reason := spec.stop.reason_to_stop(lines)) else {}),
        "rejected": rejections.records(end.rejected),
        "partition": spec.partition.fingerprint,
        "config": recorded_config(spec.record),
        **{name: points for name in NAMES if (points := course(name))},
        **({n: v for n, v in lines[-1].items() if n.startswith(observed)}),
        **shared.facts,
        "privacy": privacy,
        "effective": used,
        **({"audit": ready.audited.facts} if ready.audited else {}),
    }
