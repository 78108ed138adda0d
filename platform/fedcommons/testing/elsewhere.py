"""Check that other workers, another order, or real Ray actors give the same bits."""

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from fedcommons.core.algorithm import Algorithm, Personal
from fedcommons.core.evaluation import ModelTask
from fedcommons.core.executor import Executor
from fedcommons.federation.personal_evaluation import evaluate_personal
from fedcommons.federation.rounds import Plan
from fedcommons.testing.comparing import bits, differing, listed, require
from fedcommons.testing.federations import Federation


def require_the_bits_of_one_process(
    algorithm: Algorithm, federation: Federation, executor: Executor, plan: Plan | None = None
) -> None:
    """Check that the rounds of ``plan`` (default: three) give the same bits on ``executor`` and the serial executor.

    Raises:
        AssertionError: bits or metrics differ.
    """
    plan = plan or federation.plan(3, participation=0.8, blocks=4)
    elsewhere, in_process = federation.run(algorithm, plan, executor), federation.run(algorithm, plan)
    unequal = differing(bits(elsewhere[-1][0]), bits(in_process[-1][0]))
    require(
        not unequal,
        f"clients trained elsewhere, or in another order, give other bits of {listed(unequal)}: a client's round "
        "depends on more than message, memory, data and seed",
    )
    require(
        [facts for _, facts in elsewhere] == [facts for _, facts in in_process],
        "clients trained elsewhere, or in another order, report other metrics",
    )
    if isinstance(algorithm, Personal):
        at, now = ModelTask(federation.model, seed=1), in_process[-1][0]
        played = ((federation.serial(algorithm), plan), (executor, replace(plan, blocks=2)))
        serial_metrics, other_metrics = (evaluate_personal(algorithm, e, at, now, p, on_tests=False) for e, p in played)
        require(serial_metrics == other_metrics, "clients' own models, evaluated elsewhere, have other metrics")


class Apart:
    """An executor with two workers that share nothing, like two processes; they alternate, the last job first."""

    def __init__(self, federation: Federation, algorithm: Algorithm) -> None:
        self.workers = [federation.build(deepcopy(algorithm))(federation.data) for _ in range(2)]

    def map(self, function: Callable[[Any, Any, Any], Any], shared: Any, jobs: Sequence[Any]) -> list[Any]:
        """See ``Executor``."""
        done = {j: self.workers[j % 2].run(function, shared, jobs[j]) for j in reversed(range(len(jobs)))}
        return [done[j] for j in range(len(jobs))]

    def close(self) -> None:
        """See ``Executor``."""


def require_the_same_of_ray(algorithm: Algorithm, federation: Federation, actors: int) -> None:
    """Check that real Ray actors give the bits of the serial executor; starts Ray if it is not running."""
    import ray
    from ray import cloudpickle

    from fedcommons.federation.ray_executor import RayActors
    from fedcommons.runtime import ray_cluster

    home = sys.modules.get(type(algorithm).__module__)
    started = not ray.is_initialized()
    ray_cluster.connect(num_cpus=actors)
    try:
        if home is not None and not home.__name__.startswith("fedcommons."):
            cloudpickle.register_pickle_by_value(home)  # the actors may not be able to import a script or a test
        executor = RayActors(federation.build(algorithm), federation.data, actors, 0)
        try:
            require_the_bits_of_one_process(algorithm, federation, executor)
        finally:
            executor.close()
    finally:
        if started:
            ray.shutdown()
