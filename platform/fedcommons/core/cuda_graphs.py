"""Local training steps as CUDA graphs: the GPU kernels of a step are recorded once and then launched together.

A step of a small network has about forty kernels, and the CPU takes longer to launch the kernels than the GPU to
compute them. A graph stores the kernels with the memory addresses that they read and write. So a step copies the batch
to the graph's input memory and launches the graph. The result has the same bits as a step without a graph.

A graph always repeats the recorded branches of the Python code, so the step must always be the same function of
weights, buffers and batch. There is one graph per batch shape and correction function. SGD's learning rates are
constants in a graph, so all graphs are recorded again when a schedule changes the learning rates. A client is trained
without graphs if the method has a separate loss function or learning rate, or changes the gradients by a function that
is not a ``Correction``.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedcommons.core.functional_step import Step
from fedcommons.core.local_training import Correction, LocalResult
from fedcommons.core.optimizers import plain_step
from fedcommons.core.steps import Batch, autocast
from fedcommons.core.trainer_shim import NO_NUMBER, NoClock
from fedcommons.core.training_process import TrainingProcess
from fedcommons.data.clients import ClientData
from fedcommons.errors import sentence
from fedcommons.flat_tensors import Flat, copy
from fedcommons.privacy.release import UNCOVERED
from fedcommons.runtime.torch_settings import tf32
from fedcommons.seeding import global_states, set_default_generator

WARM_UP = 3
"""Number of steps before a recording, in which libraries choose kernels and reserve memory."""

MOST = 64
"""Number of graphs at which a worker deletes all its graphs before the next client.

Without this limit, a method with a new correction function in each round would fill the GPU's memory.
"""


@dataclass(frozen=True)
class GraphStep:
    """A training step that is recorded as a CUDA graph, for batches of one shape."""

    launch: Callable[[], object]
    place: Batch  # the tensors that the graph reads
    logged: list[str]  # names of the values that the graph adds to ``Graphs.sums``

    def __call__(self, batch: Batch) -> None:
        for place, column in zip(self.place, batch, strict=True):
            place.copy_(column)
        self.launch()


class Graphs:
    """Trainer that runs the local steps of a worker's clients as CUDA graphs.

    sums: sums of the loss and the logged values over a client's steps, by name. momenta: SGD's momentum by parameter.
    """

    def __init__(self, work: TrainingProcess) -> None:
        self.work, self.step = work, Step(work.module)
        self.graphs: dict[Hashable, GraphStep] = {}
        self.corrections: dict[Hashable, Correction] = {}
        self.rates: list[Any] = []
        groups = work.optimizer.param_groups
        self.momenta = {p: torch.zeros_like(p) for group in groups if group["momentum"] for p in group["params"]}
        self.sums: dict[str, Tensor] = {}

    def train(
        self, start: Flat, data: ClientData, seed: int, correction: Correction | None, epochs: int
    ) -> LocalResult:
        """Train a client for ``epochs`` and return the result; the other arguments are those of ``Work.local``."""
        work, loop = self.work, self.work.loop
        self._begin(start, seed)
        key, placed_correction = self._corrected(correction)
        steps, logged = 0, Counter[str]()
        for batch in (batch for epoch in range(epochs) for batch in loop.batches(data, seed, epoch)):
            kind = (key, *((t.shape, t.dtype) for t in batch))
            try:
                if kind not in self.graphs:
                    self.graphs[kind] = self._recorded(batch, placed_correction)
                self.graphs[kind](batch)
            except Exception as error:
                error.add_note(f"step {steps}, batch {tuple(batch[0].shape)}, client.graphs")
                raise
            steps += 1
            logged.update(self.graphs[kind].logged)
        means = {name: self.sums[name] / n for name, n in logged.items()}
        return LocalResult(work.params, {**means, "steps": steps}, UNCOVERED)

    def _begin(self, start: Flat, seed: int) -> None:
        """Load the weights ``start``; reset momentum, sums, learning rates and random generators for a new client."""
        work = self.work
        work.load(start)
        work.optimizer.state.clear()
        # A zero momentum changes nothing in SGD's first step, and the graphs need momentum tensors at fixed addresses.
        for parameter, momentum in self.momenta.items():
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
        """Copy the correction to the graphs' input memory; return the key of the correction's graphs, and the copy."""
        if correction is None:
            return None, None
        key = (correction.function, *(x.layout for x in correction.values))
        if key not in self.corrections:
            self.corrections[key] = Correction(correction.function, tuple(map(copy, correction.values)))
        for place, x in zip(self.corrections[key].values, correction.values, strict=True):
            place.buffer.copy_(x.buffer)
        return key, self.corrections[key]

    def _recorded(self, batch: Batch, correction: Correction | None) -> GraphStep:
        """Record a step for batches of ``batch``'s shape; then restore weights, buffers and random generators."""
        work, loop, logs = self.work, self.work.loop, list[str]()
        place = tuple(column.clone() for column in batch)
        update, parameters = plain_step(work.optimizer), list(work.named.values())

        def loss(batch: Batch, number: int) -> Tensor:
            value, logged = self.step(batch, number)
            self._add(logged)
            logs[:] = [*logged, "loss"]
            return value

        loss_of = autocast(loss, work.device.type, loop.precision)

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
        return GraphStep(launch, place, logs)

    def _add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            if name not in self.sums:  # in the first warm-up step
                self.sums[name] = torch.zeros((), device=self.work.device)
            self.sums[name].add_(value)


def warm_up(play: Callable[[], None]) -> None:
    """Call ``play``, a training step, a few times on a separate CUDA stream, as torch requires before a recording."""
    current, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
    side_stream.wait_stream(current)
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UP):
            play()
    current.wait_stream(side_stream)


def record(play: Callable[[], None]) -> Callable[[], object]:
    """Record the GPU kernels that ``play`` launches and return a function that launches the recorded kernels.

    Raises:
        ValueError: ``play`` waits for the GPU, or does something else that a graph cannot contain.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            play()
    except RuntimeError as error:
        raise ValueError(f"client.graphs: this step cannot be recorded: {sentence(error)}") from error
    return graph.replay


def flaw(work: TrainingProcess, batch: Batch) -> str | None:
    """Try a step on ``batch`` and return the reason why the module cannot train with CUDA graphs, or None."""
    if work.schedulers:
        return "it has a learning rate scheduler"
    kind, groups = type(work.optimizer), work.optimizer.param_groups
    if kind is not torch.optim.SGD:
        return f"its optimizer is {kind.__name__}, and not SGD"
    if any(group["dampening"] for group in groups):
        return "its optimizer has dampening"
    before, training = [b.clone() for b in work.module.buffers()], work.module.training
    NoClock("which is constant in a recorded graph").attach(work.module.train())
    outside = global_states()
    try:
        with _generators_as_before():
            Step(work.module)(batch, NO_NUMBER)[0].backward()
        if outside != global_states():
            return "it draws random numbers from Python or numpy, which are constant in a recorded graph"
    except Exception as error:  # user code may raise any exception
        return sentence(error)
    finally:
        work.clock.attach(work.module)
        work.module.train(training)
        for buffer, value in zip(work.module.buffers(), before, strict=True):
            buffer.copy_(value)
        for parameter in work.named.values():
            parameter.grad = None
    return None


def _generators_as_before() -> AbstractContextManager[None]:
    """Return a context that restores the states of torch's default random generators afterwards."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0))
