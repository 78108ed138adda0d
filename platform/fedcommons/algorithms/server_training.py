"""Training at the server on the pool that it holds, and its loss there, each in one job of the executor.

The server trains as a client of the pool would: by ``client``'s rate, batch size, optimizer and schedule, without
DP-SGD, as what leaves the clients is protected before it is in the pool.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat
from fedcommons.seeding import set_default_generator

CHUNK = 256
"""Examples whose loss is found at once."""


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
    work, pool = worker.work, _pool(worker)
    loop = replace(work.loop, epochs=task.epochs or work.loop.epochs, dp=None)
    work.begin(task.round, pool)
    work.load_buffers(work.initial_buffers)
    trained = loop.run(work, task.model, pool, seed).model
    return Flat(trained.layout, trained.buffer.detach().cpu().clone())


def loss_on_pool(worker: Worker, task: OnPool, seed: int) -> Tensor:
    """The mean of the module's training loss over the pool, in evaluation mode; what it draws is keyed by ``seed``."""
    work, pool = worker.work, _pool(worker)
    work.load(task.model)
    work.load_buffers(work.initial_buffers)
    work.module.eval()
    set_default_generator(seed, "loss on the pool")
    total = torch.zeros((), device=work.device)
    with torch.no_grad():
        for number, batch in enumerate(zip(pool.x.split(CHUNK), pool.y.split(CHUNK), strict=True)):
            loss = work.module.training_step(batch, number)
            assert isinstance(loss, Tensor)
            total += loss * (len(batch[1]) / len(pool))
    return total.cpu()


def _pool(worker: Worker) -> ClientData:
    if worker.data.pool is None:
        raise ValueError("the server holds no pool: sharing.setting server_synthetic gives it one")
    store = worker.data.pool.store
    return ClientData(store.x, store.y)
