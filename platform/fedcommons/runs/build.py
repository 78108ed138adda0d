"""From a config to what a run is played with: the only place that knows all parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from fedcommons.accounting import privacy
from fedcommons.accounting.privacy import PrivacyLedger
from fedcommons.algorithms import build as build_algorithm
from fedcommons.artifacts import Store
from fedcommons.config import experiment as configs
from fedcommons.config.experiment import Experiment
from fedcommons.core.algorithm import Algorithm, Facts
from fedcommons.core.executor import Executor
from fedcommons.core.local import Work, floating_buffers
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch
from fedcommons.data import datasets
from fedcommons.data.datasets import Dataset, Examples
from fedcommons.data.partition import Partitioned, partition
from fedcommons.errors import UserError
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Plan, Standing
from fedcommons.federation.serial import Serial
from fedcommons.runs import capacity
from fedcommons.runs.checks import check
from fedcommons.seeds import set_default_generator
from fedcommons.sharing import synthetic_pool
from fedcommons.sharing.settings import Shared, needs_generators, refuse_empty_pool, share
from fedcommons.tensors import EMPTY, flatten
from lightning_modules import Classifier
from lightning_modules.networks import CNN, VGG11, Linear, Projected


@dataclass(frozen=True)
class Prepared:
    """A checked experiment with its data dealt to clients: everything before the first costly step."""

    config: Experiment
    dataset: Dataset
    partition: Partitioned

    @property
    def needs(self) -> list[synthetic_pool.Need]:
        """The generators and synthetic images this experiment uses."""
        return synthetic_pool.needs(self.config, self.dataset, self.partition) if needs_generators(self.config) else []


@lru_cache(maxsize=2)  # the cells of a sweep share their data
def _load(data: configs.Data) -> Dataset:
    return datasets.load(data)


@fresh_torch()
def prepare(config: Experiment) -> Prepared:
    """Check the request, load the data and deal it.

    Raises:
        UserError: something about the request cannot be met.
    """
    check(config)
    dataset = _load(config.data)
    if config.model.name == "vgg11" and dataset.shape[1] % 32:
        raise UserError(f"model.name vgg11 needs images of 32x32 or 64x64, and {dataset.name} has {dataset.shape[1:]}.")
    if config.model.name == "cnn" and dataset.shape[1] < 4:
        raise UserError(f"model.name cnn needs images of at least 4x4, and {dataset.name} has {dataset.shape[1:]}.")
    levels = 2 ** (len(config.generator.channels) - 1)
    if needs_generators(config) and dataset.shape[1] % levels:
        raise UserError(
            f"generator.channels has {len(config.generator.channels)} levels, so the image side must be a multiple "
            f"of {levels}, and {dataset.name} has {dataset.shape[1]}."
        )
    labels = dataset.train.y.numpy()
    dealt = partition(config.partition, labels, dataset.n_classes, config.seed)
    sizes = [len(rows) for rows in dealt.rows]
    refuse_empty_pool(config, len(dataset.train), sizes)
    privacy.refuse_large_delta(config, sizes)
    if needs_generators(config):
        capacity.require_generator(config)
        images = sum(synthetic_pool.contribution(config, len(dataset.train), n) for n in sizes)
        capacity.require_images(images, dataset.shape)
    # names and shapes without numbers: an algorithm that refuses them does so here
    model = flatten(dict(build_classifier(config, dataset, "meta").named_parameters()))
    capacity.require_model(model)
    facts = Facts(len(sizes), sizes, config.federation.rounds)
    build_algorithm(config, dataset.augment).start(model, facts, config.seed)
    return Prepared(config, dataset, dealt)


@fresh_torch()
def build_classifier(config: Experiment, dataset: Dataset, device: str = "cpu") -> Classifier:
    """The LightningModule that clients train, its initial weights keyed by the run's seed."""
    set_default_generator(config.seed, "initial weights")
    shape, classes = dataset.shape, dataset.n_classes
    m, c = config.model, config.client
    with torch.device(device):
        if m.name == "cnn":
            network = CNN(shape, classes, m.channels, batch_norm=m.batch_norm)
        else:
            network = {"vgg11": VGG11, "linear": Linear}[m.name](shape, classes)
        if m.projection:
            network = Projected(network, m.projection)
        return Classifier(
            network,
            lr=c.lr,
            momentum=c.momentum,
            weight_decay=c.weight_decay,
            optimizer=c.optimizer,
            mean=dataset.mean,
            std=dataset.std,
        )


@fresh_torch()
def synthetic_images(
    prepared: Prepared, store: Store, jobs: Sequence[synthetic_pool.Job], say: Callable[[str], None]
) -> list[Examples] | None:
    """Each client's contribution of synthetic images; ``jobs``: those to be made here, before they are read."""
    if not prepared.needs:
        return None
    torch.set_num_threads(1)  # as in Ray's workers: more threads would round differently
    for number, job in enumerate(jobs, 1):
        doing = "training" if job.epochs else "sampling"
        say(f"generator {number}/{len(jobs)} (client {job.needs[0].client}): {doing}")
        synthetic_pool.keep(store, job, synthetic_pool.make(job))
    return contributions(prepared, store)


def contributions(prepared: Prepared, store: Store) -> list[Examples]:
    """Each client's contribution of synthetic images, as many as ``sharing.p`` asks for.

    Raises:
        LookupError: they have not been made.
    """
    sizes, n_total = [len(rows) for rows in prepared.partition.rows], len(prepared.dataset.train)
    return [
        synthetic_pool.read(store, need, synthetic_pool.contribution(prepared.config, n_total, n))
        for need, n in zip(prepared.needs, sizes, strict=True)
    ]


@dataclass(frozen=True)
class Assembled:
    """Clients with what they train on, the algorithm and the plan: all that a federation is played with."""

    prepared: Prepared
    shared: Shared
    data: RunData
    algorithm: Algorithm
    plan: Plan
    book: PrivacyLedger | None

    @property
    def config(self) -> Experiment:
        return self.prepared.config

    @property
    def facts(self) -> Dataset:
        """The data set without its images."""
        return datasets.without_images(self.prepared.dataset)

    def executor(self) -> Executor:
        """The executor that ``config.federation`` names."""
        build, f = partial(build_worker, self.config, self.facts), self.config.federation
        if f.executor == "serial":
            return Serial(build, self.data)
        from fedcommons.federation.ray_actors import RayActors

        return RayActors(build, self.data, f.actors, f.gpus_per_actor)

    def start(self, memory: ClientMemory) -> Standing:
        """Before round 1: the untrained model; ``memory``: empty, to be filled by the clients."""
        module = build_classifier(self.config, self.facts)
        state = self.algorithm.start(flatten(dict(module.named_parameters())), self.plan.facts, self.config.seed)
        buffers = EMPTY if self.plan.keep_buffers else floating_buffers(module)
        return Standing(0, state, memory, self.shared.traffic, buffers)


@fresh_torch()
def assemble(prepared: Prepared, synthetic: Sequence[Examples] | None) -> Assembled:
    """Share, and plan the rounds; ``synthetic``: the clients' ``synthetic_images``."""
    c, dataset = prepared.config, prepared.dataset
    shared = share(c, dataset, prepared.partition, synthetic)
    sets = {"test": dataset.test, "validation": dataset.validation}
    data = RunData(shared.clients, shared.own, sets, shared.pool)
    facts, f = Facts(len(shared.clients), shared.clients.sizes, c.federation.rounds), c.federation
    plan = Plan(facts, f.participation, f.blocks, c.seed, c.straggler.q, f.buffers == "keep", f.max_norm)
    algorithm = build_algorithm(c, dataset.augment)
    return Assembled(prepared, shared, data, algorithm, plan, privacy.ledger(c, shared.clients))


def build_worker(config: Experiment, facts: Dataset, data: RunData) -> Worker:
    """What a worker of this experiment holds; ``facts``: the data set without its images."""
    device = default_device()
    work = Work(build_classifier(config, facts), device)
    return Worker(work, build_algorithm(config, facts.augment), data.to(device))
