"""Measure the seconds of each unit of work of a run on this machine; ``work_counts`` counts the units.

The measurements call the same functions as a worker, with one thread. They time rounds with clients that have a few
batches, also with small variants of a method that reports its work (``TellsWork``). They also time a chunk of the
evaluation, epochs of a generator on two batches, steps of its sampler, and the sharing strategy or its shorter variant.
A first call is not counted, except for the sharing strategy. Files are written only to a temporary folder.

"Shape" means all fields and facts that the measured seconds depend on. B: batch size;  R: number of rounds.
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
from fedcommons.config.dotted import values_of
from fedcommons.convergence.estimators import BATCH, mean_gradient
from fedcommons.convergence.smoothness import hessian_vector
from fedcommons.core.algorithm import Algorithm, ChoosesClients, TellsWork
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.evaluation import ModelTask, evaluate_chunk
from fedcommons.core.work_units import Timed, in_seconds, pieces_of, prices, smaller_of
from fedcommons.core.worker import RunData, Worker, fresh_torch, give_back_freed
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
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.spec import RunSpec
from fedcommons.runs.worker import build_worker
from fedcommons.runtime import tempdirs
from fedcommons.sharing import stage as stages
from fedcommons.sharing.stage import Contributions, shorter_of
from fedcommons.tune.work_counts import Counts

ENOUGH = 0.3
"""Total seconds of a measurement's calls after which no further call is timed."""

SLOW = 2.0
"""Seconds. A first call that takes longer is not repeated, as the set-up is then a small share of the time."""

SHORT = 0.05
"""Seconds; if a round takes less, ``MORE`` local steps are timed instead of ``FEW``, as two steps vary in time."""

FEW, MORE = 2, 17
"""Numbers of local steps that a client makes in a timed round."""

RATE = 1e-6
"""Largest learning rate in measurements, so that the loss cannot diverge; no time depends on the learning rate."""

SHAPE = (
    "algorithm", "model.", "data.name", "data.augment", "dp.local", "dp.at_once", "client.batch_size",
    "client.optimizer",
    "client.momentum", "client.weight_decay", "client.onednn", "federation.buffers",
)  # fmt: skip
"""Fields, or prefixes of fields, on which the seconds of a local step depend."""


@dataclass(frozen=True)
class Prices:
    """Seconds of each unit of work in ``Counts``, and bytes of memory and checkpoints. B: batch size."""

    step: float  # seconds of a local step on a batch of B examples
    half: float  # seconds of a local step on B/2 examples, to interpolate linearly for other numbers of examples
    training: float  # seconds of a client's round without local steps
    round: float  # seconds of a round without the clients' training
    checkpoint: float
    example: float  # seconds to evaluate one example
    gradient: float  # seconds to compute the per-sample gradients of ``BATCH`` examples
    product: float  # seconds of a Hessian-vector product on ``BATCH`` examples
    memory: int  # bytes: peak memory of this process during the measurements, with the data
    state: int  # bytes of the server's state in a checkpoint
    memory_bytes: int  # bytes of a client's state in a checkpoint
    pieces: Mapping[str, float] = field(default_factory=dict)  # seconds per unit of work outside local steps, by unit

    def seconds(self, n: Counts, batch_size: int) -> float:
        """Return the seconds of a run. n: numbers of units of work. batch_size: B, the examples of a local step."""
        h = half(batch_size)
        slope = (self.step - self.half) / (batch_size - h) if batch_size > h else 0.0
        rest = n.rest * self.half + slope * (n.rest_examples - n.rest * h)
        local = n.full * self.step + max(rest, 0.0) + n.trainings * self.training
        observed = n.evaluated * self.example + n.gradients * self.gradient + n.products * self.product
        local += in_seconds(n.pieces, self.pieces)
        return local + n.rounds * self.round + n.checkpoints * self.checkpoint + observed


@dataclass(frozen=True)
class GeneratorPrices:
    """The prices of a generator: seconds of a unit of training and sampling, and bytes of memory and weights."""

    start: float  # seconds of the set-up before the first training step
    step: float
    image: float  # seconds of a sampling step for one image
    memory: int
    weights: int


def half(batch_size: int) -> int:
    """Return the smaller one of the two batch sizes that are timed, about half of ``batch_size``."""
    return max(1, batch_size // 2)


def shape_of(ready: Assembled) -> tuple:
    """Return a hashable key of all that the run's ``Prices`` depend on; runs with equal keys have equal prices."""
    method, names, variants = ready.algorithm, SHAPE, ()
    if isinstance(method, TellsWork):  # prices depend only on the variants that are timed
        variants = tuple(smaller_of(method, FEW))
    else:
        names = *SHAPE, f"{registry.section('algorithm', ready.spec.names['algorithm'])}."
    chosen = values_of(ready.spec.record, names)
    measured = bool(ready.spec.evaluation.measure_every), ready.spec.evaluation.smoothness
    clients = ready.data.clients
    return (*chosen, variants, measured, clients.rows.weight is not None, clients.commons is not None)


def seconds_of(do: Callable[[], Any]) -> float:
    """Return the median seconds of calls of ``do``; the first call is ignored unless it takes over ``SLOW``."""
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
    """Return (seconds of the set-up before the first step, seconds of a step) of the training function ``train``.

    train: called with a number of epochs. steps: number of steps in an epoch.
    """
    single = seconds_of(lambda: train(1))
    if single > SLOW:
        return 0.0, single / steps
    step = max(0.0, seconds_of(lambda: train(5)) - single) / (4 * steps)
    return max(0.0, single - steps * step), step


@fresh_torch()
def measure(ready: Assembled) -> Prices:
    """Measure and return the seconds and bytes of each unit of the run's work."""
    spec, e = ready.spec, ready.spec.evaluation
    reset_peak()
    ready, of_pieces = _of_pieces(ready)
    of_rounds = _of_rounds(ready, of_pieces)
    now = small_round(ready, 1, 1, spec.local.batch_size).play()
    with tempdirs.folder() as folder:
        saving = seconds_of(lambda: checkpoint.save(folder, now))
    worker = ready.worker(SEED_ALONE)
    model = now.model if now.has_model else worker.work.initial
    task, test = ModelTask(model, now.buffers, chunk=e.chunk), len(ready.data.sets["test"])
    at_once = test if worker.work.logged.metrics.objects else min(task.chunk, test)
    example = seconds_of(lambda: evaluate_chunk(worker, task, ("test", 0))) / at_once
    some = worker.data.real[0]
    batch = ClientData(some.x[:BATCH], some.y[:BATCH])
    gradient = product = 0.0
    if e.measure_every:
        gradient = seconds_of(lambda: mean_gradient(worker, batch))
    if e.smoothness:
        v = torch.ones(worker.work.params.layout.size, dtype=torch.float64, device=worker.work.device)
        product = seconds_of(lambda: hessian_vector(worker.work.module, [batch.columns], v))
    payload_bytes = [nbytes(payload) for payload in now.memory.in_ram.values()]
    return Prices(
        **of_rounds, checkpoint=saving, example=example, gradient=gradient, product=product, memory=peak(),
        state=nbytes(now.state), memory_bytes=max(payload_bytes, default=0), pieces=of_pieces,
    )  # fmt: skip


def _of_pieces(ready: Assembled) -> tuple[Assembled, dict[str, float]]:
    """Measure the method's work outside local steps, which it reports as ``TellsWork``.

    Returns:
        The run, with the variant of the method that has the least such work; and the seconds per unit, by unit.
    """
    method = ready.algorithm
    if not isinstance(method, TellsWork):
        return ready, {}
    local, timed = capabilities_of(method).trains_locally, []
    least, n = smaller_of(method, FEW)[0]
    short = seconds_of(small_round(_with(ready, least), 1, 1, n).play) < SHORT
    for variant, n in smaller_of(method, MORE if short else FEW):
        small = small_round(_with(ready, variant), 1, 1, n)
        timed.append(Timed(n if local else 0, small.pieces, seconds_of(small.play)))
    return _with(ready, least), prices(type(method).__name__, timed)


def _of_rounds(ready: Assembled, of_pieces: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of ``Prices`` for rounds, clients and local steps, by name.

    of_pieces: seconds per unit of the method's work outside local steps, by unit; the result excludes this work.
    """

    def seconds(blocks: int, steps: int, batch: int) -> float:
        small = small_round(ready, blocks * m, steps, batch, blocks)
        return max(0.0, seconds_of(small.play) - in_seconds(small.pieces, of_pieces))

    b, n, m = ready.spec.local.batch_size, ready.plan.facts.n_clients, at_once(ready)
    small_round(ready, 1, 1, 1).play()  # not timed, so that no timed step includes torch's set-up
    single, step, smaller = seconds(1, 1, b), 0.0, 0.0
    if capabilities_of(ready.algorithm).trains_locally:
        k = MORE if single < SHORT else FEW
        several = seconds(1, k, b)
        step = max(several - single, 0.0) / ((k - 1) * m)
        smaller = max(0.0, step - max(several - seconds(1, k, half(b)), 0.0) / (k * m))
    training = max(0.0, (seconds(2, 1, b) - single) / m - step) if 2 * m <= n else 0.0
    return {"step": step, "half": smaller, "training": training, "round": max(0.0, single - m * (step + training))}


def at_once(ready: Assembled) -> int:
    """Return the number of clients that a worker trains together (``client.batched``); 1: one after another."""
    if not ready.spec.local.batched:
        return 1
    joined = joining(ready.plan.facts.n_clients, ready.plan.participation)
    return max(1, -(-joined // ready.plan.blocks))


def _with(ready: Assembled, algorithm: Algorithm) -> Assembled:
    return replace(ready, spec=replace(ready.spec, algorithm=algorithm))


@dataclass(frozen=True)
class Small:
    """A short round: the function that runs it, and the units of the method's work outside its local steps."""

    play: Callable[[], Standing]
    pieces: Mapping[str, float]


def small_round(ready: Assembled, joined: int, steps: int, batch: int, blocks: int = 1) -> Small:
    """Return round 1 with ``joined`` clients, each of which makes ``steps`` local steps on ``batch`` examples.

    blocks: number of groups of clients, each trained by one worker job. The planned number of rounds R is that of the
    run, as a method's first round may depend on R.
    """
    spec, clients, method = ready.spec, ready.data.clients, ready.algorithm
    module = partial(spec.module, ready.facts, lr=min(spec.lr, RATE))
    chooses = isinstance(method, ChoosesClients)  # may choose all: create only ``joined`` clients
    n, size = joined if chooses else len(clients), steps * batch
    flat = torch.arange(size) % len(clients.store)
    rows = Rows(flat, np.zeros(n, int), np.full(n, size), None if clients.rows.weight is None else torch.ones(size))
    few = Clients(clients.store, rows, commons=clients.commons)
    data = RunData(few, ready.data.real, {}, ready.data.pool, serves=ready.data.serves)
    loop = replace(spec.local, epochs=1, batch_size=batch, equal_work=False, accumulate=1)
    if loop.dp:  # so that no noise multiplier is computed for a target epsilon
        loop = replace(loop, dp=replace(loop.dp, target=None))
    facts = replace(ready.plan.facts, n_clients=n, sizes=rows.totals.tolist())
    plan = replace(ready.plan, facts=facts, participation=joined / n, blocks=blocks, straggler_rule=None)

    def build(data: RunData) -> Worker:
        return build_worker(module, loop, facts.weighting, SEED_ALONE, method, data)

    executor = Serial(build, data)
    start = replace(ready.on(data), plan=plan).start(ClientMemory())
    client_facts = replace(facts, counts=partial(few.counts, ready.facts.n_classes))
    pieces = pieces_of(method, client_facts, loop, 1, rounds.answering(method, plan, start.state, 1)[1])
    return Small(lambda: next(rounds.run(method, executor, plan, start))[0], pieces)


def stand_in(need: GenerationRequest) -> Contribution:
    """Return black images with the number and labels of the synthetic images that a request would contribute."""
    labels = need.labels[torch.from_numpy(np.arange(need.n) % len(need.labels))]
    return Contribution(Examples(need.examples.x.new_zeros((need.n, *need.examples.x.shape[1:])), labels))


@fresh_torch()
def contribute(ready: RunSpec, generated: Sequence[Contribution]) -> tuple[Contributions, float]:
    """Return the examples that clients contribute by the sharing strategy (stage), and the seconds that this takes.

    A strategy that takes long is replaced by its shorter variant. generated: stand-ins for the synthetic images.
    """
    stage, times = shorter_of(ready.stage)
    results: list[Contributions] = []
    seconds = _once(lambda: results.append(stages.contribute(stage, ready.client_data, generated)))
    return results[0], times * seconds


@fresh_torch()
def measure_generator(need: GenerationRequest) -> GeneratorPrices:
    """Measure the seconds and bytes of a generator's training and sampling, with trainings on two batches."""
    generator, n = need.recipe.generator, len(need.examples)
    batch = getattr(generator, "batch_size", n)
    some = need.examples[slice(0, 2 * batch)]
    torch.set_num_threads(1)
    reset_peak()

    def train(last: int):
        with user_code_context(generator, "fit"):
            return generator.fit(some, need.n_classes, need.seed, [last], flip=need.flip)

    trained = train(1)  # not timed, as the first call imports diffusers and computes a noise multiplier
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
    """Return the fixed cost of a run, apart from training: (seconds of a first run, of a second run, bytes on disk).

    Both runs are tiny runs in this process, which write the run folder and the partition's figure. wandb: mode of W&B,
    off or offline.
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
    """Return the seconds that a new process needs for its imports before it can begin a run."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", "import fedcommons.runs.experiment"], check=True)
    return time.perf_counter() - started


def reset_peak() -> None:
    """Reset the peak memory of this process; if the system cannot, ``peak`` counts from the process's start."""
    give_back_freed()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak() -> int:
    """Return the peak memory of this process since ``reset_peak``, in bytes."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
