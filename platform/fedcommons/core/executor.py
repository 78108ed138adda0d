"""Interface of executors, which run jobs (functions of a client, a block of clients or a chunk) in worker processes.

The executors ``serial`` and ``ray_actors`` return the same bits, because no result depends on the worker.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from fedcommons.errors import ClientError


class WorkerDied(ClientError):
    """Error: every process that ran the job with index ``job`` died. times: number of processes. reason: last error."""

    def __init__(self, job: int, times: int, reason: str) -> None:
        super().__init__(f"the process that ran a job died {times} times (out of memory?): {reason}")
        self.job, self.times, self.reason = job, times, reason


S = TypeVar("S")
J = TypeVar("J")
R = TypeVar("R")


class Executor(Protocol):
    """A set of workers that exist for the whole run, each with one module and the clients' data."""

    def map(self, function: Callable[[Any, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """Return ``[function(worker, shared, job) for job in jobs]``, computed by the workers.

        Args:
            function: an importable function of (worker, shared, job), whose result depends only on these arguments.
            shared: data for all jobs, of any type that can be pickled; each worker process receives them once.
            jobs: arguments of the single jobs.

        Returns:
            The results, in the order of ``jobs``.

        Raises:
            ClientError: ``function`` raised an error other than ``UserError``.
            WorkerDied: the process of a job died, and each process that ran the job again died too.
        """
        ...

    def close(self) -> None:
        """Stop the worker processes."""
        ...
