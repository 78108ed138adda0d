"""Local steps as CUDA graphs: a GPU's kernels are recorded once, and then launched as one.

A step of a small network is some forty kernels, and the CPU takes longer to launch them than the GPU to compute them. A
graph holds them with the addresses that they read and write. So a step is: copy the batch to where the graph reads it,
launch the graph. The bits are those of the step without it.

What Python decides while a step is recorded stays so: the step must be the same function of weights, buffers and batch
each time. There is a graph for each shape of batch and each kind of correction. SGD's rates are numbers in it, so when
a schedule changes them all are recorded anew. A client is trained step by step where its method gives a loss or a rate
of its own, or a correction of the gradient that is no ``Correction``.
"""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcommons.core.functional_step import Step
from fedcommons.core.local_training import KINDS, Batch, Correction, LocalResult, autocast
from fedcommons.core.optimizers import plain_step
from fedcommons.core.trainer_shim import NO_NUMBER, NoClock
from fedcommons.core.training_process import TrainingProcess
from fedcommons.data.clients import ClientData
from fedcommons.errors import sentence
from fedcommons.flat_tensors import Flat, copy
from fedcommons.privacy.release import UNCOVERED
from fedcommons.runtime.torch_settings import tf32
from fedcommons.seeding import set_default_generator

WARM_UP = 3
"""Steps before a recording, in which libraries choose their kernels and reserve memory."""

MOST = 64
"""Graphs that a worker keeps; a method whose corrections are new functions each time would have ever more."""


@dataclass(frozen=True)
class _Graph:
    launch: Callable[[], object]
    batch: Batch  # where it reads
    logs: list[str]


class Graphs:
    """Trains a worker's clients by graphs; ``sums``: over a client's steps, of its loss and of what it logs."""

    def __init__(self, work: TrainingProcess) -> None:
        self.work, self.step = work, Step(work.module)
        self.graphs: dict[Hashable, _Graph] = {}
        self.corrections: dict[Hashable, Correction] = {}
        self.rates: list[Any] = []
        groups = work.optimizer.param_groups
        self.momenta = {p: torch.zeros_like(p) for group in groups if group["momentum"] for p in group["params"]}
        self.sums: dict[str, Tensor] = {}

    def train(
        self, start: Flat, data: ClientData, seed: int, correction: Correction | None, epochs: int
    ) -> LocalResult:
        """See ``Work.local``."""
        work, loop = self.work, self.work.loop
        self._begin(start, seed)
        key, here = self._corrected(correction)
        steps, logged = 0, Counter[str]()
        for batch in (batch for epoch in range(epochs) for batch in loop.batches(data, seed, epoch)):
            kind = (key, *((t.shape, t.dtype) for t in batch))
            try:
                if kind not in self.graphs:
                    self.graphs[kind] = self._recorded(batch, here)
                graph = self.graphs[kind]
                for place, column in zip(graph.batch, batch, strict=True):
                    place.copy_(column)
                graph.launch()
            except Exception as error:
                error.add_note(f"step {steps}, batch {tuple(batch[0].shape)}, client.graphs")
                raise
            steps += 1
            logged.update(graph.logs)
        means = {name: self.sums[name] / n for name, n in logged.items()}
        return LocalResult(work.params, {**means, "steps": steps}, UNCOVERED)

    def _begin(self, start: Flat, seed: int) -> None:
        """All that steps change is as at a client's first one."""
        work = self.work
        work.load(start)
        work.optimizer.state.clear()
        for parameter, momentum in self.momenta.items():  # with which SGD's first step is that without any
            work.optimizer.state[parameter] = {"momentum_buffer": momentum.zero_()}
        for total in self.sums.values():
            total.zero_()
        work.set_rates()
        if work.rates != self.rates or len(self.graphs) >= MOST:
            self.graphs.clear()
            self.corrections.clear()
            self.rates = list(work.rates)
        if not work.module.training:
            work.module.train()
        set_default_generator(seed, "dropout")

    def _corrected(self, correction: Correction | None) -> tuple[Hashable, Correction | None]:
        """The same correction with its tensors where graphs read them, and what tells its kind."""
        if correction is None:
            return None, None
        key = (correction.function, *(x.layout for x in correction.of))
        if key not in self.corrections:
            self.corrections[key] = Correction(correction.function, tuple(map(copy, correction.of)))
        for place, x in zip(self.corrections[key].of, correction.of, strict=True):
            place.buffer.copy_(x.buffer)
        return key, self.corrections[key]

    def _recorded(self, batch: Batch, correction: Correction | None) -> _Graph:
        """A step with batches of this shape; weights, buffers and the generators stay as they are."""
        work, loop, logs = self.work, self.work.loop, list[str]()
        place = tuple(column.clone() for column in batch)
        update, parameters = plain_step(work.optimizer), list(work.named.values())

        def loss(batch: Batch, number: int) -> Tensor:
            value, logged = self.step(batch, number)
            self._add(logged)
            logs[:] = [*logged, "loss"]
            return value

        loss_of = autocast(loss, work.device.type, KINDS[loop.precision]) if loop.precision in KINDS else loss

        def play() -> None:
            value = loss_of(place, NO_NUMBER)
            for parameter in parameters:
                parameter.grad = None
            value.backward()
            if loop.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, loop.clip_norm)
            if correction:
                correction(work.named)
            update()
            self._add({"loss": value.detach()})

        changed = [work.params.buffer, *work.module.buffers(), *self.momenta.values(), *self.sums.values()]
        before, names = [t.detach().clone() for t in changed], set(self.sums)
        with tf32() if loop.precision == "tf32" else nullcontext(), _generators_as_before():
            warm_up(play)
            launch = record(play)
        with torch.no_grad():
            for t, value in zip(changed, before, strict=True):
                t.copy_(value)
            for name in self.sums.keys() - names:
                self.sums[name].zero_()
        return _Graph(launch, place, logs)

    def _add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            if name not in self.sums:  # at the first step of warming up
                self.sums[name] = torch.zeros((), device=self.work.device)
            self.sums[name].add_(value)


def warm_up(play: Callable[[], None]) -> None:
    """Call it a few times, beside the stream on which all else is computed, as torch asks for before a recording."""
    here, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        for _ in range(WARM_UP):
            play()
    here.wait_stream(beside)


def record(play: Callable[[], None]) -> Callable[[], object]:
    """The kernels that it launches, none of which is computed; calling the result computes them.

    Raises:
        ValueError: it waits for the GPU, or does something else that a graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            play()
    except RuntimeError as error:
        raise ValueError(f"client.graphs: this step cannot be recorded: {sentence(error)}") from error
    return graph.replay


def flaw(work: TrainingProcess, batch: Batch) -> str | None:
    """Why the steps of this module cannot be graphs, tried on a batch; None where nothing speaks against it."""
    if work.schedulers:
        return "it has a learning rate scheduler of its own"
    kind, groups = type(work.optimizer), work.optimizer.param_groups
    if kind is not torch.optim.SGD:
        return f"its optimizer is {kind.__name__}, and not SGD"
    if any(group["dampening"] for group in groups):
        return "its optimizer has dampening"
    before, training = [b.clone() for b in work.module.buffers()], work.module.training
    NoClock("which a graph has as it was when recorded").attach(work.module.train())
    outside = _outside()
    try:
        with _generators_as_before():
            Step(work.module)(batch, NO_NUMBER)[0].backward()
        if outside != _outside():
            return "it draws random numbers from Python or numpy, which a graph has as they were when recorded"
    except Exception as error:  # whatever somebody's code raises
        return sentence(error)
    finally:
        work.clock.attach(work.module)
        work.module.train(training)
        for buffer, value in zip(work.module.buffers(), before, strict=True):
            buffer.copy_(value)
        for parameter in work.named.values():
            parameter.grad = None
    return None


def _outside() -> tuple[Any, ...]:
    """How far Python's and numpy's generators are."""
    of: Any = np.random.get_state(legacy=False)  # noqa: NPY002  (it is the one that others use)
    return random.getstate(), of["state"]["pos"], of["has_gauss"]


def _generators_as_before() -> AbstractContextManager[None]:
    """Afterwards torch's default generators are as they were."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0))


def of(work: TrainingProcess) -> Graphs | None:
    """Of a worker whose client.graphs is on and whose device is a GPU."""
    return Graphs(work) if work.loop.graphs and work.device.type == "cuda" else None
