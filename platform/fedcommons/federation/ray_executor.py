"""The executor with Ray actors. Each actor lives for the whole run and holds one module and the clients' data.

A job is a pure function of its arguments, so if an actor dies, a new one runs its jobs again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedcommons.core.block_sum import cut
from fedcommons.core.executor import J, R, S, WorkerDied
from fedcommons.core.worker import RunData, Worker, set_up_process
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation import hosts
from fedcommons.runtime import ray_cluster
from fedcommons.runtime.gpu_memory import bound
from fedcommons.runtime.ray_cluster import INLINE_BYTES

DEATHS = 3
"""A run fails if the actors that run a job die this often."""

START_S = 120
"""Seconds a placed actor may take to import torch and build its module."""

LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)
"""What Ray raises if an actor, its node or its result is lost."""


class _Actor:
    def __init__(
        self,
        build: Callable[[RunData], Worker],
        data: "list[ray.ObjectRef]",
        gpus: float,
        driver: Mapping[str, Mapping[str, str]],
    ) -> None:
        set_up_process()
        bound(gpus or 1.0)
        self.refused: UserError | ClientError | None = None
        try:
            # Ray does not resolve a reference inside a list. As a plain constructor argument Ray would keep another
            # copy of the data.
            self.worker = hosts.run_if_same(driver, build, ray.get(data[0]))
        except (UserError, ClientError) as error:  # told when it is asked for
            self.refused = error  # what stops a constructor reaches nobody but as text

    def map(self, shared: Any, work: tuple[Callable, Sequence]) -> list:
        if self.refused:
            raise self.refused
        function, jobs = work  # every argument of a call costs Ray a tenth of a millisecond
        return [self.worker.run(function, shared, job) for job in jobs]


def _ready(worker: Worker, shared: None, job: int) -> None:
    """Do nothing: an actor that answers has been built."""


class RayActors:
    """``actors`` workers, each in its own process and with a share of a GPU if there is one.

    Each actor gets consecutive jobs, equally many up to one; a job's result does not depend on its actor.

    Raises:
        UserError: see ``cluster.reserve`` and ``hosts.require_same``, or ``build`` refuses.
    """

    def __init__(
        self,
        build: Callable[[RunData], Worker],
        data: RunData,
        actors: int,
        gpus_per_actor: float | str,
        wait_s: float | None = None,
    ) -> None:
        set_up_process()  # this process makes the server's sums
        share = ray_cluster.bundle(gpus_per_actor)
        gpus = share.get("GPU", 0)
        self.reserved = None
        if get_current_placement_group() is None:  # a trial of a sweep has reserved its place
            what, pin = f"federation.actors = {actors}", ray_cluster.pinned(gpus_per_actor)
            self.reserved = ray_cluster.reserve([share] * actors, pin, what, wait_s, ", or use fewer actors")
        place = PlacementGroupSchedulingStrategy(self.reserved) if self.reserved else None
        self.kind = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=place)(_Actor)
        self.actors: list[Any] = []
        try:
            self.build, self.data, self.gpus = build, ray.put(data), gpus
            self.actors += [self._start() for _ in range(actors)]
            self._await(self.actors)
        except BaseException:  # Ctrl-C too: the next run would wait for what this one holds
            self.close()
            raise

    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """See ``Executor``. Each actor gets one call, so that a round costs one round trip."""
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
        """The result of a job whose actor died, from the actor that replaces it."""
        for _ in range(DEATHS - 1):
            try:
                return ray.get(self.actors[number].map.remote(sent, (function, [job])))[0]
            except LOST as error:
                died = error
                self._renew(number)
        raise WorkerDied(index, DEATHS, " ".join(str(died).split())) from died

    def _renew(self, number: int) -> None:
        """Replace an actor by a new one."""
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
        except (GetTimeoutError, *LOST) as error:
            why = " ".join(str(error).split()) or f"{START_S} s were not enough"
            has = ray_cluster.free_resources()
            raise ClientError(f"an actor could not be started (Ray has {has} free): {why}") from error

    def close(self) -> None:
        """End the actors and free the data and their resources."""
        for actor in self.actors:
            ray.kill(actor)
        if self.reserved is not None:
            ray_cluster.free(self.reserved)
        self.actors, self.data, self.reserved = [], None, None
