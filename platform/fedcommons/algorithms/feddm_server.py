"""FedDM's server training on the clients' synthetic images, in one executor job.

The server minimises the mean loss, or the weighted mean loss, of its model on the synthetic images. After each SGD step
the model's weights are projected onto the ball of radius rho around the initial weights. In this ball the clients have
fitted the synthetic images to real images.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcommons.algorithms.ball import project
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, data
from fedcommons.seeding import generator, set_default_generator

if TYPE_CHECKING:
    from fedcommons.algorithms.feddm import FedDM


def minimise(worker: Worker, task: ServerTask["FedDM"], seed: int) -> Flat:
    """Train for all epochs and return the server model; ``seed`` keys the order of images and dropout.

    The task has the ``model``, synthetic ``images``, (n, ...), as network inputs, ``labels``, (n,), and perhaps
    ``weights`` of the images in the loss, (n,), with mean 1.
    """
    work, how, payload = worker.work, task.method, task.payload
    layout, x, n = work.params.layout, data(payload["model"]).to(work.device), len(data(payload["labels"]))
    work.load(Flat(layout, x))
    work.load_buffers(work.initial_buffers)
    work.module.train()
    set_default_generator(seed, "dropout")
    columns = [data(payload[name]).to(work.device) for name in ("images", "labels", "weights") if name in payload]
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
    return Flat(layout, work.params.buffer.detach().cpu().clone())
