"""Check that results have the same bits on other workers, in another order of clients, and on Ray actors."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Any

from fedcommons.core.algorithm import Algorithm, Personal
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.personal_evaluation import evaluate_personal
from fedcommons.federation.rounds import Plan
from fedcommons.runtime import tempdirs
from fedcommons.testing.comparing import outcome, require, require_same
from fedcommons.testing.federations import Federation


def require_the_bits_of_one_process(algorithm: Algorithm, federation: Federation, executor: Executor) -> None:
    """Check that ``executor`` and a serial executor give the same bits in three rounds.

    Raises:
        AssertionError: state, memory or metrics differ.
    """
    plan = federation.plan(3, participation=0.8, blocks=4)
    elsewhere, in_process = outcome(federation.run(algorithm, plan, executor)), federation.run(algorithm, plan)
    cause = "a client's round depends on more than message, memory, data and seed"
    where = "clients trained by other workers, or in another order, give other bits of"
    require_same(elsewhere, outcome(in_process), where, cause)
    if isinstance(algorithm, Personal):
        at, now = ModelTask(federation.model, seed=1), in_process[-1][0]
        played = ((federation.serial(algorithm), plan), (executor, replace(plan, blocks=2)))
        serial_metrics, other_metrics = (evaluate_personal(algorithm, e, at, now, p, on_tests=False) for e, p in played)
        require(serial_metrics == other_metrics, "personal models, evaluated by other workers, have other metrics")


def require_the_same_after_a_stop(
    algorithm: Algorithm, federation: Federation, plan: Plan, executor: Executor | None = None
) -> None:
    """Check that a run that stops after round 2 and continues on ``executor`` has the bits of a run without a stop."""
    later, played, executor_before = deepcopy(algorithm), [], federation.serial(algorithm)
    with tempdirs.folder() as folder:
        for now, metrics in rounds.run(algorithm, executor_before, plan, federation.start(algorithm, plan)):
            played.append((now, metrics))
            if now.round == 2:
                checkpoint.save(folder, now)
        whole = outcome(played[2:])
        federation.run(algorithm, federation.plan(1, seed=1))  # overwrites global variables, if the method has any
        rest = federation.run(later, plan, executor, checkpoint.load_latest(folder))
    cause = "the method depends on a value outside of state and memory, which no checkpoint stores"
    where = f"after a stop at round 2 of {plan.facts.rounds} there are other bits of"
    require_same(outcome(rest), whole, where, cause)


class Apart:
    """An executor with two workers in this process, which get alternate jobs, from the last job to the first."""

    def __init__(self, federation: Federation, algorithm: Algorithm) -> None:
        self.workers = [federation.build(deepcopy(algorithm))(federation.data) for _ in range(2)]

    def map(self, function: Callable[[Any, Any, Any], Any], shared: Any, jobs: Sequence[Any]) -> list[Any]:
        """Run the jobs in reverse order on two workers; return their results in the order of the jobs."""
        done = {j: self.workers[j % 2].run(function, shared, jobs[j]) for j in reversed(range(len(jobs)))}
        return [done[j] for j in range(len(jobs))]

    def close(self) -> None:
        """Do nothing, because the workers hold no resources."""


def require_the_same_of_ray(algorithm: Algorithm, federation: Federation, actors: int) -> None:
    """Check that results of Ray actors have the bits of the serial executor. Ray is started if it is not running."""
    import ray
    from ray import cloudpickle

    from fedcommons.federation.ray_executor import RayActors
    from fedcommons.runtime import ray_cluster

    home = sys.modules.get(type(algorithm).__module__)
    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
        ray_cluster.connect(num_cpus=actors)
        if home is not None and not home.__name__.startswith("fedcommons."):
            cloudpickle.register_pickle_by_value(home)  # actors may be unable to import a script of the user
        executor = RayActors(federation.build(algorithm), federation.data, actors, 0)
        stack.callback(executor.close)
        require_the_bits_of_one_process(algorithm, federation, executor)
