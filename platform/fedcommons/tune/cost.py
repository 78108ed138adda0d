"""Measure on this machine the seconds per unit of each kind of work that ``work_counts`` counts.

Few short calls of a run's own functions are timed, with one thread. A first call is not counted, unless it is slow.
Files are written only to a temporary folder.
"""

import resource
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.config import presets
from fedcommons.convergence.estimators import BATCH
from fedcommons.convergence.laboratory import Laboratory
from fedcommons.core.algorithm import ChoosesClients
from fedcommons.core.capabilities import capabilities_of
from fedcommons.core.evaluation import ModelTask, evaluate_chunk
from fedcommons.core.worker import RunData, Worker, fresh_torch, give_back_freed
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, require_type, user_code_context
from fedcommons.federation import checkpoint
from fedcommons.federation.client_sampling import joining
from fedcommons.federation.rounds import Standing
from fedcommons.federation.serial_executor import Serial
from fedcommons.flat_tensors import nbytes
from fedcommons.generators.image_cache import require_like
from fedcommons.generators.requests import Contribution, GenerationRequest
from fedcommons.privacy.noise import SEED_ALONE
from fedcommons.runs import experiment, pool_audit
from fedcommons.runs.assemble import Assembled
from fedcommons.runs.spec import RunSpec
from fedcommons.runtime import tempdirs
from fedcommons.sharing import exchange
from fedcommons.sharing.stage import Contributions, shorter_of
from fedcommons.tune.small_rounds import TRAINING, Seconds, SmallRounds, repetitions
from fedcommons.tune.work_counts import Amounts, batches_measured, work_fields

ENOUGH = 0.3
"""Total seconds of a measurement's calls after which no further call is timed."""

SLOW = 2.0
"""Seconds. A first call that takes longer is not repeated, as the set-up is then a small share of the time."""

BUDGET = 0.5
"""Seconds that the local trainings of a timed round may take; a model with slow batches may exceed it."""

FEW, MANY = 2, 16
"""Smallest and largest number of clients in a timed round, if the method does not choose its clients."""

SHORT = 4
"""Smallest limit, in batches, on the training examples of a client in a timed round."""

MORE = 3
"""Rounds are timed with one local epoch and with this number of epochs; other repeated work likewise."""

FREE = ("artifacts", "storage", "target", "tracking.", "generator.", "federation.rounds", "evaluate.", "measure.every")
"""Fields, or prefixes of fields, that do not affect the ``Prices`` of a run; learning rates do not either."""


@dataclass(frozen=True)
class Prices:
    """Seconds per unit of each kind of work, and bytes of memory and checkpoints."""

    seconds: Amounts
    memory: int  # peak memory of this process during the measurements, with the data
    state: int  # the server's state in a checkpoint
    memory_bytes: int  # a client's state in a checkpoint


@dataclass(frozen=True)
class GeneratorPrices:
    """The prices of a generator: seconds of a unit of training and sampling, and bytes of memory and weights."""

    start: float  # seconds of the set-up before the first training step
    step: float
    image: float  # seconds of a sampling step for one image
    memory: int
    weights: int


def shape_of(ready: Assembled) -> tuple:
    """Return a hashable key of all that the run's ``Prices`` depend on; runs with equal keys have equal prices."""
    chosen = (pair for pair in work_fields(ready.spec.record) if not pair[0].startswith(FREE))
    rounds = ready.plan.facts.rounds if capabilities_of(ready.algorithm).grows else None
    return (*chosen, bool(ready.spec.evaluation.measure_every), rounds)


def seconds_of(do: Callable[[], Any]) -> float:
    """Return the median seconds of calls of ``do``; the first call is ignored unless it takes over ``SLOW``."""
    return _medians(lambda: Counter({("", ""): _once(do)})).total()


def _medians(measure: Callable[[], Seconds]) -> Seconds:
    """Return the medians of the seconds that repeated calls of ``measure`` return."""
    first = measure()
    times = [first] if first.total() > SLOW else [measure()]
    while sum(seconds.total() for seconds in times) < ENOUGH and len(times) < 9:
        times.append(measure())
    return Counter({name: median(seconds[name] for seconds in times) for name in times[0]})


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
    """Measure the seconds per unit of each kind of the run's work, and the bytes of memory and checkpoints."""
    reset_peak()
    of_rounds, now = _of_rounds(ready)
    with tempdirs.folder() as folder:
        saving = seconds_of(lambda: checkpoint.save(folder, now))
    evaluated, untrained, measured = of_observing(ready, now)
    payload_bytes = [nbytes(payload) for payload in now.memory.in_ram.values()]
    seconds = replace(of_rounds, checkpoints=saving, evaluated=evaluated, untrained=untrained, measured=measured)
    return Prices(seconds, peak(), nbytes(now.state), max(payload_bytes, default=0))


def _of_rounds(ready: Assembled) -> tuple[Amounts, Standing]:
    """Return the seconds of rounds and local trainings, and a state of the federation after a round.

    Rounds are timed twice: with one repetition of the work that a round repeats (``repetitions``), and with ``MORE``,
    or with two if the rounds are slow.
    """
    loop, method, capabilities = ready.spec.local, ready.algorithm, capabilities_of(ready.algorithm)
    joins = joining(ready.plan.facts.n_clients, ready.plan.participation)
    least = SmallRounds(ready, 1, loop.batch_size, FEW)
    now, spent = least.play(SLOW)
    clients, rows = joins, None
    if capabilities.trains_locally:
        limit = BUDGET / MORE / max(1e-6, spent["replies", TRAINING] / least.n_clients)
        batches = max(SHORT, int(limit) // FEW)
        mean = -(-ready.data.clients.rows.sizes.mean() // loop.batch_size)
        clients = joins if loop.batched else min(joins, max(FEW, min(int(limit / min(mean, batches)), MANY)))
        rows = loop.batch_size * batches
    small = SmallRounds(ready, 1, rows, clients)
    low = _medians(lambda: small.play()[1])
    repeats = 2 if low.total() > SLOW else MORE
    larger = SmallRounds(ready, repeats, rows, clients)
    larger.start = small.start
    high = _medians(lambda: larger.play()[1])
    numbers = repetitions(method, loop.epochs)

    def more(kind: str, job: str) -> float:
        n = min(numbers.get(job, 1), repeats)
        return max(0.0, high[kind, job] - low[kind, job]) / (n - 1) if n > 1 else 0.0

    def server(kind: str) -> float:
        """Return the seconds of the server's jobs in a round; a round without replies is preferred for timing."""
        total = 0.0
        for job in (job for k, job in low if k == kind and job not in ("", TRAINING)):
            k = "none" if ("none", job) in low else kind
            total += low[k, job] + (numbers.get(job, 1) - 1) * more(k, job)
        return total

    several = numbers[TRAINING] > 1
    example = (more("replies", TRAINING) if several else low["replies", TRAINING]) / small.n_examples
    is_once = capabilities.waits_for is not None
    rest = low["replies", ""] * (1 if isinstance(method, ChoosesClients) else joins / small.n_clients)
    seconds = Amounts(
        rounds=rest + (0 if is_once else server("replies")),
        once=server("replies") if is_once else 0,
        alone=low["none", ""] + server("none"),
        trainings=max(0.0, low["replies", TRAINING] - example * small.n_examples) / small.n_clients,
        examples=example,
    )
    return seconds, now


def of_observing(ready: Assembled, now: Standing) -> tuple[float, float, float]:
    """Return the seconds per evaluated example, and per batch measured before and after training.

    An untrained model takes longer, as its smoothness needs more products with the Hessian. now: untrained state.
    """
    spec, data, e = ready.spec, ready.data, ready.spec.evaluation

    def build(data: RunData) -> Worker:
        return ready.on(data).worker(SEED_ALONE)

    executor, test = Serial(build, data), len(data.sets["test"])
    work = executor.worker.work

    def task(at: Standing) -> ModelTask:
        return ModelTask(at.model if at.has_model else work.initial, at.buffers, chunk=e.chunk)

    def measured(at: Standing) -> float:
        laboratory = Laboratory(Serial(build, few), few, ready.shared.p, 1, e.samples, spec.seed)
        return seconds_of(partial(laboratory.measure, task(at), e.smoothness)) / batches_measured(few, e.samples)

    n = test if work.logged.metrics.objects else min(e.chunk, test)
    evaluated = seconds_of(lambda: evaluate_chunk(executor.worker, task(now), ("test", 0))) / n
    if not e.measure_every:
        return evaluated, 0.0, 0.0
    real = _few(data.real)
    clients = real if data.clients is data.real else _few(data.clients)
    few = replace(data, real=real, clients=clients, pool=data.pool and _few(data.pool))
    untrained = measured(now)
    return evaluated, untrained, measured(_trained(ready, now)) if e.smoothness else untrained


def _trained(ready: Assembled, now: Standing) -> Standing:
    """Return the state after two short rounds with the run's learning rate; ``now`` if training diverges."""
    try:
        return SmallRounds(ready, MORE, None, FEW, ready.spec.lr).play()[0]
    except ClientError:
        return now


def _few(clients: Clients) -> Clients:
    """Return the ``FEW`` clients whose sizes are nearest to the mean, each with at most 8 batches of its examples."""
    rows = clients.rows
    near = np.abs(rows.sizes - rows.sizes.mean()).argsort(kind="stable")[:FEW]
    few = replace(rows, starts=rows.starts[near], sizes=np.minimum(rows.sizes[near], 8 * BATCH), totals=np.zeros(0))
    return Clients(clients.store, few, commons=clients.commons)


def stand_in(need: GenerationRequest) -> Contribution:
    """Return black images with the number and labels of the synthetic images that a request would contribute."""
    labels = need.labels[torch.from_numpy(np.arange(need.n) % len(need.labels))]
    return Contribution(Examples(need.examples.x.new_zeros((need.n, *need.examples.x.shape[1:])), labels))


@fresh_torch()
def contribute(ready: RunSpec, generated: Sequence[Contribution]) -> tuple[Contributions, float]:
    """Return the examples that clients contribute by the sharing strategy (stage), and the seconds that this takes.

    If the strategy has a shorter variant, only this variant runs, and the seconds of the full strategy are estimated
    from it. generated: stand-ins for the synthetic images.
    """
    torch.set_num_threads(1)
    stage, times = shorter_of(ready.stage)
    results: list[Contributions] = []
    seconds = _once(lambda: results.append(exchange.contribute(stage, ready.client_data, generated)))
    return results[0], times * seconds


@fresh_torch()
def audit(ready: RunSpec, contributed: Contributions) -> float:
    """Return the seconds of the audit of all clients' synthetic images, from the audit of a client of median size."""
    if not ready.is_audited or not ready.requests:
        return 0.0
    torch.set_num_threads(1)
    needs = sorted(ready.requests, key=lambda need: len(need.examples))
    data, others, module = ready.client_data, ready.dataset.validation, ready.module(ready.dataset)
    some = [needs[len(needs) // 2]]
    return len(needs) * _once(lambda: pool_audit.audited(data, contributed, some, others, module, withhold=False))


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
    values = {"federation.rounds": 1, "client.epochs": 1, "data.limit": 40, "partition.n_clients": 2,
              "measure.every": 0, "partition.name": "iid", "tracking.wandb": wandb}  # fmt: skip
    config = presets.experiment("small", "digits", values)
    with tempdirs.folder() as folder:
        first, second = (_once(partial(experiment.run, config, folder / n, say=lambda _: None)) for n in ("1", "2"))
        files = [path for path in (folder / "2").rglob("*") if path.is_file()]
        return first, second, sum(path.stat().st_size for path in files if path.parent.name != "checkpoints")


@lru_cache(maxsize=1)
def start_up() -> float:
    """Return the seconds that a new process needs for its imports before it can begin a run."""
    imports = "from fedcommons.runtime import libraries as l; l.import_libraries(); import fedcommons.runs.experiment"
    command = [sys.executable, "-P", "-W", "ignore", "-c", imports]
    return _once(partial(subprocess.run, command, check=True))


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
