"""The values that a run computed by a rule for some fields; the summary stores these values in ``effective``.

Examples: a noise multiplier is computed from a target epsilon; a field at null follows the data set, the model or
another field; ``client.equal_work`` reduces the epochs of clients with shared images. A component's rule is its
function ``effective_constants``. An algorithm's rule gets the model, the federation's ``Facts`` and ``client.epochs``.
The rule of a sharing strategy gets the client data sets. A generator's rule gets the number of its training images.
All functions return plain values by field name. A value that differs between clients is a list with a value per client.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedcommons.core.local_training import LocalSGD
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset
from fedcommons.federation.rounds import Plan
from fedcommons.generators.requests import GenerationRequest
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.release import Release
from fedcommons.sharing.exchange import Shared
from fedcommons.sharing.stage import CLASS_COUNTS


def of_data(
    left_open: Collection[str], dataset: Dataset, plan: Plan, of_partition: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that the run computed for fields of data set, partition and stragglers, by field name.

    left_open: names of the fields whose values follow from a rule. of_partition: the values of the partition's fields.
    """
    values = dict[str, Any]()
    if "data.augment" in left_open:
        values["data.augment"] = dataset.augment
    if "data.limit" in left_open:
        values["data.limit"] = len(dataset.train) + len(dataset.validation)
    values |= {f"partition.{name}": value for name, value in of_partition.items()}
    if plan.straggler_rule and "straggler.partial" in left_open:
        values["straggler.partial"] = "take" if plan.take_partial else "drop"
    return values


def of_local_steps(loop: LocalSGD, clients: Clients, ledger: Ledger) -> dict[str, Any]:
    """Return epochs (as reduced by ``client.equal_work``), batch size and noise multiplier of clients, by field name.

    clients: the clients' training data. ledger: the privacy ledger of the run, with the noise of each update.
    """
    each = list(zip(clients.sizes, clients.n_own.tolist(), strict=True))
    values: dict[str, Any] = {
        "client.epochs": joined([loop.epochs_for(n, n_own) for n, n_own in each]),
        "client.batch_size": joined([min(loop.batch_size, n) for n, _ in each]),
    }
    if loop.dp and loop.dp.target:
        used = [[*{sigma for _, sigma in ledger.updates.covered.get(i, {})}] for i in range(len(each))]
        if not all(len(sigmas) == 1 for sigmas in used):  # the ledger lacks the noise of a client
            of_each = [loop.dp.of_client(n, loop.batch_size, loop.steps_for(n, n_own)) for n, n_own in each]
            used = [[dp.noise_multiplier] for dp in of_each]
        values["dp.noise_multiplier"] = joined([sigma for (sigma,) in used])
    return values


def of_sharing(left_open: Collection[str], shared: Shared, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the run computed for fields of the sharing strategy, such as ``sharing.p``, by field name.

    left_open: see ``of_data``. constants: the result of the strategy's ``effective_constants``.
    """
    values: dict[str, Any] = {}
    if "sharing.p" in left_open:
        pool = shared.data.pool  # the server may use a pool that no client receives
        n_shared = len(pool.rows.flat) if pool else 0
        values["sharing.p"] = shared.p or n_shared / (n_shared + sum(shared.data.real.sizes))
    return values | {f"sharing.{n}": joined(v) if isinstance(v, list) else v for n, v in constants.items()}


def of_generators(
    left_open: Collection[str], needs: Sequence[GenerationRequest], releases: Sequence[Release]
) -> dict[str, Any]:
    """Return the values that the run computed for fields of the generators, such as noise multipliers, by name.

    left_open: see ``of_data``. needs: the generation requests. releases: the ledger's entries before round 1.
    """
    each = [constants_of(need.recipe.generator, len(need.examples)) for need in needs]
    values = {f"generator.{name}": joined([values[name] for values in each]) for name in (each[0] if each else ())}
    if "generator.noise_multiplier" in left_open:
        private = [release for release in releases if release.covered and release.what != CLASS_COUNTS]
        if len({release.client for release in private}) == len(each) == len(private):
            values["generator.noise_multiplier"] = joined([release.sigma for release in private])
    return values


def constants_of(part: Any, *facts: Any) -> Mapping[str, Any]:
    """Return the result of a built-in component's ``effective_constants(*facts)``; empty for other components."""
    is_ours = type(part).__module__.partition(".")[0] == "fedcommons"
    rule = getattr(part, "effective_constants", None) if is_ours else None
    return rule(*facts) if rule else {}


def joined(values: Sequence[Any]) -> Any:
    """Return the single value if all clients have the same value, else the list with a value per client."""
    return values[0] if len(set(values)) == 1 else list(values)
