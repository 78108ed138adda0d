"""The executor that works in this process, one job after another."""

from collections.abc import Callable, Sequence

import torch

from fedcommons.federation.executor import J, R, S
from fedcommons.federation.worker import RunData, Worker


class Serial:
    """One worker in this process, with one torch thread: more threads would round differently from Ray's actors."""

    def __init__(self, build: Callable[[RunData], Worker], data: RunData) -> None:
        torch.set_num_threads(1)
        self.worker = build(data)

    def map(self, function: Callable[[Worker, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """See ``Executor``."""
        return [function(self.worker, shared, job) for job in jobs]

    def close(self) -> None:
        """See ``Executor``."""
