"""One experiment: data -> partition -> sharing -> federation -> measures, as in section 4 of the Fedssyn paper."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fedcommons import capacity, measures
from fedcommons import config as configs
from fedcommons.accounting import privacy
from fedcommons.accounting.privacy import PrivacyLedger
from fedcommons.algorithms import build as build_algorithm
from fedcommons.algorithms.algorithm import Algorithm, Facts
from fedcommons.algorithms.local import Work, floating_buffers
from fedcommons.artifacts import Store
from fedcommons.checks import check
from fedcommons.config import Experiment
from fedcommons.data import datasets
from fedcommons.data.datasets import Dataset, Examples
from fedcommons.data.partition import Partitioned, partition
from fedcommons.errors import ClientError, UserError, leaving_errors
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.executor import Executor
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rejections import records, told
from fedcommons.federation.rounds import Plan, Standing, times_answered
from fedcommons.federation.serial import Serial
from fedcommons.federation.worker import RunData, Worker, default_device, fresh_torch
from fedcommons.files import write_json
from fedcommons.seeds import set_default_generator
from fedcommons.sharing import synthetic_pool
from fedcommons.sharing.settings import Shared, needs_generators, refuse_empty_pool, share
from fedcommons.tensors import EMPTY, flatten
from fedcommons.tracking.run_folder import RunFolder, opened, read_finished
from fedcommons.tracking.tracker import Tracker
from lightning_modules import Classifier
from lightning_modules.networks import CNN, VGG11, Linear, Projected

OnRound = Callable[[int, Mapping[str, float | None]], None]

PATIENCE = 60
"""Seconds that a sweep's trial waits for its folder: the trials of a sweep that was killed outlive it by some."""


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


@fresh_torch()
def run(
    config: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = print,
    on_round: OnRound | None = None,
    may_generate: bool = True,
) -> dict[str, Any]:
    """Run the experiment in ``folder`` and return its summary, which is also ``folder/summary.json``.

    Rounds are counted from 1 and evaluated after aggregation; round 0 is the untrained model. With ``resume`` a run
    that was broken off continues from its last checkpoint and ends as if it had never been; a finished one is read.
    ``may_generate``: train generators that the store lacks; without it their absence is a ``LookupError``.
    What stops a run is left in ``folder/error.txt``; a client's failure leaves a checkpoint of the round before too.
    """
    prepared = prepare(config)
    if resume and (finished := read_finished(folder, config)):
        say(f"{folder} holds this run, finished: nothing is left to do.")
        return finished
    store = Store(Path(config.artifacts), say)
    if jobs := synthetic_pool.missing(store, prepared.needs) if may_generate else []:
        store.require_writable()
    if config.federation.executor == "ray_actors":
        from fedcommons import cluster

        cluster.connect()
        cluster.require_actors(config)
    with opened(folder, config, resume, say, 0 if may_generate else PATIENCE) as record:
        return _run(prepared, store, jobs, record, resume, say, on_round)


def _run(
    prepared: Prepared,
    store: Store,
    jobs: Sequence[synthetic_pool.Job],
    record: RunFolder,
    resume: bool,
    say: Callable[[str], None],
    on_round: OnRound | None,
) -> dict[str, Any]:
    config, folder = prepared.config, record.path
    with leaving_errors(folder):
        _write_partition(folder, prepared)
        ready = assemble(prepared, synthetic_images(prepared, store, jobs, say))
        executor = ready.executor()
        trackers: list[Tracker] = []
        summary = None
        try:
            start = _left(ready, record, resume)
            trackers += _trackers(config, record, say)
            end = _federate(ready, executor, start, record, trackers, on_round, say)
            record.require_rounds(end.round)
            dealt, p = prepared.partition.fingerprint, ready.shared.p
            summary = measures.summarise(config, dealt, record.rounds(), p, end)
            answered = times_answered(ready.plan, end.round) if ready.book else []
            rejected = sum(line.get("rejected", 0) for line in record.rounds())
            summary["privacy"] = privacy.statement(config, ready.book, answered, rejected)
            if summary["rejected"]:
                say(f"{told(summary['rejected'])}, see rejected in {folder / 'summary.json'}")
            return summary
        finally:
            executor.close()
            for tracker in trackers:
                tracker.finish(summary)


def _left(ready: Assembled, record: RunFolder, resume: bool) -> Standing:
    """Where the run was left: at its last checkpoint that is intact and has all its lines, or before round 1.

    What there is of later rounds is dropped, as they are played again.
    """
    memory = ClientMemory(cap_bytes=ready.config.federation.memory_mb * 1e6, folder=record.path / "memory")
    start = ready.start(memory)
    found = checkpoint.load_latest(record.checkpoints, memory, record.whole(), start.model.layout) if resume else None
    last = found.round if found else -1
    record.rewind(last)
    checkpoint.remove_after(record.checkpoints, last)
    now = found or start
    checkpoint.prune(record.checkpoints, now.memory)  # a run that was killed while it removed what is old left it
    return now


def _trackers(config: Experiment, record: RunFolder, say: Callable[[str], None]) -> list[Tracker]:
    """The run folder, and W&B unless it is off, which is told the rounds before a resumption again."""
    if config.tracking.wandb == "off":
        return [record]
    from fedcommons.tracking.wandb_tracker import WandbTracker

    wandb = WandbTracker(record.path, config, say)
    for line in record.rounds():
        wandb.log(line["round"], {name: value for name, value in line.items() if name != "round"})
    return [record, wandb]


def _federate(
    ready: Assembled,
    executor: Executor,
    start: Standing,
    record: RunFolder,
    trackers: Sequence[Tracker],
    on_round: OnRound | None,
    say: Callable[[str], None],
) -> Standing:
    """Play the rounds after ``start``, observe and record each; where the federation stands in the end."""
    config, f = ready.config, ready.config.federation
    courses = rounds.run(ready.algorithm, executor, ready.plan, start)
    if not record.rounds():  # so nobody has seen the untrained model yet
        courses = chain([(start, {"comm/once_bytes": start.traffic.once})], courses)
    answered = times_answered(ready.plan, start.round) if ready.book else []
    last, clock, lost = start, time.perf_counter(), set()
    try:
        for now, facts in courses:
            trained = time.perf_counter()
            metrics = {**facts, "comm/total_bytes": now.traffic.total}
            metrics |= measures.observe(config, executor, ready.data, ready.shared.p, now)
            if ready.book:
                for client in rounds.answering(ready.plan, now.round)[1] if now.round > start.round else ():
                    answered[client] += 1
                metrics["privacy/epsilon_local_training"] = max(ready.book.epsilons(answered))
            for tracker in trackers:
                tracker.log(now.round, metrics)
            record.log_times(now.round, {"train": trained - clock, "observe": time.perf_counter() - trained})
            if now.round % f.checkpoint_every == 0 or now.round == f.rounds:
                checkpoint.save(record.checkpoints, now)
            if now.rejected and not last.rejected:
                say(f"round {now.round}: {told(records(now.rejected))}; what is rejected later is counted")
            if new := {name for name, value in metrics.items() if value is not None and not isfinite(value)} - lost:
                say(f"round {now.round}: not finite, and null in the record: {', '.join(sorted(new))}; diverged?")
                lost |= new
            if on_round:
                on_round(now.round, metrics)
            last, clock = now, time.perf_counter()
    except ClientError:
        checkpoint.save(record.checkpoints, last)  # so that the client can be played again at once
        raise
    return last


def _write_partition(folder: Path, prepared: Prepared) -> None:
    from fedcommons.reports.plots import class_heatmap

    counts = prepared.partition.class_counts
    facts = {
        "fingerprint": prepared.partition.fingerprint,
        "sizes": [len(rows) for rows in prepared.partition.rows],
        "class_counts": counts.tolist(),
    }
    write_json(folder / "partition.json", facts)
    class_heatmap(counts, folder / "partition.png")
