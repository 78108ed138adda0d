"""User-defined measures, which compute numbers from the server model every ``measure.every`` rounds."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from fedcommons.config import registry
from fedcommons.core.client_worker import Work
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.core.worker import RunData, Worker
from fedcommons.errors import user_code_context
from fedcommons.federation.rounds import Standing
from fedcommons.runs.callbacks import Callback
from fedcommons.seeding import seed_for, set_default_generator


class Measure(Protocol):
    """A measure: a frozen dataclass of constants that can be called.

    It is called in round 0, every ``measure.every`` rounds and in the last round. Each call is a single job of one
    worker, so the numbers do not depend on the number of workers.
    """

    def __call__(self, work: Work, data: RunData, round: int, seed: int) -> Mapping[str, float]:
        """Return numbers by name, which are recorded as ``measure/NAME``.

        work: ``work.module`` is the server model after round ``round``, in evaluation mode. The measure may train or
        change the module, as every job loads its weights again. data: a copy of the run's data, on the module's device.
        seed: depends on the experiment's seed and the round; torch's default generator is seeded with it.
        """
        ...


@dataclass(frozen=True)
class OwnMeasure(Callback):
    """Lets a worker compute a measure in round 0, every ``every`` rounds and in the last round.

    at: returns the task to evaluate the server model of a state. component: name and constants of the measure.
    """

    executor: Executor
    at: Callable[[Standing], ModelTask]
    component: tuple[str, Mapping[str, Any]]
    every: int

    def measure(self, now: Standing, last: int) -> dict[str, float]:
        """Return the numbers as ``measure/NAME``; a measure that fails is a ``ClientError``."""
        if now.round % self.every and now.round != last:
            return {}
        at = replace(self.at(now), buffers=now.buffers)
        (numbers,) = self.executor.map(measured_here, at, [self.component])
        return {f"measure/{name}": value for name, value in numbers.items()}


def measured_here(worker: Worker, at: ModelTask, component: tuple[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of a measure by name, computed in this worker on the model of ``at``.

    component: name and constants of the measure, which this process imports and builds.
    """
    (name, constants), seed = component, seed_for(at.seed, "measure")
    at.load(worker.work)
    set_default_generator(seed)
    data = deepcopy(worker.data)  # the measure may write into its copy; the worker's data stay unchanged
    with user_code_context(registry.component_label("measure", name), "", f"round {at.round}"):
        numbers = registry.make("measure", name, constants)(worker.work, data, at.round, seed)
        if not isinstance(numbers, Mapping):
            raise ValueError(f"it must return numbers by name, got {type(numbers).__name__}")
        return {str(n): float(v.detach() if isinstance(v, Tensor) else v) for n, v in numbers.items()}
