"""Share data among the clients of a ``RunSpec`` and build the federation that is ready to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from pytorch_lightning import LightningModule

from fedcommons.config import registry
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.client_worker import floating_buffers, trainable_parameters
from fedcommons.core.executor import Executor
from fedcommons.core.worker import RunData, Worker, fresh_torch, set_up_process
from fedcommons.errors import UserError
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.flat_tensors import EMPTY, flatten
from fedcommons.generators import image_cache
from fedcommons.generators.requests import Contribution
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.noise import Source
from fedcommons.runs import pool_audit
from fedcommons.runs.leaks import computed_by_all, leaks_of
from fedcommons.runs.plans import begin, on_clients
from fedcommons.runs.spec import RunSpec
from fedcommons.runs.worker import build_worker
from fedcommons.sharing import disclosure
from fedcommons.sharing.exchange import Shared, contribute, share_by_method, share_contributed
from fedcommons.sharing.stage import Contributions
from fedcommons.storage.artifact_store import Store

OnStep = Callable[[str, int, int, str], None]
"""Progress callback; arguments: the generator's name, steps done, total steps, "training" or "sampling"."""


@fresh_torch()
def synthetic_images(
    spec: RunSpec, store: Store, jobs: Sequence[image_cache.Job], say: Callable[[str], None],
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
    return contributions(spec, store)


def contributions(spec: RunSpec, store: Store) -> list[Contribution]:
    """Read the synthetic images of each generation request from the artifact store.

    Raises:
        LookupError: the store lacks the images of a request.
    """
    return [image_cache.read(store, need) for need in spec.requests]


@dataclass(frozen=True)
class Assembled:
    """A federation that is ready to run: the clients' data after sharing, the algorithm and the plan of the rounds."""

    spec: RunSpec
    shared: Shared
    plan: Plan
    audited: pool_audit.PoolAudit | None = None  # None: no audit was requested, or no images exist

    @property
    def data(self) -> RunData:
        return self.shared.data

    @property
    def algorithm(self) -> Algorithm:
        return self.spec.algorithm

    def keyed(self, salt: bytes) -> "Assembled":
        """Return a copy whose server draws noise and samples clients by the run's salt (empty: by the seed)."""
        return replace(self, plan=replace(self.plan, source=Source(self.spec.noise_key, salt)))

    def on(self, data: RunData) -> "Assembled":
        """Return a copy of the federation whose clients have the data ``data``."""
        return replace(self, shared=replace(self.shared, data=data))

    def module(self) -> LightningModule:
        """Return the untrained module that clients train."""
        return self.spec.module(self.spec.facts)

    @property
    def steps(self) -> int:
        """Return K, the number of local steps that a client with the mean number of examples makes in a round."""
        clients = self.data.clients
        return self.spec.local.steps_for(round(clients.rows.sizes.mean()), float(np.mean(clients.n_own)))

    def executor(self, salt: bytes = b"") -> Executor:
        """Return the executor that trains the clients; ``salt``: the run's salt, which keys secret noise, if any."""
        spec = self.spec
        if spec.is_secret and not (salt and (self.plan.source.salt == salt or not self.plan.central)):
            raise ValueError(
                "dp.noise is secret: the executor needs the run's salt, and the plan with dp.central does, too"
            )
        source = Source(spec.noise_key, salt)
        if not spec.actors:
            return Serial(lambda data: self.on(data).worker(source), self.data)
        from fedcommons.federation.ray_executor import RayActors

        module, loop = partial(spec.module, spec.facts), replace(spec.local, schedule=None)
        build = partial(spec.elsewhere, str(registry.base()), module, loop, self.plan.facts.weighting, source)
        return RayActors(build, self.data, spec.actors, spec.gpus_per_actor, transport=spec.transport)

    def worker(self, source: Source) -> Worker:
        """Return the worker of this process; source: the source of noise."""
        weighting = self.plan.facts.weighting
        return build_worker(self.module, self.spec.local, weighting, source, self.algorithm, self.data)

    def start(self, memory: ClientMemory) -> Standing:
        """Return the federation's state before round 1; ``memory``: the clients' stored states, which are empty."""
        module = self.module()
        state = begin(self.algorithm, flatten(trainable_parameters(module)), self.plan.facts, self.spec.seed)
        buffers = EMPTY if self.plan.keep_buffers else floating_buffers(module)
        ledger = Ledger.before_rounds(self.shared.releases)
        return Standing(0, state, memory, self.shared.traffic, buffers, ledger=ledger)


def assemble_own(
    spec: RunSpec, store: Store, jobs: Sequence[image_cache.Job], say: Callable[[str], None], on_step: OnStep | None
) -> Assembled:
    """Generate missing images, check that private generators used only their own client's examples, and assemble."""
    images = synthetic_images(spec, store, jobs, say, on_step)
    disclosure.require_own(spec.stage, spec.client_data, spec.requests, images)
    return assemble(spec, images)


@fresh_torch()
def assemble(spec: RunSpec, contributions: Sequence[Contribution] = ()) -> Assembled:
    """Build the federation: apply the sharing strategy to ``contributions``, the result of ``synthetic_images``."""
    set_up_process()
    return assemble_contributed(spec, contribute(spec.stage, spec.client_data, contributions))


@fresh_torch()
def assemble_contributed(spec: RunSpec, contributed: Contributions) -> Assembled:
    """Build the federation from the examples that clients contribute, which the strategy's ``make`` returned."""
    dataset, client_data, audited = spec.dataset, spec.client_data, None
    if spec.is_audited and (needs := spec.requests):
        audited = pool_audit.audited(
            client_data, contributed, needs, dataset.validation, spec.module(dataset), withhold=spec.withholds
        )
        contributed = audited.released
    shared = share_contributed(spec.stage, client_data, contributed)
    tables = [part.store.y for part in (shared.data.clients, shared.data.pool) if part is not None]
    is_soft = dataset.n_classes is not None and any(y.is_floating_point() for y in tables)
    if is_soft and capabilities_of(spec.algorithm).needs_classes:
        raise UserError(
            f"algorithm {spec.names['algorithm']} works by class, and sharing stage {type(spec.stage).__name__} gives "
            "soft labels, which are probabilities of the classes."
        )
    if audited and spec.withholds:
        shared = pool_audit.uncovered(shared)
    if judged := spec.stage if spec.local.dp else None:
        disclosure.require_once(judged, shared.data)
    shared = share_by_method(shared, spec.algorithm, dataset.n_classes, spec.seed)
    sets = {"test": dataset.test, "validation": dataset.validation}
    if spec.plan.attack and (triggered := spec.plan.attack.triggered(dataset)):
        sets["attack"] = triggered
    data = replace(shared.data, sets=sets, n_classes=dataset.n_classes or 0, tests=spec.tests, public=dataset.public)
    plan = on_clients(spec.plan, data.clients, pool=len(data.pool.rows.flat) if data.pool and data.serves else 0)
    private = spec.stage if spec.local.dp or plan.central else None
    plan = replace(plan, leaks=leaks_of(dataset.computed, spec.stop, private, client_data, contributed))
    shared = replace(shared, data=data, releases=[*shared.releases, *computed_by_all(dataset.computed, len(data.real))])
    return Assembled(spec, shared, plan, audited)
