"""What a run costs on this machine: a step of each shape is timed, and multiplied by how many ``counting`` finds.

What is timed is what a worker does, by the same functions and with one thread: rounds of the engine whose clients have
a few batches, a chunk of the evaluation, epochs of a generator on two batches, steps of its sampler. The first call of
each is not counted. Nothing is written but to a temporary folder.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fedcommons.algorithms.feddm import FedDM
from fedcommons.config import parts, presets
from fedcommons.config.flat import flat_dict
from fedcommons.convergence.estimators import BATCH, mean_gradient
from fedcommons.convergence.smoothness import hessian_vector
from fedcommons.core.algorithm import Algorithm
from fedcommons.core.local import Work
from fedcommons.core.worker import RunData, Worker, default_device, fresh_torch, give_back_freed
from fedcommons.data.clients import ClientData, Clients, Rows
from fedcommons.data.examples import Dataset, Examples
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.evaluation import CHUNK, ModelTask, evaluate_chunk
from fedcommons.federation.memory import ClientMemory
from fedcommons.federation.rounds import Standing
from fedcommons.federation.serial import Serial
from fedcommons.runs import central, experiment, matched
from fedcommons.runs.build import Assembled, build_module, build_worker, local_loop
from fedcommons.runs.counting import Counts
from fedcommons.runs.matched import MANY, NOTHING, Matched
from fedcommons.sharing.needs import Need
from fedcommons.tensors import nbytes

ENOUGH = 0.3
"""Seconds after which a measurement is repeated no more."""

SLOW = 2.0
"""A first call of more seconds is counted and not repeated: what is done once is little of it, and time is dear."""

SHORT = 0.05
"""Rounds below this many seconds are measured with more steps, as two of them do not stand out."""

SHAPE = (
    "algorithm", "model.", "data.name", "data.augment", "dp.local", "client.batch_size", "client.optimizer",
    "client.momentum", "client.weight_decay", "client.onednn", "federation.buffers",
)  # fmt: skip
"""Fields, or beginnings of their names, on which the price of a step depends."""


@dataclass(frozen=True)
class Prices:
    """Seconds of each piece of the work in ``Counts``, and bytes."""

    step: float  # of B examples
    half: float  # of B/2 examples: steps of other sizes lie on the line through the two
    training: float  # a client's round besides its steps
    round: float  # besides its clients
    checkpoint: float
    example: float  # of the evaluation
    gradient: float  # of BATCH examples
    product: float
    memory: int  # peak of this process while all this was measured, with the data
    state: int  # what a checkpoint holds of the server,
    kept: int  # and of a client
    matched: Matched = NOTHING

    def seconds(self, n: Counts, batch_size: int) -> float:
        """Of so much work."""
        h = half(batch_size)
        slope = (self.step - self.half) / (batch_size - h) if batch_size > h else 0.0
        rest = n.rest * self.half + slope * (n.rest_examples - n.rest * h)
        local = n.full * self.step + max(rest, 0.0) + n.trainings * self.training
        observed = n.evaluated * self.example + n.gradients * self.gradient + n.products * self.product
        local += n.matched.seconds(self.matched)
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
    names = (*SHAPE, f"{parts.section('algorithm', c.algorithm)}.")
    chosen = tuple((n, v) for n, v in flat_dict(c).items() if n.startswith(names))
    if isinstance(ready.algorithm, FedDM):  # whose constants say how much is done, and not what a piece costs
        chosen = *((n, v) for n, v in chosen if not n.startswith("feddm.")), ready.algorithm.sigma > 0
    measured = bool(c.measure.every), c.measure.smoothness
    return (*chosen, measured, ready.data.clients.rows.weight is not None, ready.data.clients.commons is not None)


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


def _from_epochs(train: Callable[[int], Any], steps: int) -> tuple[float, float]:
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
    if isinstance(ready.algorithm, FedDM):
        of_rounds = _of_feddm(ready)
        ready = _with(ready, replace(ready.algorithm, iterations=0, server_epochs=1))
    else:
        of_rounds = _of_local_training(ready)
    now = _round(ready, 1, 1, c.client.batch_size)()
    with TemporaryDirectory() as folder:
        saving = seconds_of(lambda: checkpoint.save(Path(folder), now))
    worker = build_worker(c, ready.facts, str(parts.base()), ready.algorithm, ready.data)
    task, test = ModelTask(now.model, now.buffers), len(ready.data.sets["test"])
    example = seconds_of(lambda: evaluate_chunk(worker, task, ("test", 0))) / min(CHUNK, test)
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
        state=nbytes(now.state), kept=max(kept, default=0),
    )  # fmt: skip


def _of_local_training(ready: Assembled) -> dict[str, Any]:
    """The prices of a round and of its clients' steps."""
    b = ready.config.client.batch_size
    shortest, two = _round(ready, 1, 1, b), min(2, ready.plan.facts.n_clients)
    _round(ready, 1, 1, 1)()  # what torch does once in a process, also where a step is so slow that it is not repeated
    alone = seconds_of(shortest)
    k = 17 if alone < SHORT else 2
    several = seconds_of(_round(ready, 1, k, b))
    step = max(several - alone, 0.0) / (k - 1)
    smaller = max(0.0, step - max(several - seconds_of(_round(ready, 1, k, half(b))), 0.0) / k)
    training = max(0.0, seconds_of(_round(ready, two, 1, b)) - alone - step) if two > 1 else 0.0
    return {"step": step, "half": smaller, "training": training, "round": max(0.0, alone - step - training)}


def _of_feddm(ready: Assembled) -> dict[str, Any]:
    """The same of FedDM, from rounds on one class; see ``matched.prices``."""
    method, label, two = ready.algorithm, int(ready.data.clients.store.y[0]), min(2, ready.plan.facts.n_clients)
    assert isinstance(method, FedDM)

    def seconds(iterations: int = 0, real: int = 1, ipc: int = 1, epochs: int = 1, clients: int = 1) -> float:
        one = replace(
            method, iterations=iterations, match_batch=real, ipc=ipc, server_epochs=epochs, least=1, server_batch=MANY
        )
        return seconds_of(_round(_with(ready, one), clients, 1, real, label))

    alone = seconds()
    training = max(0.0, seconds(clients=two) - alone) if two > 1 else 0.0
    match = matched.prices(seconds, 17 if alone < SHORT else 2)
    first = match.server_steps + match.server_images
    rest = max(0.0, alone - training - first)
    return {"step": 0.0, "half": 0.0, "training": training, "round": rest, "matched": match}


def _with(ready: Assembled, algorithm: Algorithm) -> Assembled:
    return replace(ready, prepared=replace(ready.prepared, algorithm=algorithm))


def _round(ready: Assembled, joined: int, steps: int, batch: int, label: int | None = None) -> Callable[[], Standing]:
    """Plays round 1 with so many clients, who make so many steps each; ``label``: they hold this class only.

    It is the first of as many rounds as the run has, as methods may begin otherwise where there are few.
    """
    c, clients = ready.config, ready.data.clients
    n, size = len(clients), steps * batch
    held = torch.arange(len(clients.store)) if label is None else (clients.store.y == label).nonzero()[:, 0]
    flat = held[torch.arange(size) % len(held)]
    rows = Rows(flat, np.zeros(n, int), np.full(n, size), None if clients.rows.weight is None else torch.ones(size))
    data = RunData(Clients(clients.store, rows, commons=clients.commons), ready.data.own, {})
    loop = replace(local_loop(c, ready.facts.augment), epochs=1, batch_size=batch, equal_work=False)
    facts = replace(ready.plan.facts, sizes=rows.totals.tolist())
    plan = replace(ready.plan, facts=facts, participation=joined / n, late=None)

    def build(data: RunData) -> Worker:
        device = default_device()
        work = Work(build_module(c, ready.facts), device, loop, c.federation.weighting)
        return Worker(work, ready.algorithm, data.to(device))

    executor = Serial(build, data)
    start = replace(ready, plan=plan, data=data).start(ClientMemory())
    return lambda: next(rounds.run(ready.algorithm, executor, plan, start))[0]


@fresh_torch()
def measure_generator(need: Need) -> GeneratorPrices:
    """The prices of a generator's shape, from trainings on two batches."""
    generator, n = need.recipe.generator, len(need.examples)
    batch = getattr(generator, "batch_size", n)
    some = need.examples[slice(0, 2 * batch)]
    torch.set_num_threads(1)
    reset_peak()

    def train(last: int):
        return generator.fit(some, need.n_classes, need.seed, [last], flip=need.flip)

    weights = train(1)[1].weights  # imports diffusers, too, and a private generator solves for its noise once
    start, step = _from_epochs(train, -(-len(some) // batch))
    labels, shape = need.labels[:256], tuple(some.x.shape[1:])
    has_steps = is_dataclass(generator) and "sampling_steps" in {f.name for f in fields(generator)}

    def draw(steps: int) -> float:
        sampler = replace(generator, sampling_steps=steps) if has_steps else generator  # pyright: ignore
        return seconds_of(lambda: sampler.sample(weights, shape, need.n_classes, labels, need.seed))

    few = draw(1)
    several = has_steps and generator.sampling_steps > 1 and few < SLOW  # pyright: ignore
    image = max(0.0, draw(2) - few if several else few) / len(labels)
    start += max(0.0, few - image * len(labels))
    return GeneratorPrices(start, step, image, peak(), sum(t.nbytes for t in weights.values()))


@fresh_torch()
def measure_central(line: central.Central, dataset: Dataset) -> tuple[float, float]:
    """Seconds of a step and of a test image in the training of a central model."""
    c, test = line.config.client, dataset.test
    torch.set_num_threads(1)
    module = build_module(line.config, dataset)
    some, one = dataset.train[slice(0, 2 * c.batch_size)], test[slice(0, 1)]

    def train(test: Examples, epochs: int) -> None:
        central.fit(module, some, test, epochs=epochs, batch_size=c.batch_size, seed=0, augment=dataset.augment)

    central.fit(module, one, one, epochs=1, batch_size=1, seed=0)  # Lightning imports something at its first training
    steps, chunk = -(-len(some) // c.batch_size), test[slice(0, CHUNK)]
    start, step = _from_epochs(lambda epochs: train(one, epochs), steps)
    return step, max(0.0, seconds_of(lambda: train(chunk, 1)) - start - steps * step) / len(chunk)


@lru_cache(maxsize=8)
def overhead(wandb: str) -> tuple[float, float, int]:
    """Seconds that a run of one small round takes in a new process, those of the next one, and its bytes on disk.

    That is what no step is in: folder, picture of the partition, W&B. ``wandb``: whether it is told, off or offline.
    """
    fields = {"federation.rounds": 1, "client.epochs": 1, "data.limit": 40, "partition.n_clients": 2,
              "measure.every": 0, "partition.name": "iid", "tracking.wandb": wandb}  # fmt: skip
    config, seconds, size = presets.experiment("small", "digits", fields), [], 0
    with TemporaryDirectory() as folder:
        for name in ("first", "second"):
            started = time.perf_counter()
            experiment.run(config, Path(folder) / name, say=lambda _: None)
            seconds.append(time.perf_counter() - started)
            files = [path for path in (Path(folder) / name).rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files if path.parent.name != "checkpoints")
    return seconds[0], seconds[1], size


@lru_cache(maxsize=1)
def start_up() -> float:
    """Seconds until a new process can begin with a run: those of the imports."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", "import fedcommons.runs.experiment"], check=True)
    return time.perf_counter() - started


def reset_peak() -> None:
    """Let ``peak`` begin again; where the system cannot, it is that of the whole life of this process."""
    give_back_freed()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes that this process has held in memory since ``reset_peak``."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
