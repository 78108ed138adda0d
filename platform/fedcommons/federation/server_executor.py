"""The executor that ``merge`` gets: a job on a worker gets the module and the server's data, not the clients' data.

The server's data are the data sets for evaluation, the public examples, and the pool of synthetic images if the sharing
strategy sends the pool to the server (``serves_pool``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedcommons.core.executor import Executor, J, R, S
from fedcommons.core.worker import Worker
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Examples


@dataclass(frozen=True)
class AtServer:
    """The executor that ``merge`` gets: the workers of ``executor`` run the server's jobs without the clients' data."""

    executor: Executor

    def map(self, function: Callable[[Any, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """Return the results of all jobs, in order; see ``Executor``."""
        return self.executor.map(partial(_without_clients, function), shared, jobs)

    def close(self) -> None:
        """End the workers of the wrapped executor."""
        self.executor.close()


def _without_clients(function: Callable[[Any, S, J], R], worker: Worker, shared: S, job: J) -> R:
    store = worker.data.clients.store
    none = Examples(store.x[:0].clone(), store.y[:0].clone())  # a view would share storage with all clients' examples
    no_clients = Clients(none, Rows(torch.zeros(0, dtype=torch.int64), np.zeros(0, int), np.zeros(0, int)))
    pool = _alone(worker.data.pool) if worker.data.serves and worker.data.pool else None
    data = replace(worker.data, clients=no_clients, real=no_clients, pool=pool, tests=None, serves=pool is not None)
    return worker.work.copied(function(replace(worker, data=data), shared, job))


def _alone(pool: Clients) -> Clients:
    """Copy the pool's examples to new tensors, because ``pool.store`` also contains the clients' real examples."""
    rows = pool.rows.flat
    store = Examples(pool.store.x.index_select(0, rows), pool.store.y.index_select(0, rows))
    return Clients(store, Rows.in_order(torch.arange(len(rows), device=rows.device), pool.rows.sizes))
