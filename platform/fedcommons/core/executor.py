"""Where work runs. ``serial`` and ``ray_actors`` give the same bits, because no result depends on who computed it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from fedcommons.errors import ClientError


class Shared(Protocol):
    """What all jobs of one call need: travels once to each worker."""

    @property
    def nbytes(self) -> int: ...


class WorkerDied(ClientError):
    """The process that ran ``jobs[job]`` died each time it was tried."""

    def __init__(self, job: int, times: int, why: str) -> None:
        super().__init__(f"the process that ran a job died {times} times (out of memory?): {why}")
        self.job, self.times, self.why = job, times, why


S = TypeVar("S", bound=Shared)
J = TypeVar("J")
R = TypeVar("R")


class Executor(Protocol):
    """A set of workers that live for the whole run, each with one module and the clients' data."""

    def map(self, function: Callable[[Any, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """``[function(worker, shared, job) for job in jobs]``; function is importable and pure.

        Raises:
            WorkerDied: the process of a job died, and those that took its place.
        """
        ...

    def close(self) -> None:
        """Let the workers go."""
        ...
