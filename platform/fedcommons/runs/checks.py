"""Checks of an experiment's config that need no data; a failed check is reported in one sentence before any work.

The range of a field is checked where the field is defined, and a component checks its own arguments. This module checks
combinations of fields and components. Checks that depend on the data follow in ``build.prepare``.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from fedcommons.config import registry, weights_file
from fedcommons.config.dotted import fields_for
from fedcommons.config.experiment import Experiment
from fedcommons.config.fields import parameters_of, select_arguments
from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.schedules import Schedule
from fedcommons.errors import UserError, before_any_work, quote, user_code_context
from fedcommons.privacy.accountants import require_reachable
from fedcommons.runs.early_stopping import stop_of
from fedcommons.sharing.stage import Stage

ROUNDS_TRIED = 10_000
"""Number of rounds, evenly spaced, for which a learning rate schedule is evaluated before any work."""

OF_STEPS = [
    f"client.{name}"
    for name in [
        "lr_schedule",
        "warmup",
        "momentum",
        "weight_decay",
        "clip_norm",
        "accumulate",
        "precision",
        "batched",
        "graphs",
    ]
]
"""Fields of local training that are refused for a method whose clients make no local steps. Further fields of local
training, such as client.lr, are not refused, as presets set them for all methods."""


def check(config: Experiment) -> None:
    """Check the fields of an experiment and their combinations, without loading its data.

    Raises:
        UserError: the config is invalid for every data set.
    """
    c, flat, names = config, config.flat, config.chosen
    known_fields = fields_for({kind: [name] for kind, name in names.items()})
    for name, field in known_fields.items():
        if name not in flat:
            if name in registry.OPTIONAL:
                continue
            raise UserError(f"{name} is missing: its component got this field after the experiment was written.")
        if type(flat[name]) not in field.kinds and Any not in field.kinds:
            kinds = " or ".join(kind.__name__ for kind in field.kinds)
            raise UserError(f"{name} takes {kinds}, got {quote(flat[name])}.")
        field.check(name, flat[name])
    for name in flat:
        if name not in known_fields and not name.startswith("source."):
            raise UserError(f"{name} is not a field of the chosen components.")
    require_sources(config)
    stop_of(c)
    if c.tracking.tracker in ("tensorboard", "mlflow", "trackio") and find_spec(c.tracking.tracker) is None:
        raise UserError(
            f"tracking.tracker {c.tracking.tracker} needs a package: pip install 'fedcommons[{c.tracking.tracker}]'."
        )
    if not c.measure.every and (c.measure.samples is not None or c.measure.smoothness):
        raise UserError("measure.every must be at least 1 with measure.samples or measure.smoothness (0 is never).")
    if not c.measure.every and c.measure.measure:
        raise UserError("measure.every must be at least 1 with measure.measure (0 is never).")
    if c.partition.shift == "none" and c.partition.shift_size is not None:
        raise UserError("partition.shift_size needs a partition.shift: noise, rotation or colour.")
    if "n_clients" in parameters_of(
        registry.find("partition", c.partition.name)
    ):  # for other partitions, ``build.prepare`` checks this later
        require_participants(c.federation.participation, c.partition.n_clients)
    if c.federation.executor == "ray_actors" and c.federation.actors > c.federation.blocks:
        raise UserError(
            f"federation.actors = {c.federation.actors} must be at most federation.blocks = {c.federation.blocks}: "
            "a further actor would have no block to train."
        )
    require_rates(c.client.lr_schedule, c.client.constants, c.federation.rounds)
    method = capabilities_of(registry.find("algorithm", c.algorithm))
    if not (method.trains_locally or method.needs_pool):  # training on a pool also uses these fields
        for name in OF_STEPS:
            if name in flat and flat[name] != known_fields[name].default:
                raise UserError(f"{name} changes nothing for {c.algorithm}, whose clients make no local steps.")
    if c.measure.clients and c.evaluate.clients:
        raise UserError(
            "measure.clients must be false with evaluate.clients true: clients.jsonl records only one of the two, "
            "and measure.clients evaluates on training examples."
        )
    if c.dp.target_epsilon is not None and not c.dp.local:
        raise UserError("dp.target_epsilon is for local training by DP-SGD: it needs dp.local true.")
    if c.dp.target_epsilon is not None and c.dp.noise_multiplier != type(c.dp).noise_multiplier:
        raise UserError("set either dp.target_epsilon or dp.noise_multiplier, not both.")
    if c.dp.local and c.client.precision == "fp16-mixed":
        raise UserError(
            "client.precision must be fp32, tf32 or bf16 with dp.local: fp16-mixed leaves out a step whose gradient "
            "overflows, which reveals information about the data."
        )
    if c.dp.local and c.client.accumulate > 1:
        raise UserError(
            f"client.accumulate must be 1 with dp.local, got {c.client.accumulate}: DP-SGD computes the gradient of "
            "each example separately anyway; use a larger client.batch_size."
        )
    if c.client.optimizer == "adam" and c.client.momentum:
        raise UserError(f"client.momentum must be 0 with client.optimizer adam, got {c.client.momentum:g}.")
    is_plain = not c.dp.local and c.client.accumulate == 1
    if c.client.batched and not (is_plain and c.client.precision == "fp32"):
        raise UserError("client.batched needs dp.local false, client.accumulate 1 and client.precision fp32.")
    if c.client.graphs and not (is_plain and not c.client.batched and c.client.precision != "fp16-mixed"):
        raise UserError(
            "client.graphs needs dp.local false, client.batched false, client.accumulate 1 and client.precision fp32, "
            "tf32 or bf16."
        )
    if c.dp.at_once > 1 and not (c.dp.local and c.client.precision in ("fp32", "tf32")):
        raise UserError("dp.at_once above 1 needs dp.local true, and client.precision fp32 or tf32.")


def schedule_of(name: str, constants: Mapping[str, Any], rounds: int) -> Schedule | None:
    """Return the schedule, which gives the factor of the learning rate in each round; None if the factor is always 1.

    name, constants: component name and arguments of the schedule. rounds: the planned number of rounds R, which a
    schedule with a parameter ``rounds`` also gets.
    """
    if name == "constant" and not constants["warmup"]:
        return None
    part = registry.find("schedule", name)
    offered = {"rounds": rounds} if "rounds" in select_arguments(part, {"rounds": rounds}) else {}
    return Schedule(partial(part, **offered, **constants), registry.component_label("schedule", name))


def depends_on_rounds(name: str) -> bool:
    """Check whether the learning rates of a schedule depend on the planned number of rounds."""
    return name != "constant" and bool(select_arguments(registry.find("schedule", name), {"rounds": 0}))


def require_rates(name: str, constants: Mapping[str, Any], rounds: int) -> None:
    """Check that a schedule returns a valid factor in every round.

    If there are more rounds than ``ROUNDS_TRIED``, about ``ROUNDS_TRIED`` of them are checked, evenly spaced.

    name, constants, rounds: as in ``schedule_of``.

    Raises:
        UserError: the schedule fails in one of the rounds.
    """
    if schedule := schedule_of(name, constants, rounds):
        with before_any_work():
            for round in {*range(1, rounds + 1, -(-rounds // ROUNDS_TRIED)), rounds}:
                schedule(round)


def require_participants(participation: float, n_clients: int) -> None:
    """Check that at least one of N clients is sampled in a round.

    participation: C, the share of clients that are sampled in a round.

    Raises:
        UserError: C N is less than one client.
    """
    if participation * n_clients < 1 - 1e-9:
        raise UserError(
            f"federation.participation C = {participation:g} of {n_clients} clients is less than one client; it must "
            f"be at least {1 / n_clients:g}."
        )


def require_pool(algorithm: Algorithm, stage: Stage) -> None:
    """Refuse a method whose server trains on a pool of images, with a sharing strategy that gives the server no pool.

    Raises:
        UserError: the method needs a pool, and the sharing strategy (stage) does not provide it.
    """
    needs_pool, serves_pool = capabilities_of(algorithm).needs_pool, capabilities_of(stage).serves_pool
    if needs_pool and not serves_pool:
        raise UserError(
            f"the server of {type(algorithm).__name__} trains on a pool of images, and sharing stage "
            f"{type(stage).__name__} gives the server no pool: use sharing.setting server_synthetic."
        )


def refuse(part: Any, check: str, *facts: Any) -> None:
    """Call the check function of a component with the arguments ``facts``, if the component has such a function.

    part: the component. check: the name of the check function, such as "check_data".

    Raises:
        UserError: the check refuses the arguments.
    """
    with user_code_context(part, check):  # reading the attribute may raise an error
        if function := getattr(part, check, None):
            function(*facts)


def require_sources(config: Experiment, kinds: Collection[str] = tuple(registry.KINDS)) -> None:
    """Check that the code of user-defined components and the weights file are those the experiment was created with.

    kinds: the kinds of components to check, such as "model".

    Raises:
        UserError: code or weights have changed, or two components need different Python modules of the same name.
    """
    names = {kind: name for kind, name in config.chosen.items() if kind in kinds}
    for kind, name in names.items():
        if registry.source(name) != config.source.get(kind):
            where, *others = name.rpartition(":")[0], *list(registry.files(name))[1:]
            what = f"{where} or what it imports ({', '.join(others)})" if others else where
            is_not = "is not what it was" if others else "is not the file it was"
            raise UserError(f"{kind} {quote(name)}: {what} {is_not} when this experiment was written.")
    if (file := config.model.weights) and weights_file.digest(file) != config.source.get("weights"):
        raise UserError(f"model.weights {quote(file)} is not the file it was when this experiment was written.")
    if conflict := registry.clash(names.values()):
        raise UserError(f"{conflict}: a process can import only one module of this name, so rename one.")


def require_target(algorithm: Algorithm, loop: LocalSGD, sizes: Collection[int]) -> None:
    """Check that every client can reach the target epsilon with the method's local training.

    loop: the local training, with the target epsilon if there is one. sizes: each client's number of examples.

    Raises:
        UserError: a client cannot reach the target, or the method does not train each client once in a round.
    """
    if loop.dp is None or loop.dp.target is None:
        return
    capabilities = capabilities_of(algorithm)
    if not capabilities.trains_locally:
        raise UserError(
            f"dp.target_epsilon is for local training, and clients of {type(algorithm).__name__} make no local steps; "
            "use dp.noise_multiplier."
        )
    if capabilities.trains_twice:
        raise UserError(
            f"{type(algorithm).__name__} trains each client twice in a round, and dp.target_epsilon is for one local "
            "training; use dp.noise_multiplier."
        )
    target = loop.dp.target
    for n in sorted(set(sizes)):
        q, steps = loop.dp.sampling_rate(n, loop.batch_size), loop.steps_for(n, None) * target.rounds
        try:
            require_reachable(target.epsilon, q, steps, target.delta)
        except UserError as error:
            raise UserError(f"a client of {n} examples: dp.{error}") from None


def require_replies(facts: Facts, rule: str, constants: Mapping[str, Any]) -> None:
    """Refuse a run in which practically no reply arrives.

    facts: the federation's facts, with the probability that a client's complete reply arrives. rule, constants: the
    name of the straggler rule and its arguments, for the message.

    Raises:
        UserError: the expected number of complete replies in the run is below 10^-6.
    """
    if facts.arrival is not None and (expected := facts.rounds * sum(facts.arrival)) < 1e-6:
        values = ", ".join(f"{name} {value}" for name, value in constants.items())
        raise UserError(
            f"straggler.rule {rule} ({values}) lets no client reply in time: "
            f"the probability that any reply arrives in {facts.rounds} rounds is at most {expected:.2g}."
        )


def require_no_server_model(algorithm: str, lacking: Sequence[str]) -> None:
    """Refuse a method without a server model if the config lacks options that such a method needs.

    lacking: the missing options with the required values, such as ``--evaluate.clients true``.

    Raises:
        UserError: an option is missing.
    """
    if lacking:
        raise UserError(
            f"algorithm {algorithm} has no server model, as each client has a personal model: "
            f"it needs {' and '.join(lacking)}."
        )
