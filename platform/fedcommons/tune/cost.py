"""The cost of a run on this machine: time a step of each shape, to be multiplied by the counts of ``work_counts``.

The measurements call the same functions as a worker, with one thread. Rounds of the engine are timed with clients of a
few batches, and with short variants of a method that counts its work (``TellsWork``). A chunk of the evaluation, epochs
of a generator on two batches, steps of its sampler, and a sharing stage or its shorter variant are also timed. The
first call of each is not counted, except for a stage. Files are written only to a temporary folder.
"""

import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.config import presets, registry
from fedcommons.convergence.estimators import BATCH, mean_gradient
from fedcommons.convergence.smoothness import hessian_vector
from fedcommons.core.algorithm import Algorithm, ChoosesClients, TellsWork, trains_locally
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import ModelTask, evaluate_chunk
from fedcommons.core.work_units import Timed, in_seconds, pieces_of, prices, smaller_of
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch, give_back_freed
from fedcommons.data.clients import ClientData, Clients, Rows
from fedcommons.data.examples import Examples
from fedcommons.errors import require_type, user_code_context
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.client_sampling import joining
from fedcommons.federation.rounds import Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.flat_tensors import nbytes
from fedcommons.generators.image_cache import require_like
from fedcommons.generators.requests import Contribution, GenerationRequest
from fedcommons.privacy.noise import SEED_ALONE
from fedcommons.runs import experiment
from fedcommons.runs.build import Assembled, Prepared
from fedcommons.runs.worker import build_module, build_worker, local_loop
from fedcommons.runtime import tempdirs
from fedcommons.sharing import stage as stages
from fedcommons.sharing.stage import Contributions, shorter_of
from fedcommons.tune.work_counts import Counts

ENOUGH = 0.3
"""Total seconds after which a measurement is not repeated again."""

SLOW = 2.0
"""Seconds; a first call that takes longer is counted and not repeated: its set-up is a small part of this time."""

SHORT = 0.05
"""Seconds; shorter rounds are measured with ``MORE`` steps, as the time of two steps would be lost in noise."""

FEW, MORE = 2, 17
"""Numbers of local steps in a measured round."""

RATE = 1e-6
"""Largest learning rate in measurements: with the run's rate they could diverge, and no price depends on the rate."""

SHAPE = (
    "algorithm", "model.", "data.name", "data.augment", "dp.local", "dp.at_once", "client.batch_size",
    "client.optimizer",
    "client.momentum", "client.weight_decay", "client.onednn", "federation.buffers",
)  # fmt: skip
"""Fields, or prefixes of fields, on which the price of a step depends."""


@dataclass(frozen=True)
class Prices:
    """Seconds of each unit of work in ``Counts``, and bytes of memory and checkpoints."""

    step: float  # a local step on B examples
    half: float  # a local step on B/2 examples; steps of other sizes are interpolated linearly
    training: float  # a client's round, without its steps
    round: float  # a round, without its clients
    checkpoint: float
    example: float  # evaluation of one example
    gradient: float  # the per-sample gradients of BATCH examples
    product: float  # a Hessian-vector product of BATCH examples
    memory: int  # bytes: peak memory of this process during the measurements, with the data
    state: int  # bytes of the server's state in a checkpoint
    memory_bytes: int  # bytes of a client's state in a checkpoint
    pieces: Mapping[str, float] = field(default_factory=dict)  # the method's further work, by the method's names

    def seconds(self, n: Counts, batch_size: int) -> float:
        """Return the seconds that the work ``n`` takes; batch_size: B."""
        h = half(batch_size)
        slope = (self.step - self.half) / (batch_size - h) if batch_size > h else 0.0
        rest = n.rest * self.half + slope * (n.rest_examples - n.rest * h)
        local = n.full * self.step + max(rest, 0.0) + n.trainings * self.training
        observed = n.evaluated * self.example + n.gradients * self.gradient + n.products * self.product
        local += in_seconds(n.pieces, self.pieces)
        return local + n.rounds * self.round + n.checkpoints * self.checkpoint + observed


@dataclass(frozen=True)
class GeneratorPrices:
    """Seconds of a generator's training and sampling, and bytes of memory and weights."""

    start: float  # set-up of a training, before its first step
    step: float
    image: float  # one image in one step of the sampler
    memory: int
    weights: int


def half(batch_size: int) -> int:
    """Return the smaller batch size that is timed, about B/2."""
    return max(1, batch_size // 2)


def shape_of(ready: Assembled) -> tuple:
    """Return all that the prices of a run depend on; runs of the same shape have the same prices."""
    c = ready.config
    method, names, variants = ready.algorithm, SHAPE, ()
    if isinstance(method, TellsWork):  # its variants show which constants a price depends on
        variants = tuple(smaller_of(method, FEW))
    else:
        names = *SHAPE, f"{registry.section('algorithm', c.algorithm)}."
    chosen = (pair for pair in c.flat.items() if pair[0].startswith(names))
    measured = bool(c.measure.every), c.measure.smoothness
    clients = ready.data.clients
    return (*chosen, variants, measured, clients.rows.weight is not None, clients.commons is not None)


def seconds_of(do: Callable[[], Any]) -> float:
    """Return the median seconds of several calls; a first call is not counted unless it takes longer than ``SLOW``."""
    first = _once(do)
    times = [first] if first > SLOW else [_once(do)]
    while sum(times) < ENOUGH and len(times) < 9:
        times.append(_once(do))
    return median(times)


def _once(do: Callable[[], Any]) -> float:
    started = time.perf_counter()
    do()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def per_epoch(train: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Return (seconds before the first step, seconds of a step) of ``train``, called with a number of epochs.

    steps: number of steps in an epoch.
    """
    single = seconds_of(lambda: train(1))
    if single > SLOW:
        return 0.0, single / steps
    step = max(0.0, seconds_of(lambda: train(5)) - single) / (4 * steps)
    return max(0.0, single - steps * step), step


@fresh_torch()
def measure(ready: Assembled) -> Prices:
    """Measure the prices of a run's shape."""
    c = ready.config
    reset_peak()
    ready, of_pieces = _of_pieces(ready)
    of_rounds = _of_rounds(ready, of_pieces)
    now = small_round(ready, 1, 1, c.client.batch_size).play()
    with tempdirs.folder() as folder:
        saving = seconds_of(lambda: checkpoint.save(folder, now))
    worker = build_worker(c, ready.facts, str(registry.base()), SEED_ALONE, ready.algorithm, ready.data)
    model = now.model if now.has_model else worker.work.initial
    task, test = ModelTask(model, now.buffers, chunk=c.evaluate.chunk), len(ready.data.sets["test"])
    at_once = test if worker.work.logged.metrics.objects else min(task.chunk, test)
    example = seconds_of(lambda: evaluate_chunk(worker, task, ("test", 0))) / at_once
    some = worker.data.real[0]
    batch = ClientData(some.x[:BATCH], some.y[:BATCH])
    gradient = product = 0.0
    if c.measure.every:
        gradient = seconds_of(lambda: mean_gradient(worker, batch))
    if c.measure.smoothness:
        v = torch.ones(worker.work.params.layout.size, dtype=torch.float64, device=worker.work.device)
        product = seconds_of(lambda: hessian_vector(worker.work.module, [batch.columns], v))
    payload_bytes = [nbytes(payload) for payload in now.memory.in_ram.values()]
    return Prices(
        **of_rounds, checkpoint=saving, example=example, gradient=gradient, product=product, memory=peak(),
        state=nbytes(now.state), memory_bytes=max(payload_bytes, default=0), pieces=of_pieces,
    )  # fmt: skip


def _of_pieces(ready: Assembled) -> tuple[Assembled, dict[str, float]]:
    """Return the run with the least further work of its method, and the prices of this work (``TellsWork``)."""
    method = ready.algorithm
    if not isinstance(method, TellsWork):
        return ready, {}
    local, timed = trains_locally(method), []
    least, n = smaller_of(method, FEW)[0]
    short = seconds_of(small_round(_with(ready, least), 1, 1, n).play) < SHORT
    for variant, n in smaller_of(method, MORE if short else FEW):
        small = small_round(_with(ready, variant), 1, 1, n)
        timed.append(Timed(n if local else 0, small.pieces, seconds_of(small.play)))
    return _with(ready, least), prices(type(method).__name__, timed)


def _of_rounds(ready: Assembled, of_pieces: Mapping[str, float]) -> dict[str, float]:
    """Return the prices of a round and of its clients' steps, without the method's further work."""

    def seconds(blocks: int, steps: int, batch: int) -> float:
        small = small_round(ready, blocks * m, steps, batch, blocks)
        return max(0.0, seconds_of(small.play) - in_seconds(small.pieces, of_pieces))

    b, n, m = ready.config.client.batch_size, ready.plan.facts.n_clients, at_once(ready)
    small_round(ready, 1, 1, 1).play()  # torch's set-up in a process, as a slow step is not repeated
    single, step, smaller = seconds(1, 1, b), 0.0, 0.0
    if trains_locally(ready.algorithm):
        k = MORE if single < SHORT else FEW
        several = seconds(1, k, b)
        step = max(several - single, 0.0) / ((k - 1) * m)
        smaller = max(0.0, step - max(several - seconds(1, k, half(b)), 0.0) / (k * m))
    training = max(0.0, (seconds(2, 1, b) - single) / m - step) if 2 * m <= n else 0.0
    return {"step": step, "half": smaller, "training": training, "round": max(0.0, single - m * (step + training))}


def at_once(ready: Assembled) -> int:
    """Return the number of clients of a block that are trained together; 1 if each client is trained alone."""
    if not ready.config.client.batched:
        return 1
    joined = joining(ready.plan.facts.n_clients, ready.plan.participation)
    return max(1, -(-joined // ready.plan.blocks))


def _with(ready: Assembled, algorithm: Algorithm) -> Assembled:
    return replace(ready, prepared=replace(ready.prepared, algorithm=algorithm))


@dataclass(frozen=True)
class Small:
    """A short round, and the units of the method's further work in this round."""

    play: Callable[[], Standing]
    pieces: Mapping[str, float]


def small_round(ready: Assembled, joined: int, steps: int, batch: int, blocks: int = 1) -> Small:
    """Return round 1 with ``joined`` clients in ``blocks`` blocks; each client makes ``steps`` steps of size ``batch``.

    The number of rounds R is that of the run, as the first round of a method may depend on R.
    """
    c, clients, method = ready.config, ready.data.clients, ready.algorithm
    c = replace(c, client=replace(c.client, lr=min(c.client.lr, RATE)))
    chooses = isinstance(method, ChoosesClients)  # the method may choose all clients, so no further clients exist
    n, size = joined if chooses else len(clients), steps * batch
    flat = torch.arange(size) % len(clients.store)
    rows = Rows(flat, np.zeros(n, int), np.full(n, size), None if clients.rows.weight is None else torch.ones(size))
    few = Clients(clients.store, rows, commons=clients.commons)
    data = RunData(few, ready.data.real, {}, ready.data.pool, serves=ready.data.serves)
    loop = replace(local_loop(c, ready.facts.augment), epochs=1, batch_size=batch, equal_work=False, accumulate=1)
    if loop.dp:  # no noise multiplier is computed for these artificial sizes
        loop = replace(loop, dp=replace(loop.dp, target=None))
    facts = replace(ready.plan.facts, n_clients=n, sizes=rows.totals.tolist())
    plan = replace(ready.plan, facts=facts, participation=joined / n, blocks=blocks, straggler_rule=None)

    def build(data: RunData) -> Worker:
        device = default_device()
        work = Work(build_module(c, ready.facts), device, loop, c.federation.weighting)
        return Worker(work, method, data.to(device))

    executor = Serial(build, data)
    start = replace(ready.on(data), plan=plan).start(ClientMemory())
    client_facts = replace(facts, counts=partial(few.counts, ready.facts.n_classes))
    pieces = pieces_of(method, client_facts, loop, 1, rounds.answering(method, plan, start.state, 1)[1])
    return Small(lambda: next(rounds.run(method, executor, plan, start))[0], pieces)


def stand_in(need: GenerationRequest) -> Contribution:
    """Return black images, with the number and classes of a generation request, in place of its synthetic images."""
    labels = need.labels[torch.from_numpy(np.arange(need.n) % len(need.labels))]
    return Contribution(Examples(need.examples.x.new_zeros((need.n, *need.examples.x.shape[1:])), labels))


@fresh_torch()
def contribute(ready: Prepared, generated: Sequence[Contribution]) -> tuple[Contributions, float]:
    """Return the clients' contributions and the seconds that they take; a long stage is timed by a shorter variant."""
    stage, times = shorter_of(ready.stage)
    results: list[Contributions] = []
    seconds = _once(lambda: results.append(stages.contribute(stage, ready.client_data, generated)))
    return results[0], times * seconds


@fresh_torch()
def measure_generator(need: GenerationRequest) -> GeneratorPrices:
    """Measure the prices of a generator's shape, from trainings on two batches."""
    generator, n = need.recipe.generator, len(need.examples)
    batch = getattr(generator, "batch_size", n)
    some = need.examples[slice(0, 2 * batch)]
    torch.set_num_threads(1)
    reset_peak()

    def train(last: int):
        with user_code_context(generator, "fit"):
            return generator.fit(some, need.n_classes, need.seed, [last], flip=need.flip)

    trained = train(1)  # also imports diffusers, and a private generator computes its noise multiplier
    with user_code_context(generator, "fit"):
        weights = trained[1].weights
    start, step = per_epoch(train, -(-len(some) // batch))
    labels, shape = need.labels[:256], tuple(some.x.shape[1:])
    has_steps = is_dataclass(generator) and "sampling_steps" in {f.name for f in fields(generator)}

    def draw(steps: int) -> float:
        sampler = replace(generator, sampling_steps=steps) if has_steps else generator  # pyright: ignore
        with user_code_context(generator, "sample"):
            sample = partial(sampler.sample, weights, shape, need.n_classes, labels, need.seed)
            return seconds_of(lambda: samples.append(require_type(Tensor, sample())))

    samples: deque[Tensor] = deque(maxlen=1)
    few = draw(1)
    require_like(some.x, need.recipe.name, len(labels), samples[0])
    several = has_steps and generator.sampling_steps > 1 and few < SLOW  # pyright: ignore
    image = max(0.0, draw(2) - few if several else few) / len(labels)
    start += max(0.0, few - image * len(labels))
    return GeneratorPrices(start, step, image, peak(), sum(t.nbytes for t in weights.values()))


@lru_cache(maxsize=8)
def overhead(wandb: str) -> tuple[float, float, int]:
    """Return the seconds of a process's first run of one small round, of its second run, and a run's bytes on disk.

    This is the cost apart from steps: folder, figure of the partition, W&B. ``wandb``: W&B's mode, off or offline.
    """
    fields = {"federation.rounds": 1, "client.epochs": 1, "data.limit": 40, "partition.n_clients": 2,
              "measure.every": 0, "partition.name": "iid", "tracking.wandb": wandb}  # fmt: skip
    config, seconds, size = presets.experiment("small", "digits", fields), [], 0
    with tempdirs.folder() as folder:
        for name in ("first", "second"):
            started = time.perf_counter()
            experiment.run(config, folder / name, say=lambda _: None)
            seconds.append(time.perf_counter() - started)
            files = [path for path in (folder / name).rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files if path.parent.name != "checkpoints")
    return seconds[0], seconds[1], size


@lru_cache(maxsize=1)
def start_up() -> float:
    """Return the seconds until a new process can begin a run: the time of its imports."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", "import fedcommons.runs.experiment"], check=True)
    return time.perf_counter() - started


def reset_peak() -> None:
    """Reset the peak memory; if the system cannot, ``peak`` counts from the start of this process."""
    give_back_freed()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Return the largest memory of this process, in bytes, since ``reset_peak``."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
