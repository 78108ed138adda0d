"""The executor with Ray actors. Each actor lives for the whole run and stores one module and the clients' data.

A job is a pure function of its arguments. So if an actor dies, a new actor runs the same jobs again.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any, Generic

import ray
from ray import exceptions as errors
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedcommons.core.executor import J, R, S, WorkerDied
from fedcommons.errors import ClientError, UserError, sentence
from fedcommons.federation import actor_socket, hosts
from fedcommons.runtime import ray_cluster, tempdirs
from fedcommons.runtime.libraries import import_libraries
from fedcommons.runtime.ray_cluster import INLINE_BYTES

if TYPE_CHECKING:  # an actor imports torch by ``import_libraries``, in less time
    from fedcommons.core.worker import RunData, Worker

DEATHS = 3
"""The run fails if this number of actors has died while running the same job."""

START_S = 120
"""Seconds within which an actor, after Ray has placed it on a node, must import torch and build its module."""

SOCKET_BYTES = 16 * 2**20
"""Number of bytes of a ``map``'s shared data above which the driver uses Ray's calls, not sockets: Ray copies once."""

DIED_S = 30
"""Seconds within which Ray must report why an actor has closed its connection."""

LOST = (
    errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError, errors.OutOfMemoryError,
    errors.WorkerCrashedError,
)  # fmt: skip
"""The errors that Ray raises if an actor, its node or its result is lost."""


class _Process:
    """The code in an actor's process, which runs jobs of calls of Ray (``map``) or of a socket (``serve``)."""

    def __init__(
        self, build_and_data: "list[ray.ObjectRef]", gpus: float, driver: Mapping[str, Mapping[str, str]]
    ) -> None:
        import_libraries()
        from fedcommons.core.worker import set_up_process
        from fedcommons.runtime.gpu_memory import limit_memory

        set_up_process()
        limit_memory(gpus or 1.0)
        self.refused: UserError | ClientError | None = None
        self.listener: Listener | None = None
        try:
            # The reference is in a list, because Ray would copy the data of a reference that is an argument.
            self.worker = hosts.run_if_same(driver, *ray.get(build_and_data[0]))
        except (UserError, ClientError) as error:
            self.refused = error  # ``listen`` raises the error, because Ray would convert a constructor's error to text

    def listen(self, node: str, folder: str, key: bytes) -> str:
        """Return the address at which ``serve`` waits for the driver; empty if the driver is on another node.

        Raises:
            UserError, ClientError: the actor could not build its worker.
        """
        if self.refused:
            raise self.refused
        if folder and ray.get_runtime_context().get_node_id() == node:
            self.listener = actor_socket.listen(folder, key)
        return str(self.listener.address) if self.listener else ""

    def serve(self) -> None:
        """Run the jobs that the driver sends to the socket, until the driver closes it. Ray's calls wait meanwhile."""
        if self.listener:
            actor_socket.serve(actor_socket.accept(self.listener), self.map)

    def map(self, shared: Any, work: tuple[Callable, Sequence]) -> list:
        """Return the results of the jobs; ``work``: function and jobs, one argument as each costs Ray 0.1 ms a call."""
        function, jobs = work
        return [self.worker.run(function, shared, job) for job in jobs]


class _Shared(Generic[S]):
    """The data that all actors of a ``map`` share, in the form that a socket or a call of Ray needs."""

    def __init__(self, shared: S, actors: int) -> None:
        self.shared = shared
        nbytes: Any = getattr(shared, "nbytes", None)
        if not isinstance(nbytes, int):
            nbytes = sum(memoryview(part).nbytes for part in self.packed)
        self.is_large, self.is_put = nbytes > SOCKET_BYTES, nbytes > INLINE_BYTES and actors > 1

    @cached_property
    def packed(self) -> list[bytes | memoryview]:
        """The data, packed for sockets."""
        return actor_socket.pack(self.shared)

    @cached_property
    def sent(self) -> Any:
        """The data, or a reference to the data in Ray's object store if several actors need more than INLINE_BYTES."""
        return ray.put(self.shared) if self.is_put else self.shared


class _Actor:
    """The driver's connection to an actor: a socket, or Ray's calls after ``hang_up`` and if there is no socket."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.result: Any = None  # the result of the current call of ``map`` or ``serve``
        self.socket: actor_socket.Socket | None = None

    def connect(self, address: str, key: bytes) -> None:
        """Use the socket at ``address``, at which the actor listens."""
        self.result = self.handle.serve.remote()
        self.socket = actor_socket.connect(address, key)

    def send(self, shared: _Shared[S], function: Callable[[Any, S, J], R], jobs: Sequence[J]) -> None:
        """Let the actor run the jobs, whose results ``receive`` returns."""
        work = function, jobs
        if self.socket is None:
            self.result = self.handle.map.remote(shared.sent, work)
            return
        with suppress(OSError):  # the actor has died, as ``receive`` reports
            self.socket.send([*shared.packed, *actor_socket.pack(work)])

    def receive(self) -> list:
        """Wait for the results of the jobs, and return them.

        Raises:
            UserError, ClientError: a job raised the error.
            One of LOST: the actor has died.
        """
        if self.socket is None:
            return ray.get(self.result)
        try:
            results = self.socket.receive()
        except (EOFError, ConnectionError) as error:
            with suppress(errors.GetTimeoutError):
                ray.get(self.result, timeout=DIED_S)  # raises Ray's reason
            raise errors.RayActorError from error
        if isinstance(results, UserError | ClientError):
            raise results
        return results

    def hang_up(self) -> None:
        """Close the socket; after its current job, the actor takes calls of Ray."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class RayActors:
    """An executor with ``actors`` workers, each in a separate process, with a share of a GPU if Ray has GPUs.

    Each actor gets consecutive jobs; actors' numbers of jobs differ by at most one. Results do not depend on the actor.
    build: creates the worker from the data. wait_s: seconds to wait for free resources. transport: ``auto`` (sockets to
    actors on this machine, calls of Ray to others), ``fast`` (only sockets) or ``calls`` (only calls of Ray).

    Raises:
        UserError: the resources are not free in time, a host has other code, ``build`` raised a ``UserError``, or an
            actor is on another machine and ``transport`` is ``fast``.
    """

    def __init__(
        self,
        build: "Callable[[RunData], Worker]",
        data: "RunData",
        actors: int,
        gpus_per_actor: float | str,
        wait_s: float | None = None,
        transport: str = "auto",
    ) -> None:
        from fedcommons.core.worker import set_up_process

        set_up_process()  # this process adds the blocks' sums, so it needs the actors' settings
        share = ray_cluster.bundle(gpus_per_actor)
        gpus = share.get("GPU", 0)
        self.reserved, self.actors = None, list[_Actor]()
        if get_current_placement_group() is None:  # inside a sweep, the trial has already reserved the resources
            what, pin = f"federation.actors = {actors}", ray_cluster.node_labels(gpus_per_actor)
            self.reserved = ray_cluster.reserve([share] * actors, pin, what, wait_s, ", or use fewer actors")
        place = PlacementGroupSchedulingStrategy(self.reserved) if self.reserved else None
        self.kind = ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=place)(_Process)
        try:
            self.build_and_data, self.gpus, self.transport = ray.put((build, data)), gpus, transport
            self.actors += [self._start() for _ in range(actors)]
            self._await(self.actors)
        except BaseException:  # also on Ctrl-C: without ``close``, the next run would wait for the reserved resources
            self.close()
            raise

    def map(self, function: Callable[[Any, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """Return the results of all jobs, in order; see ``Executor``. Each actor gets one message with all its jobs."""
        from fedcommons.core.block_sum import cut

        parts, results = cut(range(len(jobs)), len(self.actors)), list[R]()
        sent = _Shared(shared, len(parts))
        if sent.is_large:
            self._hang_up()
        try:
            for actor, part in zip(self.actors, parts, strict=False):
                actor.send(sent, function, [jobs[j] for j in part])
            for number, part in enumerate(parts):
                try:
                    results += self.actors[number].receive()
                except LOST as error:
                    self._renew(number)
                    results += [self._again(number, sent, function, j, jobs[j], error) for j in part]
        except BaseException:  # the other actors' results, which nothing reads, must not answer the next messages
            self._hang_up()
            raise
        return results

    def _again(
        self, number: int, sent: _Shared[S], function: Callable[[Any, S, J], R], index: int, job: J, died: Exception
    ) -> R:
        """Run a job again on actor ``number``, which replaces an actor that died; return the result of the job."""
        for deaths in range(2, DEATHS + 1):
            try:
                self.actors[number].send(sent, function, [job])
                return self.actors[number].receive()[0]
            except LOST as error:
                died = error
                if deaths < DEATHS:  # otherwise the run fails and needs no actor
                    self._renew(number)
        raise WorkerDied(index, DEATHS, " ".join(str(died).split())) from died

    def _renew(self, number: int) -> None:
        """Kill actor ``number`` and start a new actor in its place."""
        self.actors[number].hang_up()
        ray.kill(self.actors[number].handle)
        self.actors[number] = self._start()
        self._await([self.actors[number]])

    def _start(self) -> _Actor:
        return _Actor(self.kind.remote([self.build_and_data], self.gpus, hosts.facts()))

    def _await(self, actors: Sequence[_Actor]) -> None:
        """Wait until the actors have built their workers, and connect to the actors' sockets."""
        key, node = secrets.token_bytes(32), ray.get_runtime_context().get_node_id()
        try:
            with tempdirs.folder(ray_cluster.base()) as folder:
                path = "" if self.transport == "calls" else str(folder)
                calls = [actor.handle.listen.remote(node, path, key) for actor in actors]
                for actor, address in zip(actors, ray.get(calls, timeout=START_S), strict=True):
                    if address:
                        actor.connect(address, key)
                    elif self.transport == "fast":
                        raise UserError("federation.transport fast needs actors on this machine: use auto or calls.")
        except UserError as error:
            raise UserError(sentence(error)) from error
        except (errors.GetTimeoutError, OSError, EOFError, AuthenticationError, *LOST) as error:
            reason = " ".join(str(error).split()) or f"{START_S} s were not enough"
            has = ray_cluster.free_resources()
            raise ClientError(f"an actor could not be started (Ray has {has} free): {reason}") from error

    def _hang_up(self) -> None:
        for actor in self.actors:
            actor.hang_up()

    def close(self) -> None:
        """Kill all actors, and free the shared data and the reserved resources."""
        self._hang_up()
        for actor in self.actors:
            ray.kill(actor.handle)
        if self.reserved is not None:
            ray_cluster.free(self.reserved)
        self.actors, self.build_and_data, self.reserved = [], None, None
