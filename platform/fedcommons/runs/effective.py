"""The values that a run used where its config leaves them to a rule, for ``effective`` in its summary.

A noise multiplier is solved for a target epsilon, a field at null follows the data set, the model or another field, and
the rule of equal work shortens clients' epochs. The rule of a component stands in its method ``effective_constants``,
which gets (model, facts, ``client.epochs``) in a method, the dealt data in a sharing strategy, and the number of images
that it sees in a generator.
All functions return plain values by the names of fields. A value that differs between clients is a list by client.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.local_training import LocalSGD
from fedcommons.data import transforms
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset
from fedcommons.data.partition import default_n_aux
from fedcommons.federation.rounds import Plan
from fedcommons.flat_tensors import Flat
from fedcommons.generators.requests import Need
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.release import Release
from fedcommons.sharing.stage import CLASS_COUNTS, Shared


def of_data(asked: Mapping[str, Any], dataset: Dataset, plan: Plan) -> dict[str, Any]:
    """Return what rules decided of the data set, the partition and the work of late clients.

    Args:
        asked: the experiment's fields by their dotted names.
        dataset: its data set.
        plan: the schedule of its rounds.
    """
    values, n = dict[str, Any](), plan.facts.n_clients
    if asked["data.augment"] is None:
        values["data.augment"] = dataset.augment
    if asked["data.limit"] is None:
        values["data.limit"] = len(dataset.train) + len(dataset.validation)
    if asked.get("partition.n_aux", 0) is None:
        values["partition.n_aux"] = default_n_aux(n, dataset.n_classes or 0, asked["partition.alpha"])
    if asked["partition.shift"] != "none" and asked["partition.shift_size"] is None:
        values["partition.shift_size"] = transforms.SIZES[asked["partition.shift"]]
    if asked.get("partition.factor", "") is None:
        values["partition.factor"] = next(iter(dataset.train.factors))
    if asked.get("partition.join", 0) is None:
        values["partition.join"] = n
    if plan.late and asked["straggler.partial"] == "method":
        values["straggler.partial"] = "take" if plan.take_partial else "drop"
    return values


def of_local_steps(loop: LocalSGD, clients: Clients, ledger: Ledger) -> dict[str, Any]:
    """Return E' of the rule of equal work, the batch size, and the noise that a target epsilon decides."""
    each = list(zip(clients.sizes, clients.n_own.tolist(), strict=True))
    values: dict[str, Any] = {
        "client.epochs": joined([loop.epochs_for(n, own) for n, own in each]),
        "client.batch_size": joined([min(loop.batch_size, n) for n, _ in each]),
    }
    if loop.dp and loop.dp.target:
        used = [[*{sigma for _, sigma in ledger.updates.covered.get(i, {})}] for i in range(len(each))]
        if not all(len(sigmas) == 1 for sigmas in used):  # a client was never drawn, or nothing protects its updates
            of_each = [loop.dp.of_client(n, loop.batch_size, loop.steps_for(n, own)) for n, own in each]
            used = [[dp.noise_multiplier] for dp in of_each]
        values["dp.noise_multiplier"] = joined([sigma for (sigma,) in used])
    return values


def of_sharing(asked: Mapping[str, Any], shared: Shared, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rules decided of the sharing strategy; constants: what its own rules decided."""
    values: dict[str, Any] = {}
    if asked.get("sharing.p", 0) is None:
        pool = shared.data.pool  # at the server, where no client receives any of it
        made = len(pool.rows.flat) if pool else 0
        values["sharing.p"] = shared.p or made / (made + sum(shared.data.own.sizes))
    return values | {f"sharing.{n}": joined(v) if isinstance(v, list) else v for n, v in constants.items()}


def of_generators(asked: Mapping[str, Any], needs: Sequence[Need], releases: Sequence[Release]) -> dict[str, Any]:
    """Return what rules decided of the clients' generators; releases: those before round 1."""
    each = [constants_of(need.recipe.generator, len(need.examples)) for need in needs]
    values = {f"generator.{name}": joined([values[name] for values in each]) for name in (each[0] if each else ())}
    if asked.get("generator.target_epsilon") is not None:
        private = [event for event in releases if event.covered and event.what != CLASS_COUNTS]
        if len({event.client for event in private}) == len(each) == len(private):
            values["generator.noise_multiplier"] = joined([event.sigma for event in private])
    return values


def of_algorithm(algorithm: Algorithm, section: str, model: Flat, facts: Facts, epochs: int) -> dict[str, Any]:
    """Return what rules decided of the method's constants; section: of its fields, epochs: ``client.epochs``."""
    values = constants_of(algorithm, model, facts, epochs)
    return {f"{section}.{name}": value for name, value in values.items()}


def constants_of(part: Any, *facts: Any) -> Mapping[str, Any]:
    """Return what the ``effective_constants`` of a component of the package says; nothing for all other components."""
    is_ours = type(part).__module__.partition(".")[0] == "fedcommons"
    rule = getattr(part, "effective_constants", None) if is_ours else None
    return rule(*facts) if rule else {}


def joined(values: Sequence[Any]) -> Any:
    """Return the value that all clients have, or the list of their values."""
    return values[0] if len(set(values)) == 1 else list(values)
