"""The executor that runs all jobs in this process, one after another."""

from collections.abc import Callable, Sequence

from fedcommons.core.executor import J, R, S
from fedcommons.core.worker import RunData, Worker, fresh_torch, set_up_process


class Serial:
    """One worker in this process, with the same settings of torch as in Ray's actors."""

    def __init__(self, build: Callable[[RunData], Worker], data: RunData) -> None:
        set_up_process()
        with fresh_torch():
            self.worker = build(data)

    @fresh_torch()
    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """See ``Executor``."""
        return [self.worker.run(function, shared, job) for job in jobs]

    def close(self) -> None:
        """See ``Executor``."""
