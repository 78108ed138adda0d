"""Jobs on the server, and two of them: training and evaluation of the server model on the pool of synthetic images.

The server trains like a client whose data is the pool: with the learning rate, batch size, optimizer and schedule of
``client``. It does not use DP-SGD, because any protection is applied before images enter the pool.
"""

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.flat_tensors import Flat, Payload, flat, nbytes
from fedcommons.seeding import set_default_generator

CHUNK = 256
"""Number of synthetic images whose loss is computed in one forward pass."""


M = TypeVar("M")


@dataclass(frozen=True)
class ServerTask(Generic[M]):
    """The task of a server job. round: number of the round. payload: entries of the server state, and other tensors."""

    method: M
    payload: Payload
    round: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.payload)


def train_on_pool(worker: Worker, task: ServerTask[Any], seed: int) -> Flat:
    """Train the model on the pool and return its weights; ``seed`` keys all random draws.

    The method's ``server_epochs`` is the number of epochs; None stands for client.epochs. Before training, BatchNorm's
    statistics are reset to those of the untrained module.

    Raises:
        ValueError: the server has no pool.
    """
    work, pool = worker.work, _pool(worker)
    loop = replace(work.loop, epochs=task.method.server_epochs or work.loop.epochs, dp=None)
    work.begin(task.round, pool)
    work.load_buffers(work.initial_buffers)
    trained = loop.run(work, flat(task.payload, "model"), pool, seed).model
    return Flat(trained.layout, trained.buffer.detach().cpu().clone())


def loss_on_pool(worker: Worker, task: ServerTask[Any], seed: int) -> Tensor:
    """Return the module's mean training loss over the pool, in evaluation mode; ``seed`` keys all random draws."""
    work, pool = worker.work, _pool(worker)
    work.load(flat(task.payload, "model"))
    work.load_buffers(work.initial_buffers)
    work.module.eval()
    set_default_generator(seed, "loss on the pool")
    total = torch.zeros((), device=work.device)
    with torch.no_grad():
        for number, batch in enumerate(zip(pool.x.split(CHUNK), pool.y.split(CHUNK), strict=True)):
            loss = work.loss(batch, number)
            total += loss * (len(batch[1]) / len(pool))
    return total.cpu()


def _pool(worker: Worker) -> ClientData:
    if worker.data.pool is None:
        raise ValueError("the server has no pool of synthetic images; use sharing.setting server_synthetic")
    store = worker.data.pool.store
    return ClientData(store.x, store.y)
