"""What a run costs on this machine: a step of each shape is timed, and multiplied by how many ``counting`` finds.

What is timed is what a worker does, by the same functions and with one thread: rounds of the engine whose clients have
a few batches (by short variants of a method that tells its work), a chunk of the evaluation, epochs of a generator on
two batches, steps of its sampler, a sharing stage or its shorter variant. The first call of each is not counted, but of
a stage. Nothing is written but to a temporary folder.
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
from fedcommons.errors import given, somebodys
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory
from fedcommons.federation.client_sampling import joining
from fedcommons.federation.rounds import Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.flat_tensors import nbytes
from fedcommons.generators.image_cache import require_like
from fedcommons.generators.requests import Contribution, Need
from fedcommons.privacy.noise import SEED_ALONE
from fedcommons.runs import experiment
from fedcommons.runs.build import Assembled, Prepared
from fedcommons.runs.worker import build_module, build_worker, local_loop
from fedcommons.runtime import tempdirs
from fedcommons.sharing import stage as stages
from fedcommons.sharing.stage import Contributions, shorter_of
from fedcommons.tune.work_counts import Counts

ENOUGH = 0.3
"""Seconds after which a measurement is repeated no more."""

SLOW = 2.0
"""A first call of more seconds is counted and not repeated: what is done once is little of it, and time is dear."""

SHORT = 0.05
"""Rounds below this many seconds are measured with more steps, as two of them do not stand out."""

FEW, MORE = 2, 17
"""So many steps."""

RATE = 1e-6
"""Largest learning rate of clients: at the run's own, what is timed could diverge, and no price depends on it."""

SHAPE = (
    "algorithm", "model.", "data.name", "data.augment", "dp.local", "dp.at_once", "client.batch_size",
    "client.optimizer",
    "client.momentum", "client.weight_decay", "client.onednn", "federation.buffers",
)  # fmt: skip
"""Fields, or beginnings of their names, on which the price of a step depends."""


@dataclass(frozen=True)
class Prices:
    """Seconds that each piece of the work in ``Counts`` takes, and bytes that are held."""

    step: float  # a local step on B examples
    half: float  # one on B/2 examples; steps of other sizes lie on the line through these two
    training: float  # a client's round, without its steps
    round: float  # a round, without its clients
    checkpoint: float
    example: float  # to evaluate one example
    gradient: float  # the per-sample gradients of BATCH examples
    product: float  # a Hessian-vector product of BATCH examples
    memory: int  # peak of this process while all this was measured, with the data
    state: int  # what a checkpoint holds of the server
    kept: int  # what a checkpoint holds of a client
    pieces: Mapping[str, float] = field(default_factory=dict)  # what the method does besides, by names of its own

    def seconds(self, n: Counts, batch_size: int) -> float:
        """Of so much work."""
        h = half(batch_size)
        slope = (self.step - self.half) / (batch_size - h) if batch_size > h else 0.0
        rest = n.rest * self.half + slope * (n.rest_examples - n.rest * h)
        local = n.full * self.step + max(rest, 0.0) + n.trainings * self.training
        observed = n.evaluated * self.example + n.gradients * self.gradient + n.products * self.product
        local += in_seconds(n.pieces, self.pieces)
        return local + n.rounds * self.round + n.checkpoints * self.checkpoint + observed


@dataclass(frozen=True)
class GeneratorPrices:
    """Seconds of a generator's training and sampling, and bytes of its weights."""

    start: float  # of a training, before its first step
    step: float
    image: float  # of one image in one step of the sampler
    memory: int
    weights: int


def half(batch_size: int) -> int:
    """The smaller batch that is timed."""
    return max(1, batch_size // 2)


def shape_of(ready: Assembled) -> tuple:
    """What the prices of a run depend on: runs that share it share them."""
    c = ready.config
    method, names, variants = ready.algorithm, SHAPE, ()
    if isinstance(method, TellsWork):  # its variants say which constants a price depends on
        variants = tuple(smaller_of(method, FEW))
    else:
        names = *SHAPE, f"{registry.section('algorithm', c.algorithm)}."
    chosen = (pair for pair in c.flat.items() if pair[0].startswith(names))
    measured = bool(c.measure.every), c.measure.smoothness
    clients = ready.data.clients
    return (*chosen, variants, measured, clients.rows.weight is not None, clients.commons is not None)


def seconds_of(do: Callable[[], Any]) -> float:
    """Seconds of a call: the median of some, after a first one that is not counted unless it is ``SLOW``."""
    first = _once(do)
    found = [first] if first > SLOW else [_once(do)]
    while sum(found) < ENOUGH and len(found) < 9:
        found.append(_once(do))
    return median(found)


def _once(do: Callable[[], Any]) -> float:
    started = time.perf_counter()
    do()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def per_epoch(train: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """(seconds before the first step, seconds of a step) of what trains so many epochs of so many steps."""
    one = seconds_of(lambda: train(1))
    if one > SLOW:
        return 0.0, one / steps
    step = max(0.0, seconds_of(lambda: train(5)) - one) / (4 * steps)
    return max(0.0, one - steps * step), step


@fresh_torch()
def measure(ready: Assembled) -> Prices:
    """The prices of a run's shape."""
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
    some = worker.data.own[0]
    batch = ClientData(some.x[:BATCH], some.y[:BATCH])
    gradient = product = 0.0
    if c.measure.every:
        gradient = seconds_of(lambda: mean_gradient(worker, batch))
    if c.measure.smoothness:
        v = torch.ones(worker.work.params.layout.size, dtype=torch.float64, device=worker.work.device)
        product = seconds_of(lambda: hessian_vector(worker.work.module, [batch.columns], v))
    kept = [nbytes(payload) for payload in now.memory.in_ram.values()]
    return Prices(
        **of_rounds, checkpoint=saving, example=example, gradient=gradient, product=product, memory=peak(),
        state=nbytes(now.state), kept=max(kept, default=0), pieces=of_pieces,
    )  # fmt: skip


def _of_pieces(ready: Assembled) -> tuple[Assembled, dict[str, float]]:
    """The run with as little of its method's own work as can be, and what that costs (``TellsWork``)."""
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
    """The prices of a round and of its clients' steps, without the pieces of its method's own work."""

    def seconds(blocks: int, steps: int, batch: int) -> float:
        small = small_round(ready, blocks * m, steps, batch, blocks)
        return max(0.0, seconds_of(small.play) - in_seconds(small.pieces, of_pieces))

    b, n, m = ready.config.client.batch_size, ready.plan.facts.n_clients, at_once(ready)
    small_round(ready, 1, 1, 1).play()  # what torch does once in a process: a slow step is not repeated
    one, step, smaller = seconds(1, 1, b), 0.0, 0.0
    if trains_locally(ready.algorithm):
        k = MORE if one < SHORT else FEW
        several = seconds(1, k, b)
        step = max(several - one, 0.0) / ((k - 1) * m)
        smaller = max(0.0, step - max(several - seconds(1, k, half(b)), 0.0) / (k * m))
    training = max(0.0, (seconds(2, 1, b) - one) / m - step) if 2 * m <= n else 0.0
    return {"step": step, "half": smaller, "training": training, "round": max(0.0, one - m * (step + training))}


def at_once(ready: Assembled) -> int:
    """Clients of a block that are trained at once; 1 where each is trained alone."""
    if not ready.config.client.batched:
        return 1
    joined = joining(ready.plan.facts.n_clients, ready.plan.participation)
    return max(1, -(-joined // ready.plan.blocks))


def _with(ready: Assembled, algorithm: Algorithm) -> Assembled:
    return replace(ready, prepared=replace(ready.prepared, algorithm=algorithm))


@dataclass(frozen=True)
class Small:
    """A round that is short, and the pieces of its method's own work in it."""

    play: Callable[[], Standing]
    pieces: Mapping[str, float]


def small_round(ready: Assembled, joined: int, steps: int, batch: int, blocks: int = 1) -> Small:
    """Round 1 with so many clients in so many blocks, who make so many steps each.

    It is the first of as many rounds as the run has, as methods may begin otherwise where there are few.
    """
    c, clients, method = ready.config, ready.data.clients, ready.algorithm
    c = replace(c, client=replace(c.client, lr=min(c.client.lr, RATE)))
    chooses = isinstance(method, ChoosesClients)  # it may choose all that there are, so there are no others
    n, size = joined if chooses else len(clients), steps * batch
    flat = torch.arange(size) % len(clients.store)
    rows = Rows(flat, np.zeros(n, int), np.full(n, size), None if clients.rows.weight is None else torch.ones(size))
    few = Clients(clients.store, rows, commons=clients.commons)
    data = RunData(few, ready.data.own, {}, ready.data.pool, serves=ready.data.serves)
    loop = replace(local_loop(c, ready.facts.augment), epochs=1, batch_size=batch, equal_work=False, accumulate=1)
    if loop.dp:  # no noise is solved for sizes that no client has
        loop = replace(loop, dp=replace(loop.dp, target=None))
    facts = replace(ready.plan.facts, n_clients=n, sizes=rows.totals.tolist())
    plan = replace(ready.plan, facts=facts, participation=joined / n, blocks=blocks, late=None)

    def build(data: RunData) -> Worker:
        device = default_device()
        work = Work(build_module(c, ready.facts), device, loop, c.federation.weighting)
        return Worker(work, method, data.to(device))

    executor = Serial(build, data)
    start = replace(ready.on(data), plan=plan).start(ClientMemory())
    held = replace(facts, counts=partial(few.counts, ready.facts.n_classes))
    pieces = pieces_of(method, held, loop, 1, rounds.answering(method, plan, start.state, 1)[1])
    return Small(lambda: next(rounds.run(method, executor, plan, start))[0], pieces)


def stand_in(need: Need) -> Contribution:
    """Black images in the number and of the classes of those that are not there yet."""
    labels = need.labels[torch.from_numpy(np.arange(need.n) % len(need.labels))]
    return Contribution(Examples(need.examples.x.new_zeros((need.n, *need.examples.x.shape[1:])), labels))


@fresh_torch()
def contribute(ready: Prepared, made: Sequence[Contribution]) -> tuple[Contributions, float]:
    """What clients contribute, and the seconds that it takes; a stage that takes long is played by a shorter one."""
    stage, times = shorter_of(ready.stage)
    found: list[Contributions] = []
    seconds = _once(lambda: found.append(stages.contribute(stage, ready.dealt, made)))
    return found[0], times * seconds


@fresh_torch()
def measure_generator(need: Need) -> GeneratorPrices:
    """The prices of a generator's shape, from trainings on two batches."""
    generator, n = need.recipe.generator, len(need.examples)
    batch = getattr(generator, "batch_size", n)
    some = need.examples[slice(0, 2 * batch)]
    torch.set_num_threads(1)
    reset_peak()

    def train(last: int):
        with somebodys(generator, "fit"):
            return generator.fit(some, need.n_classes, need.seed, [last], flip=need.flip)

    trained = train(1)  # imports diffusers, too, and a private generator solves for its noise once
    with somebodys(generator, "fit"):
        weights = trained[1].weights
    start, step = per_epoch(train, -(-len(some) // batch))
    labels, shape = need.labels[:256], tuple(some.x.shape[1:])
    has_steps = is_dataclass(generator) and "sampling_steps" in {f.name for f in fields(generator)}

    def draw(steps: int) -> float:
        sampler = replace(generator, sampling_steps=steps) if has_steps else generator  # pyright: ignore
        with somebodys(generator, "sample"):
            sample = partial(sampler.sample, weights, shape, need.n_classes, labels, need.seed)
            return seconds_of(lambda: drawn.append(given(Tensor, sample())))

    drawn: deque[Tensor] = deque(maxlen=1)
    few = draw(1)
    require_like(some.x, need.recipe.name, len(labels), drawn[0])
    several = has_steps and generator.sampling_steps > 1 and few < SLOW  # pyright: ignore
    image = max(0.0, draw(2) - few if several else few) / len(labels)
    start += max(0.0, few - image * len(labels))
    return GeneratorPrices(start, step, image, peak(), sum(t.nbytes for t in weights.values()))


@lru_cache(maxsize=8)
def overhead(wandb: str) -> tuple[float, float, int]:
    """Seconds that a run of one small round takes in a new process, those of the next one, and its bytes on disk.

    That is what no step is in: folder, picture of the partition, W&B. ``wandb``: whether it is told, off or offline.
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
    """Seconds until a new process can begin with a run: those of the imports."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", "import fedcommons.runs.experiment"], check=True)
    return time.perf_counter() - started


def reset_peak() -> None:
    """Let ``peak`` begin again; where the system cannot, it is that of the whole life of this process."""
    give_back_freed()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Most bytes that this process has held in memory since ``reset_peak``."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
