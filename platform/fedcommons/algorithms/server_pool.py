"""Training at the server on the pool that it holds, in one job of the executor.

The server trains as a client of the pool would: by ``client``'s rate, batch size, optimizer and schedule, without
DP-SGD, as what leaves the clients is protected before it is in the pool.
"""

from dataclasses import dataclass, replace

from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.tensors import Flat


@dataclass(frozen=True)
class OnPool:
    """From ``model``, in ``round``; epochs: passes over the pool, None for as many as a client's."""

    model: Flat
    epochs: int | None
    round: int

    @property
    def nbytes(self) -> int:
        return self.model.buffer.nbytes


def train_on_pool(worker: Worker, task: OnPool, seed: int) -> Flat:
    """The model after all epochs; BatchNorm starts from the module's first statistics. Draws are keyed by ``seed``.

    Raises:
        ValueError: the server holds no pool.
    """
    if worker.data.pool is None:
        raise ValueError("the server holds no pool: sharing.setting server_synthetic gives it one")
    work, store = worker.work, worker.data.pool.store
    pool = ClientData(store.x, store.y)
    loop = replace(work.loop, epochs=task.epochs or work.loop.epochs, dp=None)
    work.begin(task.round, pool)
    work.load_buffers(work.initial_buffers)
    trained = loop.run(work, task.model, pool, seed).model
    return Flat(trained.layout, trained.buffer.detach().cpu().clone())
