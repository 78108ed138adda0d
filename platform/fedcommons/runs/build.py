"""Check an experiment's config and build its federation; only this module depends on all kinds of components."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcommons.config import registry
from fedcommons.config.dotted import part_of
from fedcommons.config.experiment import Experiment
from fedcommons.config.schema import Data
from fedcommons.core.algorithm import (
    Algorithm,
    ChoosesClients,
    Facts,
    Personal,
    State,
    require_attributes,
)
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import floating_buffers, trainable_parameters
from fedcommons.core.executor import Executor
from fedcommons.core.features import batch_norm_parameters, head_parameters
from fedcommons.core.returned import require_state
from fedcommons.core.worker import RunData, fresh_torch, set_up_process
from fedcommons.data.clients import Clients
from fedcommons.data.examples import STANDARDISATION, Dataset, Examples, without_images
from fedcommons.data.federated import ClientDatasets
from fedcommons.data.partition import Partitioned
from fedcommons.errors import UserError, before_any_work, require_type, user_code_context
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.client_sampling import joining
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.federation.stragglers import Independent, Rule, arrival
from fedcommons.flat_tensors import EMPTY, Flat, flatten
from fedcommons.generators import image_cache
from fedcommons.generators.requests import (
    Contribution,
    GenerationRequest,
    GeneratorRecipe,
    n_seen,
    require_constants,
    salt_facts,
)
from fedcommons.privacy import ledger, salts
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.noise import Source
from fedcommons.privacy.salts import SECRET
from fedcommons.runs import check_module, load_data, pool_audit
from fedcommons.runs.checks import (
    check,
    refuse,
    require_no_server_model,
    require_participants,
    require_pool,
    require_replies,
    require_target,
)
from fedcommons.runs.early_stopping import stop_of
from fedcommons.runs.leaks import computed_by_all, leaks_of
from fedcommons.runs.worker import build_module, build_worker, local_loop, noise_key, standardises
from fedcommons.runtime import memory_limit
from fedcommons.sharing.stage import (
    Contributions,
    Forewarning,
    Generating,
    Salted,
    Shared,
    Stage,
    contribute,
    require_once,
    share_by_method,
    share_contributed,
)
from fedcommons.storage import object_store
from fedcommons.storage.artifact_store import Store

OnStep = Callable[[str, int, int, str], None]
"""Progress callback; arguments: the generator's name, steps done, total steps, "training" or "sampling"."""


@dataclass(frozen=True)
class Prepared:
    """A checked experiment with its data partitioned among the clients, before anything is trained."""

    config: Experiment
    dataset: Dataset
    partition: Partitioned
    algorithm: Algorithm
    stage: Stage
    straggler_rule: Rule | None  # the rule that picks stragglers; None: there are no stragglers
    train: Examples  # the training examples that are partitioned, without the clients' test examples
    tests: Clients | None = None  # the clients' test examples; None: clients have no test examples
    about: Mapping[str, Any] = field(default_factory=dict)  # arguments of ``Facts`` that describe data and model
    notes: Sequence[str] = ()  # messages to the user about data and model

    @property
    def client_data(self) -> ClientDatasets:
        """Return the input of the sharing strategy: the clients' real data sets, and public facts about the data."""
        data = self.dataset
        client_data, is_secret = Clients(self.train, self.partition.rows), self.config.dp.noise == SECRET
        return ClientDatasets(client_data, data.n_classes, data.flip, self.config.seed, is_secret)

    @property
    def salts(self) -> list[str]:
        """Return hashes of the secret salts that are used before round 1, and of the requests for synthetic images."""
        client_data, stage = self.client_data, self.stage
        stage_salts = stage.salts(client_data) if client_data.is_secret and isinstance(stage, Salted) else ()
        return [*salt_facts(self.requests), *map(salts.name_of, stage_salts)]

    @property
    def notes_for_user(self) -> Sequence[str]:
        """Return the messages shown to the user before any training, including those of the sharing strategy."""
        stage = self.stage
        if not isinstance(stage, Forewarning):
            return self.notes
        with before_any_work(), user_code_context(stage, "beforehand"):
            return [*self.notes, *(require_type(str, sentence) for sentence in stage.beforehand(self.client_data))]

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """Return a generation request (generator and images) per client; empty if the strategy uses no generators."""
        stage = self.stage
        if not isinstance(stage, Generating):
            return ()
        with before_any_work(), user_code_context(stage, "requests"):
            requests = list(stage.requests(self.client_data, recipe(self.config)))
            return [require_type(GenerationRequest, request) for request in requests]


def recipe(config: Experiment) -> GeneratorRecipe:
    """Return the specification of the clients' generators: the component and the options of its training."""
    assert config.generator is not None
    name, digest = config.generator.name, config.source.get("generator")
    return GeneratorRecipe(
        name, part_of(config, "generator"), config.generator.rho, digest, config.generator.label_noise,
        config.dp.noise == SECRET,
    )  # fmt: skip


@lru_cache(maxsize=2)  # most trials of a sweep use the same data set
def _load(data: Data, source: str | None) -> Dataset:
    return load_data.load(data)


@fresh_torch()
@before_any_work()
def prepare(config: Experiment) -> Prepared:
    """Check the config, load the data and partition it among the clients.

    Raises:
        UserError: a field is invalid, or does not fit the data set, the model or another field.
    """
    check(config)
    if config.storage is not None and (flaw := object_store.flaw(config.storage)):
        raise UserError(f"storage must be {flaw}")
    if config.dp.noise == SECRET:
        salts.require_writable(Path(config.artifacts))
        if config.storage is not None and not object_store.is_url(config.storage):
            salts.require_outside(Path(config.storage))
    kinds = ("algorithm", "sharing", "generator", "straggler")
    components = {kind: part_of(config, kind) for kind in kinds if kind in config.chosen}
    for component in components.values():
        refuse(component, "check", config.flat)
    if "generator" in components:
        require_constants(components["generator"])
    dataset = _load(config.data, config.source.get("data"))
    if "generator" in components:
        refuse(components["generator"], "check_type", dataset.train.x.dtype, dataset.name)
        refuse(components["generator"], "check_shape", dataset.shape, dataset.name)
    every = dataset.train
    partition = load_data.partition_rows(
        config.partition, every.y.numpy(), dataset.n_classes, config.seed,
        groups=None if every.groups is None else every.groups.numpy(),
        factors={name: values.numpy() for name, values in every.factors.items()}, origin=dataset.origin,
    )  # fmt: skip
    share, shift, size = config.data.client_test, config.partition.shift, config.partition.shift_size
    partition, train, tests = load_data.as_held(partition, dataset, share, shift, size, config.seed)
    sizes = [len(rows) for rows in partition.rows]
    require_participants(config.federation.participation, len(sizes))  # after the partition, which decides N
    rule = None if components["straggler"] == Independent() else components["straggler"]
    prepared = Prepared(config, dataset, partition, components["algorithm"], components["sharing"], rule, train, tests)
    require_pool(prepared.algorithm, prepared.stage)
    refuse(prepared.stage, "check_data", prepared.client_data)
    if config.generator is not None:
        refuse(components["generator"], "check_sizes", [n_seen(config.generator.rho, n) for n in sizes])
    refuse(
        rule, "check_clients", len(sizes), joining_of(prepared.algorithm, len(sizes), config.federation.participation)
    )
    if config.dp.local or config.dp.delta != type(config.dp).delta:  # DP-SGD, or the user has changed delta
        ledger.refuse_large_delta(config.dp.delta, sizes)
    loop = local_loop(config, dataset.augment)
    require_target(prepared.algorithm, loop, sizes)
    if config.sharing.is_audited:
        pool_audit.subjects(prepared.client_data, prepared.requests, dataset.validation)
    # A built-in network is built on the meta device (names and shapes only), which suffices to check it.
    is_user_defined = registry.is_user_defined(config.model.name) or registry.is_user_defined(config.data.name)
    is_tried = loop.batched or loop.graphs or config.dp.at_once > 1
    module = build_module(config, dataset, "cpu" if is_user_defined or is_tried else "meta")
    notes: Sequence[str] = ()
    if is_user_defined:
        label = registry.component_label("model", config.model.name)
        check_module.require_hooks(prepared.algorithm, module, loop, label)
        is_of_clients = config.measure.clients or config.evaluate.clients
        of_clients = (tests.sizes if tests and not config.measure.clients else sizes) if is_of_clients else ()
        largest = max(len(dataset.test), len(dataset.validation), *of_clients)
        measured, chunk = config.measure.every > 0, config.evaluate.chunk
        notes = check_module.try_module(module, config.model.name, dataset, largest, chunk, measured=measured)
        check_module.require_hooks(prepared.algorithm, module, loop, label)  # again: a local step may assign hooks
    if is_tried:
        check_module.try_a_step(loop, config.model.name, module, dataset)
    if not standardises(config.model.name, module):
        dataset = replace(dataset, computed=tuple(what for what in dataset.computed if what != STANDARDISATION))
    model = flatten(trainable_parameters(module))
    memory_limit.require_model(model)
    keeps = config.federation.buffers == "keep"
    is_kept = capabilities_of(prepared.algorithm).keeps_batch_norm
    measured = keeps and config.measure.every > 0 and not is_kept
    check_module.require_statistics(module, private=config.dp.local, measured=measured)
    check_module.require_precision(config.client.precision, module)
    require_attributes(prepared.algorithm, module)
    if dataset.n_classes is None and capabilities_of(prepared.algorithm).needs_classes:
        raise UserError(f"algorithm {config.algorithm} works by class, but labels of {dataset.name} are not classes.")
    check_module.require_distillable(prepared.algorithm, module, dataset)
    # Attributes of a user-defined module may raise an error, which the context reports as an error of user code.
    with before_any_work(), user_code_context(registry.component_label("model", config.model.name)):
        about = {
            "shape": dataset.shape, "n_classes": dataset.n_classes, "head": head_parameters(module),
            "batch_norm": batch_norm_parameters(module),
        }  # fmt: skip
    facts = plan_of(config, prepared.algorithm, rule, prepared.client_data.clients, about).facts
    require_replies(facts, config.straggler.rule, config.straggler.constants)
    if "model" not in begin(prepared.algorithm, model, facts, config.seed):
        options = {
            "--federation.buffers keep": keeps or not is_kept,
            "--evaluate.clients true": config.evaluate.clients,
            "--measure.every 0": not config.measure.every,
        }
        require_no_server_model(config.algorithm, [option for option, is_met in options.items() if not is_met])
    notes = [*(dataset.origin.notes if dataset.origin else ()), *notes]
    return replace(prepared, about=about, dataset=dataset, notes=notes)


def begin(algorithm: Algorithm, model: Flat, facts: Facts, seed: int) -> State:
    """Call the method's ``start`` and return its result, the server's state before round 1.

    Raises:
        ClientError: the method's ``start`` failed, or returned no valid state.
    """
    with user_code_context(algorithm, "start"):
        state = algorithm.start(model, facts, seed)
        require_state(state, model.layout, has_model="model" in state or not isinstance(algorithm, Personal))
        return state


def plan_of(
    config: Experiment, algorithm: Algorithm, rule: Rule | None, clients: Clients, about: Mapping[str, Any]
) -> Plan:
    """Return the plan of all rounds: how clients are sampled, which are stragglers, and the use of partial work.

    rule: the rule that picks stragglers; None: no stragglers. clients: the clients' training data, of which only
    the numbers of examples are used. about: arguments of ``Facts`` that describe data and model, as in ``Prepared``.
    """
    f, n, joins = config.federation, len(clients), joining_of(algorithm, len(clients), config.federation.participation)
    by_method, by_rule = capabilities_of(algorithm).takes_partial, capabilities_of(rule).leaves_partial
    accepts_partial = {"take": True, "drop": False, "method": by_method}[config.straggler.partial]
    replies_partially = accepts_partial and by_rule
    replied = arrival(None if replies_partially else rule, n, joins, config.seed)
    sizes, counts = tuple(clients.rows.totals.tolist()), partial(clients.counts, about["n_classes"])
    facts = Facts(n, sizes, f.rounds, f.weighting, replied, counts, **about)
    return Plan(facts, f.participation, f.blocks, config.seed, rule, f.buffers == "keep", f.max_norm, accepts_partial)


def joining_of(algorithm: Algorithm, n: int, participation: float) -> int | None:
    """Return floor(n participation), how many of n clients a round samples; None if the algorithm chooses clients."""
    return None if isinstance(algorithm, ChoosesClients) else joining(n, participation)


@fresh_torch()
def synthetic_images(
    prepared: Prepared, store: Store, jobs: Sequence[image_cache.Job], say: Callable[[str], None],
    on_step: OnStep | None = None,
) -> list[Contribution]:  # fmt: skip
    """Run ``jobs``, which generate the images that the artifact store lacks; return each client's synthetic images."""
    set_up_process()
    for number, job in enumerate(jobs, 1):
        doing = "training" if job.epochs else "sampling"
        name = f"generator {number}/{len(jobs)} (client {job.requests[0].client})"
        say(f"{name}: {doing}")
        step = partial(on_step, name) if on_step else None
        image_cache.keep(store, job, image_cache.make(job, step))
    return contributions(prepared, store)


def contributions(prepared: Prepared, store: Store) -> list[Contribution]:
    """Read the synthetic images of each generation request from the artifact store.

    Raises:
        LookupError: the store lacks the images of a request.
    """
    return [image_cache.read(store, need) for need in prepared.requests]


@dataclass(frozen=True)
class Assembled:
    """A federation that is ready to run: the clients' data after sharing, the algorithm and the plan of the rounds."""

    prepared: Prepared
    shared: Shared
    plan: Plan
    audited: pool_audit.PoolAudit | None = None  # None: no audit was requested, or no images exist

    @property
    def config(self) -> Experiment:
        return self.prepared.config

    @property
    def data(self) -> RunData:
        return self.shared.data

    @property
    def algorithm(self) -> Algorithm:
        return self.prepared.algorithm

    def on(self, data: RunData) -> "Assembled":
        """Return a copy of the federation whose clients have the data ``data``."""
        return replace(self, shared=replace(self.shared, data=data))

    @property
    def facts(self) -> Dataset:
        """Return the data set without examples: its name, shapes, types and statistics."""
        return without_images(self.prepared.dataset)

    @property
    def steps(self) -> int:
        """Return K, the number of local steps in a round of a client with the mean number of examples."""
        clients, loop = self.data.clients, local_loop(self.config, self.facts.augment)
        return loop.steps_for(round(clients.rows.sizes.mean()), float(np.mean(clients.n_own)))

    def executor(self, salt: bytes = b"") -> Executor:
        """Return the executor that trains the clients; ``salt``: the run's salt, which keys secret noise, if any.

        Raises:
            ValueError: ``dp.noise`` is secret and the salt is empty.
        """
        if self.config.dp.noise == SECRET and not salt:
            raise ValueError("dp.noise is secret: the executor needs the run's salt")
        source, f = Source(noise_key(self.config), salt), self.config.federation
        build = partial(build_worker, self.config, self.facts, str(registry.base()), source)
        if f.executor == "serial":
            return Serial(partial(build, self.prepared.algorithm), self.data)
        from fedcommons.federation.ray_executor import RayActors

        return RayActors(partial(build, None), self.data, f.actors, f.gpus_per_actor)

    def start(self, memory: ClientMemory) -> Standing:
        """Return the federation's state before round 1; ``memory``: the clients' stored states, which are empty."""
        module = build_module(self.config, self.facts)
        state = begin(self.algorithm, flatten(trainable_parameters(module)), self.plan.facts, self.config.seed)
        buffers = EMPTY if self.plan.keep_buffers else floating_buffers(module)
        ledger = Ledger.before_rounds(self.shared.releases)
        return Standing(0, state, memory, self.shared.traffic, buffers, ledger=ledger)


@fresh_torch()
def assemble(prepared: Prepared, contributions: Sequence[Contribution] = ()) -> Assembled:
    """Build the federation: apply the sharing strategy to ``contributions``, the result of ``synthetic_images``."""
    set_up_process()
    return assemble_contributed(prepared, contribute(prepared.stage, prepared.client_data, contributions))


@fresh_torch()
def assemble_contributed(prepared: Prepared, contributed: Contributions) -> Assembled:
    """Build the federation from the examples that clients contribute, which the strategy's ``make`` returned."""
    c, dataset, audited = prepared.config, prepared.dataset, None
    if c.sharing.is_audited and (needs := prepared.requests):
        module, real, withhold = build_module(c, dataset), prepared.client_data, c.sharing.withhold == "near_copies"
        audited = pool_audit.audited(real, contributed, needs, dataset.validation, module, withhold=withhold)
        contributed = audited.released
    shared = share_contributed(prepared.stage, prepared.client_data, contributed)
    if audited and c.sharing.withhold != "none":
        shared = pool_audit.uncovered(shared)
    if judged := prepared.stage if c.dp.local else None:
        require_once(judged, shared)
    shared = share_by_method(shared, prepared.algorithm, dataset.n_classes, c.seed)
    sets = {"test": dataset.test, "validation": dataset.validation}
    data = replace(shared.data, sets=sets, n_classes=dataset.n_classes or 0, tests=prepared.tests)
    about = {**prepared.about, "pool": len(data.pool.rows.flat) if data.pool and data.serves else 0}
    leaks = leaks_of(dataset.computed, stop_of(c), judged, prepared.client_data, contributed)
    plan = replace(plan_of(c, prepared.algorithm, prepared.straggler_rule, data.clients, about), leaks=leaks)
    shared = replace(shared, data=data, releases=[*shared.releases, *computed_by_all(dataset.computed, len(data.real))])
    return Assembled(prepared, shared, plan, audited)
