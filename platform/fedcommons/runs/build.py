"""Build a run from an experiment: read the fields of its config, and return values and objects (``RunSpec``)."""

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from fedcommons.config import live_objects, registry, target, user_loader
from fedcommons.config.dotted import deciding, part_of, parts_of_own, values_of
from fedcommons.config.experiment import Experiment
from fedcommons.config.validate import compressor, require_no_steps, require_sources, validate
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import fresh_torch
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError, before_any_work, sentence
from fedcommons.generators.requests import GeneratorRecipe, require_constants
from fedcommons.privacy.dp_sgd import DPSGD, Target
from fedcommons.runs import checks, load_data
from fedcommons.runs.check_run import checked
from fedcommons.runs.early_stopping import Stop
from fedcommons.runs.load_data import load
from fedcommons.runs.plans import plan_of, with_central_target
from fedcommons.runs.spec import BuildModule, Evaluation, RunSpec
from fedcommons.runs.worker import build_module, build_worker_elsewhere
from fedcommons.seeding import wide_key

_ELSEWHERE = ("model", "algorithm", "measure", "schedule")
"""Kinds of the components that a worker process builds."""

_OF_DATA = ("data.", "partition.", "attack.", "model.", "evaluate.new_clients", "seed", "source.")
"""Prefixes of the names of the fields on which the partitioned data and the shapes of the model depend."""


def check(config: Experiment) -> None:
    """Check the fields of an experiment and their combinations, without loading its data.

    Raises:
        UserError: the config is invalid for every data set.
    """
    validate(config)
    f = config.federation
    if load_data.takes_n_clients(config.partition.name):  # other partitions get N from the data
        checks.require_participants(f.participation, config.partition.n_clients)
    checks.require_capabilities(config.algorithm, config.flat)
    checks.require_rates(checks.schedule_of(*_schedule(config)), f.rounds)
    checks.require_aggregation(f.aggregation)
    if not checks.makes_steps(config.algorithm):
        require_no_steps(config)


def data_fields(config: Experiment) -> str:
    """Return the fields on which data, partition and model shapes depend, as a text, in which 1.0 and 1 differ."""
    return repr(values_of(config, _OF_DATA))


@fresh_torch()
@before_any_work()
def build(config: Experiment, like: RunSpec | None = None) -> RunSpec:
    """Check the config, load the data, partition it among the clients, and build the run's components.

    like: a run whose partitioned data are reused if its experiment has equal ``data_fields``.

    Raises:
        UserError: a field is invalid, or does not fit the data set, the model or another field.
    """
    check(config)
    c, f, e, m = config, config.federation, config.evaluate, config.measure
    checks.require_storage(c.storage, c.storage_name, Path(c.artifacts), is_secret=c.dp.is_secret)
    kinds = ("algorithm", "sharing", "generator", "straggler")
    parts = {kind: part_of(c, kind) for kind in kinds if kind in c.chosen}
    for part in parts.values():
        checks.refuse(part, "check", c.flat)
    if generator := parts.get("generator"):
        require_constants(generator)
    like = like if like and data_fields(like.record) == data_fields(c) else None
    dataset = like.dataset if like else _load(c.data, c.source.get("data"), split_seed(c), repr(c.data))
    if generator:
        checks.refuse(generator, "check_type", dataset.train.x.dtype, dataset.name)
        checks.refuse(generator, "check_shape", dataset.shape, dataset.name)
    p, a = c.partition, c.attack
    if like:
        partition, tests, new_clients, by_rule = like.partition, like.tests, like.new_clients, like.by_rule
        attack, train = like.plan.attack, like.train
    else:
        dataset, partition, train, tests, new_clients, by_rule = load_data.partition_examples(
            dataset, p.name, p.constants, p.n_clients, c.data.client_test, p.shift, p.shift_size, e.new_clients, c.seed
        )
        fields = a.name, a.share, a.scale, a.target
        attack, train = load_data.attacked(dataset, train, partition.rows, fields, c.seed)
    checks.require_participants(f.participation, len(partition.rows))  # after the partition, which decides N
    plan = plan_of(
        parts["algorithm"], parts["straggler"], train, partition.rows, dataset.n_classes, seed=c.seed,
        rounds=f.rounds, participation=f.participation, weighting=f.weighting, blocks=f.blocks, max_norm=f.max_norm,
        keep_buffers=keeps_buffers(c), partial_work=c.straggler.partial, poisson=f.sampling == "poisson",
        central=(c.dp.central_clip, c.dp.central_noise, c.dp.central_quantile) if c.dp.central else None,
        compressor=compressor(c.communication.compress), error_feedback=c.communication.error_feedback,
        aggregation=f.aggregation, attack=attack,
    )  # fmt: skip
    if c.dp.central_epsilon is not None:
        plan = with_central_target(plan, c.dp.central_epsilon, c.dp.delta)
    checks.require_replies(plan.facts, c.straggler.rule, c.straggler.constants)
    elsewhere = partial(
        build_worker_elsewhere, algorithm=partial(registry.make, "algorithm", c.algorithm, c.constants),
        schedule=partial(checks.schedule_of, *_schedule(c)), digests=c.source, weights=c.model.weights,
        names=(names := {kind: c.chosen[kind] for kind in _ELSEWHERE if kind in c.chosen}),
        live=live_objects.packed(names.values()),
    )  # fmt: skip
    measure = (m.measure, m.constants) if m.measure else None
    t = c.tracking
    spec = RunSpec(
        record=c,
        names=c.chosen,
        algorithm=parts["algorithm"],
        stage=parts["sharing"],
        recipe=recipe(c) if generator else None,
        plan=plan,
        local=local_loop(c, dataset.augment),
        module=module_of(c),
        lr=c.client.lr,
        elsewhere=elsewhere,
        evaluation=Evaluation(
            e.every, e.chunk, e.clients, m.clients, m.every, m.samples, m.smoothness, measure, e.adapt_epochs
        ),
        wandb=t.wandb,
        trackers={n: t.constants if n == c.chosen["tracker"] else {} for n in registry.tracker_names(t.tracker)},
        stop=Stop(f.stop, c.target, f.rounds, f.stop_patience, *target.validation_metric(f.stop_metric)),
        dataset=dataset,
        partition=partition,
        train=train,
        tests=tests,
        new_clients=new_clients,
        by_rule=by_rule,
        noise_key=noise_key(c),
        is_secret=c.dp.is_secret,
        delta=c.dp.delta,
        is_audited=c.sharing.is_audited,
        withholds=c.sharing.withhold == "near_copies",
        artifacts=Path(c.artifacts),
        storage=c.storage,
        storage_name=c.storage_name,
        actors=f.actors if f.executor == "ray_actors" else 0,
        gpus_per_actor=f.gpus_per_actor,
        transport=f.transport,
        checkpoint_every=f.checkpoint_every,
        memory_bytes=f.memory_mb * 1e6,
        shapes=like.shapes if like else None,
        notes=like.notes if like else (),
    )
    # Delta is checked if DP-SGD uses it or the user has changed it; with dp.central it may belong to that alone.
    return checked(spec, judges_delta=c.dp.local or (c.dp.delta != type(c.dp).delta and not c.dp.central))


def changed_sources(config: Experiment) -> str:
    """Return a sentence that names code or weights that have changed since the experiment was created; "" if none."""
    code, names = dict(user_loader.codes), {kind: n for kind, n in config.chosen.items() if kind != "tracker"}
    try:
        require_sources(names, config.source, config.model.weights)
    except UserError as error:
        return sentence(error)
    finally:
        user_loader.codes.update(code)  # the result's models run the code that the run used
    return ""


def split_seed(config: Experiment) -> int | None:
    """Return the seed of the random splits of an experiment's data; None for the splits that all runs share."""
    return config.seed if config.data.split == "random" else None


@lru_cache(maxsize=2)  # most trials of a sweep use the same data set
def _load(data: load_data.Data, source: str | None, seed: int | None, _text: str) -> Dataset:  # 1.0 and 1 differ in it
    return load(data, seed)


def dataset_of(config: Experiment, *, in_usual_folder: bool = False) -> Dataset:
    """Return the experiment's data set; in_usual_folder: ignore the config's folder, and download nothing."""
    data = replace(config.data, dir=None, download=False) if in_usual_folder else config.data
    return load(data, split_seed(config))


def keeps_buffers(config: Experiment) -> bool:
    """Return whether BatchNorm's statistics stay with the clients."""
    return config.federation.buffers == "keep"


def recipe(config: Experiment) -> GeneratorRecipe:
    """Return the specification of the clients' generators: the component and the options of its training."""
    g, digest = config.generator, config.source.get("generator")
    assert g is not None
    return GeneratorRecipe(g.name, part_of(config, "generator"), g.rho, digest, g.label_noise, config.dp.is_secret)


def module_of(config: Experiment, *, with_weights: bool = True) -> BuildModule:
    """Return the function that builds the clients' module from a data set; see ``worker.build_module``.

    with_weights: load the file ``model.weights``, if there is one.
    """
    m, c = config.model, config.client
    return partial(
        build_module, seed=config.seed, name=m.name, constants=m.constants, projection=m.projection, lr=c.lr,
        momentum=c.momentum, weight_decay=c.weight_decay, optimizer=c.optimizer,
        weights=config.weights if with_weights else None,
    )  # fmt: skip


def local_loop(config: Experiment, augment: bool) -> LocalSGD:
    """Return the settings of the clients' local training; augment: flip and crop the training images."""
    c, d = config.client, config.dp
    goal = Target(d.target_epsilon, d.delta, config.federation.rounds) if d.target_epsilon is not None else None
    return LocalSGD(
        c.epochs,
        c.batch_size,
        c.drop_last,
        c.equal_work,
        augment,
        DPSGD(d.noise_multiplier, d.clip, goal, d.at_once) if d.local else None,
        c.onednn,
        checks.schedule_of(*_schedule(config)),
        c.clip_norm,
        c.precision,
        c.accumulate,
        c.batched,
        c.graphs,
    )


def _schedule(config: Experiment):
    return config.client.lr_schedule, config.client.constants, config.federation.rounds


def noise_key(config: Experiment) -> int:
    """Return a 128-bit key of the experiment's noise, so that no two experiments use the same noise.

    The key is computed from all fields that decide the results. It does not distinguish 1 and 1.0. It ignores the
    number of rounds if a run with more rounds begins like a run with fewer rounds.
    """
    has_target = config.dp.target_epsilon is not None or config.dp.central_epsilon is not None
    is_longer_alike = not has_target and not checks.depends_on_rounds(config.client.lr_schedule)
    decided = {n: v for n, v in deciding(config).items() if n != "federation.rounds" or not is_longer_alike}
    facts = {n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in decided.items()}
    return wide_key("experiment", repr(sorted(facts.items())))


def with_gpus(spec: RunSpec, config: Experiment) -> RunSpec:
    """Return the run with the GPU share of ``config``, which differs from the run's experiment only in this share."""
    return replace(spec, record=config, gpus_per_actor=config.federation.gpus_per_actor)


def own_options(config: Experiment) -> list[str]:
    """Return the command-line options that name the user's components and data folder."""
    return [*parts_of_own(config), *load_data.dir_option(config.data.dir)]
