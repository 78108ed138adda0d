"""Checks before any work that the built components, data and module fit together.

Checks of fields alone are in ``config.validate``. Checks that call the module are in ``check_module``.
"""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from fedcommons.config import pairs, registry
from fedcommons.config.fields import select_arguments
from fedcommons.core.aggregation import aggregation_of
from fedcommons.core.algorithm import Algorithm, ChoosesClients, Facts
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import floating_buffers
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.schedules import Schedule
from fedcommons.errors import UserError, before_any_work, user_code_context
from fedcommons.federation.rounds import Plan
from fedcommons.privacy import salts
from fedcommons.privacy.accountants import require_reachable
from fedcommons.sharing.stage import Stage
from fedcommons.storage import object_store

ROUNDS_TRIED = 10_000
"""Number of rounds, evenly spaced, for which a learning rate schedule is evaluated before any work."""


def schedule_of(name: str, constants: Mapping[str, Any], rounds: int) -> Schedule | None:
    """Return the learning rate schedule for a run of ``rounds`` rounds; None if its factor is always 1."""
    if name == "constant" and not constants["warmup"]:
        return None
    part = registry.find("schedule", name)
    build = partial(part, **select_arguments(part, {"rounds": rounds}), **constants)
    return Schedule(build, registry.component_label("schedule", name))


def depends_on_rounds(name: str) -> bool:
    """Check whether the learning rates of a schedule depend on the planned number of rounds."""
    return name != "constant" and bool(select_arguments(registry.find("schedule", name), {"rounds": 0}))


def require_rates(schedule: Schedule | None, rounds: int) -> None:
    """Check that the schedule returns a valid factor in every round, or in about ``ROUNDS_TRIED`` of a longer run."""
    if schedule:
        with before_any_work():
            for round in {*range(1, rounds + 1, -(-rounds // ROUNDS_TRIED)), rounds}:
                schedule(round)


def require_aggregation(text: str) -> None:
    """Check the field ``federation.aggregation``."""
    aggregation_of(text)


def makes_steps(algorithm: str) -> bool:
    """Return whether clients or the server of the method ``algorithm`` make local steps."""
    method: Any = registry.find("algorithm", algorithm)
    capabilities = capabilities_of(method)
    return capabilities.trains_locally or capabilities.needs_pool  # a server that trains on a pool makes local steps


def require_capabilities(algorithm: str, fields: Mapping[str, Any]) -> None:
    """Refuse options that change updates if the method lacks the needed capability; fields: dotted name -> value."""
    declared = capabilities_of(cast("Any", registry.find("algorithm", algorithm)))
    for option, wanted in pairs.NEEDS.items():
        if pairs.OPTIONS[option](fields) and not any(getattr(declared, name) for name in wanted):
            raise UserError(
                f"{option} cannot be used with algorithm {algorithm}, which does not declare the capability "
                f"{' or '.join(wanted)}: its server uses more than {'sums' if len(wanted) > 1 else 'means'} of updates."
            )


def require_central(plan: Plan, algorithm: Algorithm, module: nn.Module, delta: float) -> None:
    """Refuse Poisson sampling and central DP where they are not defined, and a delta of 1/N or more for central DP."""
    n, name = plan.facts.n_clients, type(algorithm).__name__
    if isinstance(algorithm, ChoosesClients) and (plan.poisson or plan.central):
        option = "dp.central" if plan.central else "federation.sampling poisson"
        raise UserError(f"{option} needs clients that the engine samples, and {name} chooses its clients itself.")
    if not plan.central:
        return
    if not plan.keep_buffers and len(floating_buffers(module)):
        raise UserError(
            "dp.central adds no noise to the averaged statistics of BatchNorm: choose a model without BatchNorm, or "
            "federation.buffers keep, with which the statistics stay with the clients."
        )
    if delta * n >= 1:
        raise UserError(f"dp.delta must be below 1/N = {1 / n:.3g} with dp.central and N = {n} clients, got {delta:g}.")


def require_participants(participation: float, n_clients: int) -> None:
    """Check that at least one of N clients is sampled in a round; participation: C, the share that is sampled."""
    if participation * n_clients < 1 - 1e-9:
        raise UserError(
            f"federation.participation C = {participation:g} of {n_clients} clients is less than one client; it must "
            f"be at least {1 / n_clients:g}."
        )


def require_storage(storage: str | None, name: str | None, artifacts: Path, *, is_secret: bool) -> None:
    """Check storage and storage_name. If noise is secret, check that its salts are stored outside of ``storage``."""
    object_store.require(storage, name)
    if is_secret:
        salts.require_writable(artifacts)
        if storage is not None and not object_store.is_url(storage):
            salts.require_outside(Path(storage))


def require_server_data(algorithm: Algorithm, stage: Stage, n_public: int) -> None:
    """Refuse a method whose server needs a pool of images or public examples that it does not have."""
    capabilities, serves_pool = capabilities_of(algorithm), capabilities_of(stage).serves_pool
    if capabilities.needs_public and not n_public:
        raise UserError(
            f"the server of {type(algorithm).__name__} trains on public examples, and there are none: set "
            "--data.public 0.1, the share of the training examples that no client gets."
        )
    if capabilities.needs_pool and not serves_pool:
        raise UserError(
            f"the server of {type(algorithm).__name__} trains on a pool of images, and sharing stage "
            f"{type(stage).__name__} gives the server no pool: use sharing.setting server_synthetic."
        )


def refuse(part: Any, check: str, *facts: Any) -> None:
    """Call the component's function ``check``, such as "check_data", with ``facts``, if the component defines it."""
    with user_code_context(part, check):  # reading the attribute may raise an error
        if function := getattr(part, check, None):
            function(*facts)


def require_target(algorithm: Algorithm, loop: LocalSGD, sizes: Collection[int]) -> None:
    """Check that every client can reach the target epsilon; sizes: each client's number of examples."""
    if loop.dp is None or loop.dp.target is None:
        return
    capabilities, noisy_steps = capabilities_of(algorithm), getattr(algorithm, "noisy_steps", None)
    if noisy_steps is None and (capabilities.trains_twice or not capabilities.trains_locally):
        how = "train twice in a round" if capabilities.trains_twice else "make no local steps"
        raise UserError(
            f"dp.target_epsilon is for one local training per round, and clients of {type(algorithm).__name__} {how}; "
            "use dp.noise_multiplier."
        )
    if noisy_steps and capabilities.trains_locally:
        raise UserError(f"{type(algorithm).__name__}: noisy_steps needs the capability trains_locally=False.")
    target = loop.dp.target
    for n in sorted(set(sizes)):
        batch_size, steps = noisy_steps() if noisy_steps else (loop.batch_size, loop.steps_for(n, None))
        try:
            require_reachable(target.epsilon, loop.dp.sampling_rate(n, batch_size), steps * target.rounds, target.delta)
        except UserError as error:
            raise UserError(f"a client of {n} examples: dp.{error}") from None


def require_replies(facts: Facts, rule: str, constants: Mapping[str, Any]) -> None:
    """Refuse a run with less than 10^-6 expected replies; rule, constants: name and arguments of the straggler rule."""
    if facts.arrival is not None and (expected := facts.rounds * sum(facts.arrival)) < 1e-6:
        values = ", ".join(f"{name} {value}" for name, value in constants.items())
        raise UserError(
            f"straggler.rule {rule} ({values}) lets no client reply in time: "
            f"the probability that any reply arrives in {facts.rounds} rounds is at most {expected:.2g}."
        )
