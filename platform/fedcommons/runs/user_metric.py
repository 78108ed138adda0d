"""A measure of somebody's own: numbers of the server model, taken in the rounds of the convergence parameters."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fedcommons.config import registry
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.worker import RunData, Worker
from fedcommons.errors import somebodys
from fedcommons.seeding import seed_for, set_default_generator


class Measure(Protocol):
    """A frozen dataclass of constants, called in round 0, every ``measure.every`` rounds and in the last one.

    It is one job in a worker, so that no number depends on how many workers there are.
    """

    def __call__(self, work: Work, data: RunData, round: int, seed: int) -> Mapping[str, float]:
        """Numbers by name; they are recorded as ``measure/NAME``.

        work: its ``module`` is the server model after this round, in evaluation mode; it may be trained or changed, as
        every job loads its own weights. data: a copy, on the device of the module. seed: keyed by the round; torch's
        default generator is keyed too.
        """
        ...


@dataclass(frozen=True)
class MeasureTask:
    """A model, and the part that measures it, by its name and constants: a worker finds it itself."""

    at: ModelTask
    name: str
    constants: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return self.at.nbytes


def measured(executor: Executor, at: ModelTask, name: str, constants: Mapping[str, Any]) -> dict[str, float]:
    """What the measure ``name`` says of the model, as ``measure/NAME``.

    Raises:
        ClientError: it raised something, or what it gave are no numbers by name.
    """
    (found,) = executor.map(measured_here, MeasureTask(at, name, constants), [0])
    return {f"measure/{name}": value for name, value in found.items()}


def measured_here(worker: Worker, task: MeasureTask, job: int) -> dict[str, float]:
    """The measure's numbers, in a worker."""
    task.at.load(worker.work)
    seed = seed_for(task.at.seed, "measure")
    set_default_generator(seed)
    data = deepcopy(worker.data)  # clients go on with what the worker holds, whatever is written into this
    with somebodys(registry.called("measure", task.name), "", f"round {task.at.round}"):
        found = registry.make("measure", task.name, task.constants)(worker.work, data, task.at.round, seed)
        if not isinstance(found, Mapping):
            raise ValueError(f"it must give numbers by name, got {type(found).__name__}")
        return {str(n): float(v.detach() if isinstance(v, Tensor) else v) for n, v in found.items()}
