"""FedDM's server training on the clients' synthetic images, in one executor job.

The server minimises the mean loss, or the weighted mean loss, of its model on the synthetic images. After each SGD step
the model's weights are projected onto the ball of radius rho around the initial weights. In this ball the clients have
fitted the synthetic images to real images.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcommons.algorithms.ball import project
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, data
from fedcommons.seeding import generator, set_default_generator

if TYPE_CHECKING:
    from fedcommons.algorithms.feddm import FedDM


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The server's task in ``round``: minimise the loss on synthetic ``images``, started at ``model``.

    weights: weights of the images in the loss, (n,), with mean 1; None: equal weights.
    """

    method: "FedDM"
    model: Flat
    images: Tensor  # (n, ...), the network's inputs
    labels: Tensor  # (n,)
    weights: Tensor | None
    round: int

    @property
    def nbytes(self) -> int:
        return data(self.model).nbytes + self.images.nbytes


def minimise(worker: Worker, task: Surrogate, seed: int) -> Flat:
    """Train for all epochs and return the server model; ``seed`` keys the order of images and dropout."""
    work, how, n = worker.work, task.method, len(task.labels)
    x = task.model.buffer.to(work.device)
    work.load(Flat(task.model.layout, x))
    work.load_buffers(work.initial_buffers)
    work.module.train()
    set_default_generator(seed, "dropout")
    columns = [t.to(work.device) for t in (task.images, task.labels, task.weights) if t is not None]
    draws = generator(seed, "order")
    orders = torch.stack([torch.randperm(n, generator=draws) for _ in range(how.server_epochs)]).to(work.device)
    optimizer = torch.optim.SGD(work.named.values(), how.server_lr, how.server_momentum, weight_decay=how.server_decay)
    steps = -(-n // how.server_batch)
    with work.logged, onednn(work.loop.onednn):
        for number, rows in enumerate(rows for order in orders for rows in order.split(how.server_batch)):
            done = (task.round - 1) * how.server_epochs * steps + number
            work.clock.set(task.round, done // steps, done)
            loss = work.module.training_step(tuple(t[rows] for t in columns), 0)
            assert isinstance(loss, Tensor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if how.project:
                project(work.params.buffer, x, how.radius)
    return Flat(task.model.layout, work.params.buffer.detach().cpu().clone())
