"""What a run measures: the server model after every round, and the whole course in one record."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedcommons.config import registry, target
from fedcommons.config.dotted import is_ignored, recorded
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core import rejections
from fedcommons.core.algorithm import Personal, trains_locally
from fedcommons.core.client_worker import trained
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
"""How the metrics of clients begin that stand in rounds.jsonl, and those of the last round in summary.json."""


def observe(ready: Assembled, executor: Executor, now: Standing, last: int | None = None) -> dict[str, float]:
    """Metrics of the server model (on the test data of the others) in the rounds of ``evaluate.every``, in those of
    ``measure.every`` the convergence parameters at it, and what a measure of somebody's own says. last: the run's last
    round, where it is not R.

    A method without a server model has none of these. What its module draws is keyed by round, set and chunk.
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
        for name, found in laboratory.measure(at, m.smoothness).items():
            metrics[f"convergence/{name}"] = found.value
            if found.standard_error:
                metrics[f"convergence/{name}_se"] = found.standard_error
        metrics["convergence/bytes"] = laboratory.nbytes(at, m.smoothness)
        if m.measure:
            metrics |= measured(executor, at, m.measure, m.constants)
    return metrics


def of_clients(
    ready: Assembled, executor: Executor, now: Standing, last: int | None = None
) -> tuple[Each, dict[str, float]]:
    """What clients.jsonl has of each client, lists by client, and rounds.jsonl of all; nothing where nobody asks.

    ``n``: a client's own examples; the server model's metrics on them; ``personal/NAME``, those of its own model. Where
    no client has test examples they are its training examples, and metrics are called ``train_NAME``. With
    ``measure.clients`` they always are, and have no other name, as in earlier versions. last: see ``observe``.
    """
    c, n = ready.config, len(ready.data.own)
    if not (c.measure.clients or c.evaluate.clients):
        return {}, {}
    if not due(now.round, c.evaluate.every, last or c.federation.rounds):
        return {"n": []}, {}
    at, on_tests, models = _at(ready, now), ready.data.tests is not None, dict[str, Each]()
    if c.measure.clients:
        each = evaluate_clients(executor, at, n)
        return each, worst(each)
    if now.has_model:
        models["clients"] = evaluate_clients(executor, at, n, on_tests=on_tests)
    if isinstance(ready.algorithm, Personal):
        models["personal"] = evaluate_personal(ready.algorithm, executor, at, now, ready.plan, on_tests=on_tests)
    lists, numbers = dict[str, list[float]](), dict[str, float]()
    for which, each in models.items():
        lists["n"] = sizes = each.pop("n")
        named = each if on_tests else {f"train_{metric}": values for metric, values in each.items()}
        lists |= {f"personal/{m}" if which == "personal" else m: values for m, values in named.items()}
        for metric, values in named.items():
            numbers |= {f"{which}/{metric}_{what}": found for what, found in spread(metric, values, sizes).items()}
    return lists, numbers


def due(round: int, every: int, last: int) -> bool:
    """Whether something is done after this round that is done every so many rounds, in round 0 and in the last one."""
    return round % every == 0 or round == last


def _at(ready: Assembled, now: Standing) -> ModelTask:
    """The server model as it is evaluated after a round; none for a method that has none."""
    buffers = None if ready.config.federation.buffers == "keep" else now.buffers
    model = now.model if now.has_model else EMPTY
    seed, chunk = seed_for(ready.config.seed, "observed", now.round), ready.config.evaluate.chunk
    return ModelTask(model, buffers, seed, now.round, ready.steps, chunk)


def worst(clients: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The client with the least accuracy, the first of several, and its accuracy."""
    if "accuracy" not in clients:
        return {}
    accuracies = clients["accuracy"]
    return {"clients/worst": accuracies.index(min(accuracies)), "clients/worst_accuracy": min(accuracies)}


def summarise(
    ready: Assembled, lines: Sequence[Mapping[str, Any]], end: Standing, *, is_secret: bool
) -> dict[str, Any]:
    """The run in one record: no times, no paths, so that it compares equal to that of an uninterrupted run.

    ``lines``: those of rounds.jsonl; ``end``: where the federation stands in the end; is_secret: nobody can draw the
    noise again.
    ``p``: the share of shared data. ``disclosed``: the share of all clients' examples that were given away, as they are
    or in what was made from them, with nothing that an epsilon can be computed from; model updates do not count.
    ``bytes_lost``, where there are stragglers: those among ``bytes_down`` for which no reply came back. ``stopped``,
    where the run ended before its last round: after which, and why. ``config`` has the flat fields of what was chosen,
    ``effective`` what was used where a rule decided a value; ``rejected`` each client whose replies were: how many, and
    why the first was. With ``evaluate.clients`` it has the clients' metrics of the last round too. Accuracies and
    rounds-to-target are those of the server model on the test data: None for a method that has none, for which its
    clients' own models do not stand in.
    """
    c, flat, dealt, shared, ledger = ready.config, ready.config.flat, ready.prepared.partition, ready.shared, end.ledger
    held, facts, dp = [len(rows) for rows in dealt.rows], ready.plan.facts, ready.config.dp
    given_away = sum(min(n, held[i]) for i, n in ledger.given_away.items())  # who holds others' may show them too
    own = {kind: name.rpartition("/")[2] for kind, name in c.chosen.items() if registry.is_own(name)}
    rejected = sum(line.get("rejected", 0) for line in lines)
    said = statement(
        ledger, facts.n_clients, dp.delta, rejected, local=dp.local, secret=is_secret, own=own, views=shared.views
    )
    if any((tables := mechanisms(ledger, shared.releases, dp.delta, dp.clip if dp.local else None)).values()):
        said["mechanisms"] = tables
    used = effective.of_data(flat, ready.prepared.dataset, ready.plan)
    if trains_locally(ready.algorithm):
        used |= effective.of_local_steps(local_loop(c, ready.facts.augment), ready.data.clients, ledger)
    used |= effective.of_sharing(flat, shared, effective.constants_of(ready.prepared.stage, ready.prepared.dealt))
    used |= effective.of_generators(flat, ready.prepared.needs, shared.releases)
    if hasattr(ready.algorithm, "effective_constants"):
        model, section = flatten(trained(build_module(c, ready.facts))), registry.section("algorithm", c.algorithm)
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
        "n_clients": len(dealt.rows),
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
        "disclosed": given_away / sum(held),
        "bytes_down": end.traffic.down,
        "bytes_up": end.traffic.up,
        "bytes_once": end.traffic.once,
        **({"bytes_lost": end.traffic.lost} if "stragglers" in lines[-1] else {}),
        **({"stopped": why} if (why := stop_of(c).why(lines)) else {}),
        "rejected": rejections.records(end.rejected),
        "partition": dealt.fingerprint,
        "config": {n: list(v) if type(v) is tuple else v for n, v in recorded(flat).items() if not is_ignored(n)},
        **{name: found for name in NAMES if (found := course(name))},
        **({n: v for n, v in lines[-1].items() if n.startswith(OF_CLIENTS)} if c.evaluate.clients else {}),
        **shared.facts,
        "privacy": said,
        "effective": used,
        **({"audit": ready.audited.facts} if ready.audited else {}),
    }
