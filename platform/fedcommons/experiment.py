"""One experiment: data -> partition -> sharing -> federation -> measures, as in section 4 of the Fedssyn paper."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fedcommons import config as configs
from fedcommons.accounting import privacy
from fedcommons.accounting.communication import Traffic
from fedcommons.algorithms import build as build_algorithm
from fedcommons.algorithms.algorithm import Algorithm, Facts
from fedcommons.algorithms.local import Work, floating_buffers
from fedcommons.artifacts import Store
from fedcommons.checks import check
from fedcommons.config import Experiment
from fedcommons.convergence.estimators import dissimilarity
from fedcommons.data import datasets
from fedcommons.data.datasets import Dataset, Examples
from fedcommons.data.partition import Partitioned, partition
from fedcommons.errors import UserError
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.evaluation import ModelTask, evaluate
from fedcommons.federation.executor import Executor
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Plan, Standing, times_answered
from fedcommons.federation.serial import Serial
from fedcommons.federation.worker import RunData, Worker, default_device
from fedcommons.files import write_json
from fedcommons.seeds import set_default_generator
from fedcommons.sharing import synthetic_pool
from fedcommons.sharing.settings import needs_generators, share
from fedcommons.tensors import EMPTY, flat, flatten
from fedcommons.tracking.run_folder import RunFolder, read_summary
from fedcommons.tracking.tracker import Tracker
from lightning_modules import Classifier
from lightning_modules.networks import CNN, VGG11, Linear, Projected

OnRound = Callable[[int, Mapping[str, float | None]], None]


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


def prepare(config: Experiment) -> Prepared:
    """Check the request, load the data and deal it.

    Raises:
        UserError: something about the request cannot be met.
    """
    check(config)
    dataset = _load(config.data)
    if config.model.name == "vgg11" and dataset.shape[1] % 32:
        raise UserError(f"model.name vgg11 needs images of 32x32 or 64x64, and {dataset.name} has {dataset.shape[1:]}.")
    levels = 2 ** (len(config.generator.channels) - 1)
    if needs_generators(config) and dataset.shape[1] % levels:
        raise UserError(
            f"generator.channels has {len(config.generator.channels)} levels, so the image side must be a multiple "
            f"of {levels}, and {dataset.name} has {dataset.shape[1]}."
        )
    labels = dataset.train.y.numpy()
    dealt = partition(config.partition, labels, dataset.n_classes, config.seed)
    with torch.device("meta"):  # names and shapes without numbers: an algorithm that refuses them does so here
        model = flatten(dict(build_classifier(config, dataset).named_parameters()))
    facts = Facts(len(dealt.rows), [len(rows) for rows in dealt.rows], config.federation.rounds)
    build_algorithm(config, dataset.augment).start(model, facts, config.seed)
    return Prepared(config, dataset, dealt)


def build_classifier(config: Experiment, dataset: Dataset) -> Classifier:
    """The LightningModule that clients train, its initial weights keyed by the run's seed."""
    set_default_generator(config.seed, "initial weights")
    shape, classes = dataset.shape, dataset.n_classes
    m, c = config.model, config.client
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


def build_worker(config: Experiment, facts: Dataset, data: RunData) -> Worker:
    """What a worker of this experiment holds; ``facts``: the data set without its images."""
    device = default_device()
    work = Work(build_classifier(config, facts), device)
    return Worker(work, build_algorithm(config, facts.augment), data.to(device))


def build_executor(config: Experiment, facts: Dataset, data: RunData) -> Executor:
    """The executor that ``config.federation`` names."""
    build = partial(build_worker, config, facts)
    if config.federation.executor == "serial":
        return Serial(build, data)
    from fedcommons.federation.ray_actors import RayActors

    return RayActors(build, data, config.federation.actors, config.federation.gpus_per_actor)


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
    """
    prepared = prepare(config)
    store = Store(Path(config.artifacts), say)
    if config.federation.executor == "ray_actors":
        from fedcommons import cluster

        cluster.connect()
        cluster.require_actors(config)
    record = RunFolder(folder, config, resume)
    if finished := read_summary(folder):
        return finished
    _write_partition(folder, prepared)
    synthetic = _synthetic(prepared, store, say, may_generate)
    shared = share(config, prepared.dataset, prepared.partition, synthetic)
    sets = {"test": prepared.dataset.test, "validation": prepared.dataset.validation}
    facts = datasets.without_images(prepared.dataset)
    executor = build_executor(config, facts, RunData(shared.clients, shared.own, sets))
    trackers: list[Tracker] = []
    summary = None
    try:
        memory = ClientMemory(cap_bytes=config.federation.memory_mb * 1e6, folder=folder / "memory")
        standing = checkpoint.load_latest(record.checkpoints, memory) if resume else None
        earlier = record.rewind(standing.round if standing else -1)
        if standing is None or len(earlier) != standing.round + 1:
            earlier, standing = record.rewind(-1), None
            shutil.rmtree(record.checkpoints, ignore_errors=True)  # of rounds that will be played again
        trackers += _trackers(config, record, earlier, say)
        algorithm = build_algorithm(config, facts.augment)
        f = config.federation
        plan = Plan(
            Facts(len(shared.clients), shared.clients.sizes, f.rounds), f.participation, f.blocks, config.seed,
            config.straggler.q, f.buffers == "keep",
        )  # fmt: skip
        observe = partial(
            _observe, config, executor, {n: len(e) for n, e in sets.items()}, shared.clients is shared.own
        )
        book = privacy.ledger(config, shared.clients)
        start = standing or _start(config, facts, algorithm, plan, shared.traffic, memory)
        courses = rounds.run(algorithm, executor, plan, start)
        if standing is None:
            courses = chain([(start, {"comm/once_bytes": shared.traffic.once})], courses)
        clock = time.perf_counter()
        for now, facts_of_round in courses:
            trained = time.perf_counter()
            metrics = {**facts_of_round, "comm/total_bytes": now.traffic.total, **observe(now)}
            if book:
                metrics["privacy/epsilon_local_training"] = max(book.epsilons(times_answered(plan, now.round)))
            for tracker in trackers:
                tracker.log(now.round, metrics)
            record.log_times(now.round, {"train": trained - clock, "observe": time.perf_counter() - trained})
            if now.round % f.checkpoint_every == 0 or now.round == f.rounds:
                checkpoint.save(record.checkpoints, now)
            if on_round:
                on_round(now.round, metrics)
            start, clock = now, time.perf_counter()
        summary = summarise(prepared, record.rounds(), shared.p, start.traffic)
        summary["privacy"] = privacy.statement(config, book, times_answered(plan, f.rounds))
    finally:
        executor.close()
        for tracker in trackers:
            tracker.finish(summary)
    assert summary is not None
    return summary


def _start(
    config: Experiment, facts: Dataset, algorithm: Algorithm, plan: Plan, exchanged: Traffic, memory: ClientMemory
) -> Standing:
    """Before round 1: the untrained model."""
    module = build_classifier(config, facts)
    state = algorithm.start(flatten(dict(module.named_parameters())), plan.facts, config.seed)
    return Standing(0, state, memory, exchanged, EMPTY if plan.keep_buffers else floating_buffers(module))


def _trackers(
    config: Experiment, record: RunFolder, earlier: Sequence[Mapping[str, Any]], say: Callable[[str], None]
) -> list[Tracker]:
    """The run folder, and W&B unless it is off, which is told the rounds before a resumption again."""
    if config.tracking.wandb == "off":
        return [record]
    from fedcommons.tracking.wandb_tracker import WandbTracker

    wandb = WandbTracker(record.path, config, say)
    for line in earlier:
        wandb.log(line["round"], {name: value for name, value in line.items() if name != "round"})
    return [record, wandb]


def _observe(
    config: Experiment, executor: Executor, sizes: Mapping[str, int], only_own: bool, now: Standing
) -> dict[str, float]:
    """Accuracy of the server model (test accuracy of the others), every few rounds the convergence parameters at it."""
    buffers = None if config.federation.buffers == "keep" else now.buffers
    metrics = evaluate(executor, now.model, sizes, buffers)
    for name in now.state:
        if name.startswith("model/"):
            of_other = evaluate(executor, flat(now.state, name), {"test": sizes["test"]}, buffers)
            metrics |= {f"{name.removeprefix('model/')}/{key}": value for key, value in of_other.items()}
    every = config.measure.every
    if every and (now.round % every == 0 or now.round == config.federation.rounds):
        n, blocks = config.partition.n_clients, config.federation.blocks
        at = ModelTask(now.model, now.buffers)
        own = dissimilarity(executor, at, "own", n, blocks)
        hat = own if only_own else dissimilarity(executor, at, "train", n, blocks)
        metrics |= {
            "convergence/zeta_sq": own.zeta_sq,
            "convergence/zeta_hat_sq": hat.zeta_sq,
            "convergence/sigma_sq": own.sigma_sq,
            "convergence/sigma_hat_sq": hat.sigma_sq,
        }
    return metrics


def summarise(prepared: Prepared, lines: Sequence[Mapping[str, Any]], p: float, traffic: Traffic) -> dict[str, Any]:
    """The run in one record: no times, no paths, so that it compares equal to that of an uninterrupted run."""
    c = prepared.config
    after = [(line["round"], line["test/accuracy"]) for line in lines if line["round"] >= 1]
    reached = [number for number, accuracy in after if accuracy >= c.target]

    def course(name: str) -> list[list[float]]:
        key = f"convergence/{name}"
        return [[line["round"], line[key]] for line in lines if key in line]

    return {
        "dataset": c.data.name,
        "algorithm": c.algorithm,
        "setting": c.sharing.setting,
        "alpha": c.partition.alpha,
        "n_clients": c.partition.n_clients,
        "participation": c.federation.participation,
        "seed": c.seed,
        "learning_rate": c.client.lr,
        "target": c.target,
        "rounds_to_target": reached[0] if reached else None,
        "rounds": c.federation.rounds,
        "last_accuracy": after[-1][1],
        "best_accuracy": max(accuracy for _, accuracy in after),
        "validation_accuracy": lines[-1].get("validation/accuracy"),
        "p": p,
        "bytes_down": traffic.down,
        "bytes_up": traffic.up,
        "bytes_once": traffic.once,
        "partition": prepared.partition.fingerprint,
        **{name: course(name) for name in ("zeta_sq", "zeta_hat_sq", "sigma_sq", "sigma_hat_sq")},
    }


def _synthetic(
    prepared: Prepared, store: Store, say: Callable[[str], None], may_generate: bool
) -> list[Examples] | None:
    """Each client's contribution of synthetic images, made here where a sweep has not made them before."""
    wanted = prepared.needs
    if not wanted:
        return None
    torch.set_num_threads(1)  # as in Ray's workers: more threads would round differently
    jobs = synthetic_pool.missing(store, wanted) if may_generate else []
    for number, job in enumerate(jobs, 1):
        doing = "training" if job.weights is None else "sampling"
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
