"""FedDM: clients send a few synthetic images per class, and the server trains on them instead of real images.

Xiong et al., "FedDM: Iterative distribution matching for communication-efficient federated learning", arXiv:2207.09653,
equation 9 and algorithm 1.   x: server model;  w: weights in a ball around x;  rho: radius of the ball;  S_k: client
k's synthetic images, ``ipc`` of each class;  h, z: embedding (the input of the module's ``head``) and logits;  D_c,
S_c: client k's real and synthetic images of class c;  T: ``iterations``.

    L_c = ||mean h_w(D_c) - mean h_w(S_c)||^2 + ||mean z_w(D_c) - mean z_w(S_c)||^2

The client repeats T times: it samples w from the ball around x and takes one SGD step on the pixels of S_k, down the
sum of L_c over classes c. The client uploads only S_k and the labels of its classes. The server trains x on all S_k by
SGD and projects x onto the ball after each step.

The paper's noise (``sigma`` > 0): the client clips the whole gradient of a class to norm C (``clip``) and then adds
noise. No epsilon is certified, for two reasons. One image may change the direction of the whole gradient, so the
image's influence is not bounded by C/|B|; |B|: number of real images in the batch. And S_k starts from real images.
Noise with ``dp.local``, which needs ``init`` noise: the client clips the gradient term of each image in a Poisson batch
and adds noise to the sum of terms (equation 15). Each class takes T steps per round at sampling rate |B|/n_c;  n_c:
number of images of class c. A client's classes are disjoint, so the client's epsilon is that of its smallest class.
No epsilon covers which classes a client has; the privacy ledger lists these classes as uncovered (no guarantee).

Departs from the paper: details that the paper leaves open follow dataset condensation, on which FedDM builds: momentum
0.5, new S_k in each round, images of the network's input (normalised, not clipped), networks in evaluation mode, no
augmentation. A client leaves out a class with fewer than ``least`` images, unless it has no other class. With
``iterations`` 0 clients send the initial images, the baseline REAL of the paper. The paper has no BatchNorm; here
BatchNorm learns its statistics from one pass over a client's images per round. Example weights count in the matched
means, but not with ``dp.local``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from fedcommons.algorithms import feddm_matching
from fedcommons.algorithms.ball import project
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, flat
from fedcommons.flat_tensors import data as data_of
from fedcommons.privacy.release import Release
from fedcommons.seeding import generator, set_default_generator

NOT_CERTIFIED = (
    "noise level {:g} as FedDM prints it, not certified: it clips the gradient of a whole batch, which one image may "
    "turn as a whole, and the images start from real ones"
)


@dataclass(frozen=True)
class FedDM:
    """Clients fit a few synthetic images per class to their real images; the server trains on the synthetic images.

    Clients minimise the distance between mean features of real and synthetic images, averaged over weights in a ball
    around the server model. The server keeps its weights in this ball.

    Raises:
        ValueError: the module does not name its ``head``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        computes_inputs=True, watches_head=True, needs_classes=True, trains_locally=False,
        repeats={"train_block": "iterations", "minimise": "server_epochs"},
    )  # fmt: skip

    radius: Annotated[float, "(0, 1e38]"] = 5.0
    """rho, radius of the ball around the server model in which weights are sampled and trained"""
    ipc: Annotated[int, "[1, 1e6]"] = 10
    """synthetic images per class (paper: 10, for CIFAR-100 5)"""
    least: Annotated[int, "[1, 1e9]"] = 10
    """minimum number of real images with which a client sends a class; without such a class it sends all classes"""
    iterations: Annotated[int, "[0, 1e9]"] = 20
    """T, SGD steps on the pixels in a round (paper: 1000); 0 sends the initial images (the paper's REAL)"""
    init: Annotated[str, "real | noise"] = "real"
    """initial synthetic images: real images of the class, or noise"""
    match_batch: Annotated[int, "[1, 1e9]"] = 256
    """largest number of real images per class in an SGD step on the pixels"""
    image_lr: Annotated[float, "(0, 1e38]"] = 1.0
    """learning rate of SGD on the pixels"""
    image_momentum: Annotated[float, "[0, 1)"] = 0.5
    """momentum of SGD on the pixels"""
    sigma: Annotated[float, "[0, 1e6]"] = 0.0
    """standard deviation of the paper's noise in units of clip/(batch size); it has no epsilon: use dp.local for one"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 5.0
    """C, norm to which the gradient of a class is clipped before the noise of sigma is added"""
    server_epochs: Annotated[int, "[1, 1e9]"] = 20
    """epochs of the server on all synthetic images in a round (paper: 500)"""
    server_batch: Annotated[int, "[1, 1e9]"] = 256
    """synthetic images in an SGD step of the server"""
    server_lr: Annotated[float, "(0, 1e38]"] = 0.01
    """learning rate of the server's SGD"""
    server_momentum: Annotated[float, "[0, 1)"] = 0.9
    """momentum of the server's SGD"""
    server_decay: Annotated[float, "[0, 1e38]"] = 5e-4
    """weight decay of the server's SGD"""
    project: bool = True
    """project the server model onto the ball after each step (paper: yes; code based on the paper: no)"""
    loss: Annotated[str, "images | examples"] = "images"
    """a client's weight in the server's loss: number of its synthetic images (images, equation 10) or real examples"""

    def check(self, fields: Mapping[str, Any]) -> None:
        real = self.init == "real"
        if real and self.ipc > self.least:
            raise UserError(
                f"feddm.ipc must be at most feddm.least = {self.least} with feddm.init real, got {self.ipc}: a class "
                f"of {self.least} cannot provide {self.ipc} initial images; raise feddm.least, or use feddm.init noise."
            )
        if fields["dp.local"] and (real or self.sigma or not self.iterations):
            raise UserError(
                "feddm with dp.local needs feddm.init noise, feddm.sigma 0 and feddm.iterations of at least 1: images "
                "that start from real ones disclose them, and dp.noise_multiplier sets the noise."
            )
        if self.sigma and not self.iterations:
            raise UserError("feddm.sigma must be 0 with feddm.iterations 0, which takes no noisy step.")

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        counts = facts.counts() if facts.counts else torch.empty(0, 0)
        unseen = (counts.sum(0) > 0) & ~feddm_matching.is_owned(counts, self.least).any(0)
        if unseen.any():
            raise UserError(
                f"feddm: no client has feddm.least = {self.least} images of class {unseen.nonzero()[0].item()}, so the "
                "server would get none; lower feddm.least and feddm.ipc, use fewer clients or a larger partition.alpha."
            )
        return {"model": model}

    down = FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        real = data.x if data.x.is_floating_point() else work.module.normalise(data.x)  # pyright: ignore[reportCallIssue]
        rows, network_data = feddm_matching.rows_by_class(data.y, self.least), replace(data, x=real)
        first = feddm_matching.initial_images(network_data, rows, self.ipc, self.init == "real", seed)
        images, losses, protection = feddm_matching.match(
            work, flat(message.common, "model"), network_data, rows, first, self, seed
        )
        sent = {"images": images.unflatten(0, (len(rows), -1)), "labels": torch.tensor(list(rows))}
        reason = NOT_CERTIFIED.format(self.sigma) if self.sigma else ""
        spent = Release(what=("images",), reason=reason, n_disclosed=sum(map(len, rows.values())), commons=True)
        if protection and self.init == "noise":
            spent = replace(protection, what=("images",), commons=True)
        metrics = {"loss": torch.stack(losses).mean()} if losses else {}
        classes = Release(what=("labels",), commons=True)
        return Reply(each=sent, weight=data.size, metrics=metrics, releases=[spent, classes])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        """Return the next state, with the round's synthetic ``images`` and ``labels`` for inspection."""
        sent = [reply.each for reply in replies.values()]
        images = torch.cat([data_of(each["images"]).flatten(0, 1) for each in sent])
        labels = torch.cat([data_of(each["labels"]).repeat_interleave(self.ipc) for each in sent])
        payload = {"model": state["model"], "images": images, "labels": labels}
        if self.loss == "examples":
            sizes = torch.tensor([data_of(each["labels"]).numel() * self.ipc for each in sent])
            weights = torch.tensor([reply.weight for reply in replies.values()]) / sizes
            weights = weights.repeat_interleave(sizes)
            payload["weights"] = weights * len(weights) / weights.sum()
        after = executor.map(minimise, ServerTask(self, payload, round), [seed])[0]
        return {"model": after, "images": images, "labels": labels}


def minimise(worker: Worker, task: ServerTask[FedDM], seed: int) -> Flat:
    """Train for all epochs and return the server model; ``seed`` keys the order of images and dropout.

    The task has the ``model``, synthetic ``images``, (n, ...), as network inputs, ``labels``, (n,), and perhaps
    ``weights`` of the images in the loss, (n,), with mean 1.
    """
    work, how, payload = worker.work, task.method, task.payload
    layout, x, n = work.params.layout, data_of(payload["model"]).to(work.device), len(data_of(payload["labels"]))
    work.load(Flat(layout, x))
    work.load_buffers(work.initial_buffers)
    work.module.train()
    set_default_generator(seed, "dropout")
    columns = [data_of(payload[name]).to(work.device) for name in ("images", "labels", "weights") if name in payload]
    draws = generator(seed, "order")
    orders = torch.stack([torch.randperm(n, generator=draws) for _ in range(how.server_epochs)]).to(work.device)
    optimizer = torch.optim.SGD(work.named.values(), how.server_lr, how.server_momentum, weight_decay=how.server_decay)
    steps = -(-n // how.server_batch)
    with work.logged, onednn(work.loop.onednn):
        for number, rows in enumerate(rows for order in orders for rows in order.split(how.server_batch)):
            done = (task.round - 1) * how.server_epochs * steps + number
            work.clock.set(task.round, done // steps, done)
            loss = work.loss(tuple(t[rows] for t in columns))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if how.project:
                project(work.params.buffer, x, how.radius)
    return Flat(layout, work.params.buffer.detach().cpu().clone())
