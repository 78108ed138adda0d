"""The executor that runs all jobs in this process, one after another."""

from collections.abc import Callable, Sequence

from fedcommons.core.executor import J, R, S
from fedcommons.core.worker import RunData, Worker, fresh_torch, set_up_process


class Serial:
    """An executor with one worker in this process, with the same torch settings as in Ray actors."""

    def __init__(self, build: Callable[[RunData], Worker], data: RunData) -> None:
        set_up_process()
        with fresh_torch():
            self.worker = build(data)

    @fresh_torch()
    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """Return the results of all jobs, in order; see ``Executor``."""
        return [self.worker.run(function, shared, job) for job in jobs]

    def close(self) -> None:
        """Do nothing: there are no other processes to end."""
