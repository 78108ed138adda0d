"""The executor with Ray actors. Each actor lives for the whole run and stores one module and the clients' data.

A job is a pure function of its arguments. So if an actor dies, a new actor runs the same jobs again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions as errors
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedcommons.core.block_sum import cut
from fedcommons.core.executor import J, R, S, WorkerDied
from fedcommons.core.worker import RunData, Worker, set_up_process
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation import hosts
from fedcommons.runtime import ray_cluster
from fedcommons.runtime.gpu_memory import limit_memory
from fedcommons.runtime.ray_cluster import INLINE_BYTES

DEATHS = 3
"""The run fails if this number of actors has died while running the same job."""

START_S = 120
"""Seconds within which an actor, after Ray has placed it on a node, must import torch and build its module."""

LOST = (
    errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError, errors.OutOfMemoryError,
    errors.WorkerCrashedError,
)  # fmt: skip
"""The errors that Ray raises if an actor, its node or its result is lost."""


class _Actor:
    def __init__(
        self,
        build: Callable[[RunData], Worker],
        data: "list[ray.ObjectRef]",
        gpus: float,
        driver: Mapping[str, Mapping[str, str]],
    ) -> None:
        set_up_process()
        limit_memory(gpus or 1.0)
        self.refused: UserError | ClientError | None = None
        try:
            # The reference is in a list, because Ray would copy the data of a reference that is an argument.
            self.worker = hosts.run_if_same(driver, build, ray.get(data[0]))
        except (UserError, ClientError) as error:
            self.refused = error  # ``map`` raises the error, because Ray would convert a constructor's error to text

    def map(self, shared: Any, work: tuple[Callable, Sequence]) -> list:
        if self.refused:
            raise self.refused
        function, jobs = work  # one argument instead of two, because each argument costs Ray 0.1 ms per call
        return [self.worker.run(function, shared, job) for job in jobs]


def _ready(worker: Worker, shared: None, job: int) -> None:
    """Return None. When the driver gets this result, the actor's constructor has finished."""


class RayActors:
    """An executor with ``actors`` workers, each in a separate process, with a share of a GPU if Ray has GPUs.

    Each actor gets consecutive jobs; actors' numbers of jobs differ by at most one. Results do not depend on the actor.
    build: creates the worker from the data. wait_s: seconds to wait for free resources.

    Raises:
        UserError: the resources are not free in time, a host has other code, or ``build`` raised a ``UserError``.
    """

    def __init__(
        self,
        build: Callable[[RunData], Worker],
        data: RunData,
        actors: int,
        gpus_per_actor: float | str,
        wait_s: float | None = None,
    ) -> None:
        set_up_process()  # this process adds the blocks' sums, so it needs the actors' settings
        share = ray_cluster.bundle(gpus_per_actor)
        gpus = share.get("GPU", 0)
        self.reserved = None
        if get_current_placement_group() is None:  # inside a sweep, the trial has already reserved the resources
            what, pin = f"federation.actors = {actors}", ray_cluster.node_labels(gpus_per_actor)
            self.reserved = ray_cluster.reserve([share] * actors, pin, what, wait_s, ", or use fewer actors")
        place = PlacementGroupSchedulingStrategy(self.reserved) if self.reserved else None
        self.kind = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=place)(_Actor)
        self.actors: list[Any] = []
        try:
            self.build, self.data, self.gpus = build, ray.put(data), gpus
            self.actors += [self._start() for _ in range(actors)]
            self._await(self.actors)
        except BaseException:  # also on Ctrl-C: without ``close``, the next run would wait for the reserved resources
            self.close()
            raise

    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """Return the results of all jobs, in order; see ``Executor``. Each actor gets one call with all its jobs."""
        parts = cut(range(len(jobs)), len(self.actors))
        sent = ray.put(shared) if shared.nbytes > INLINE_BYTES and len(parts) > 1 else shared
        calls = [
            actor.map.remote(sent, (function, [jobs[j] for j in part]))
            for actor, part in zip(self.actors, parts, strict=False)
        ]
        results: list[R] = []
        for number, (call, part) in enumerate(zip(calls, parts, strict=True)):
            try:
                results += ray.get(call)
            except LOST as error:
                self._renew(number)
                results += [self._again(number, function, sent, j, jobs[j], error) for j in part]
        return results

    def _again(self, number: int, function: Callable, sent: object, index: int, job: object, died: Exception) -> Any:
        """Run a job again on actor ``number``, which replaces an actor that died; return the result of the job."""
        for _ in range(DEATHS - 1):
            try:
                return ray.get(self.actors[number].map.remote(sent, (function, [job])))[0]
            except LOST as error:
                died = error
                self._renew(number)
        raise WorkerDied(index, DEATHS, " ".join(str(died).split())) from died

    def _renew(self, number: int) -> None:
        """Kill actor ``number`` and start a new actor in its place."""
        ray.kill(self.actors[number])
        self.actors[number] = self._start()
        self._await([self.actors[number]])

    def _start(self) -> Any:
        return self.kind.remote(self.build, [self.data], self.gpus, hosts.facts())

    def _await(self, actors: Sequence[Any]) -> None:
        try:
            ray.get([actor.map.remote(None, (_ready, [0])) for actor in actors], timeout=START_S)
        except UserError as error:
            raise UserError(sentence(error)) from error
        except (errors.GetTimeoutError, *LOST) as error:
            reason = " ".join(str(error).split()) or f"{START_S} s were not enough"
            has = ray_cluster.free_resources()
            raise ClientError(f"an actor could not be started (Ray has {has} free): {reason}") from error

    def close(self) -> None:
        """Kill all actors, and free the shared data and the reserved resources."""
        for actor in self.actors:
            ray.kill(actor)
        if self.reserved is not None:
            ray_cluster.free(self.reserved)
        self.actors, self.data, self.reserved = [], None, None
