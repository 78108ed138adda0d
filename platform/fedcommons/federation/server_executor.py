"""Workers as the server has them when it merges: with the module and what the server holds, not the clients' data.

It holds the public sets, and the pool where a sharing stage sends it one (``serves_pool``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedcommons.core.executor import Executor, J, JobData, R, S
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Examples


@dataclass(frozen=True)
class AtServer:
    """Runs jobs as ``executor`` does, on workers without clients."""

    executor: Executor

    def map(self, function: Callable[[Any, S, J], R], shared: S, jobs: Sequence[J]) -> list[R]:
        """See ``Executor``."""
        return self.executor.map(_without_clients, _Job(function, shared), jobs)

    def close(self) -> None:
        """See ``Executor``."""
        self.executor.close()


@dataclass(frozen=True)
class _Job:
    function: Callable[[Any, Any, Any], Any]
    shared: JobData

    @property
    def nbytes(self) -> int:
        return self.shared.nbytes


def _without_clients(worker: Worker, job: _Job, number: Any) -> Any:
    store = worker.data.clients.store
    none = Examples(store.x[:0].clone(), store.y[:0].clone())  # a view would have all the rest behind it
    nobody = Clients(none, Rows(torch.zeros(0, dtype=torch.int64), np.zeros(0, int), np.zeros(0, int)))
    pool = worker.data.pool if worker.data.serves else None
    of_server = pool and _alone(pool)
    data = RunData(nobody, nobody, worker.data.sets, of_server, worker.data.n_classes, serves=of_server is not None)
    return worker.work.copied(job.function(replace(worker, data=data), job.shared, number))


def _alone(pool: Clients) -> Clients:
    """The pool as a store of its own: the clients' real examples stand in the store that it came from."""
    rows = pool.rows.flat
    store = Examples(pool.store.x.index_select(0, rows), pool.store.y.index_select(0, rows))
    sizes = pool.rows.sizes
    return Clients(store, Rows(torch.arange(len(rows), device=rows.device), np.cumsum(sizes) - sizes, sizes))
