"""The executor of Ray actors: each lives for the whole run, holds one module and the clients' data."""

from collections.abc import Callable, Sequence

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError

from fedcommons.cluster import INLINE_BYTES, gpu_share
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.executor import J, R, S
from fedcommons.federation.reduction import cut
from fedcommons.federation.worker import RunData, Worker


class _Actor:
    def __init__(self, build: Callable[[RunData], Worker], data: "list[ray.ObjectRef]") -> None:
        torch.set_num_threads(1)
        # In a list Ray leaves the reference alone; as a plain argument the data would be a constructor argument,
        # which Ray keeps a copy of.
        self.worker = build(ray.get(data[0]))

    def map(self, function: Callable, shared: object, jobs: Sequence) -> list:
        return [function(self.worker, shared, job) for job in jobs]


def _ready(worker: Worker, shared: None, job: int) -> bool:
    return True


class RayActors:
    """``actors`` workers in processes of their own, each with a share of a GPU where there is a GPU.

    Jobs are dealt in order, as many to each actor as possible; who computes a job decides no bit of its result.

    Raises:
        UserError: the actors cannot be placed on this machine or cluster.
    """

    def __init__(
        self, build: Callable[[RunData], Worker], data: RunData, actors: int, gpus_per_actor: float, wait_s: float = 120
    ) -> None:
        self.data = ray.put(data)
        gpus = gpu_share(gpus_per_actor)
        kind = ray.remote(num_cpus=1, num_gpus=gpus)(_Actor)
        self.actors = [kind.remote(build, [self.data]) for _ in range(actors)]
        try:
            ray.get([a.map.remote(_ready, None, [0]) for a in self.actors], timeout=wait_s)
        except GetTimeoutError as error:
            self.close()
            raise UserError(
                f"federation.actors = {actors} could not be placed in {wait_s:g} s: each needs 1 CPU and {gpus:g} GPU, "
                f"and Ray has {ray.available_resources()} free."
            ) from error

    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """See ``Executor``; one call to each actor, so that a round costs one round trip."""
        parts = cut(jobs, len(self.actors))
        sent = ray.put(shared) if shared.nbytes > INLINE_BYTES and len(parts) > 1 else shared
        calls = [a.map.remote(function, sent, part) for a, part in zip(self.actors, parts, strict=False)]
        try:
            return [result for results in ray.get(calls) for result in results]
        except RayActorError as error:
            raise ClientError(f"a client actor died (out of memory?): {' '.join(str(error).split())}") from error

    def close(self) -> None:
        """End the actors and free the data."""
        for actor in self.actors:
            ray.kill(actor)  # pyright: ignore[reportArgumentType]  (an actor handle)
        self.actors, self.data = [], None
