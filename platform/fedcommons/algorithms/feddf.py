"""FedDF: after FedAvg, the server distils the ensemble of the clients' models into the averaged model.

Lin et al., "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020, arXiv:2006.07242,
algorithm 1.   x: server model, the student, with logits f_x;  y_i: client i's model, with logits f_i;  w_i: client i's
weight;  S: clients whose models arrive in the round;  d: batch of the server's unlabelled examples;  p(f) = softmax(f).

    x <- sum_i w_i y_i / sum_i w_i
    ``server_steps`` times, by Adam:  x <- x - eta_j dKL(p(1/|S| sum_i f_i(d)) || p(f_x(d)))/dx

The learning rate eta_j falls from ``server_lr`` to 0 by half a cosine in each round, in which Adam starts anew. The
server's examples are public ones, which belong to no client (``data.public``), or the pool of synthetic images, if the
sharing strategy gives the pool to the server; labels are not used. Each pass over the examples has a random order. The
distillation uses only the clients' messages and the server's examples, so it adds no privacy cost.

Departs from the paper: the number of steps is fixed. In the paper at most 10,000 steps are made, and the server stops
after 1,000 steps without a gain on validation data. The paper's public data are another data set (CIFAR-100 for
CIFAR-10), or images of a generator; here they are images of the same data set, or the pool. Clients' models and the
student use BatchNorm's statistics as in DENSE: each client's own, and the mean of the clients'.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any

import torch
from torch import Tensor

from fedcommons.algorithms.ensemble import divergence, order, set_training_mode
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.one_shot_models import load_models, store_models
from fedcommons.algorithms.server_training import CHUNK, ServerTask
from fedcommons.core.algorithm import Merged, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, flat, scale, sub
from fedcommons.seeding import seed_for, set_default_generator


@dataclass(frozen=True)
class FedDF:
    """FedAvg, after which the server distils the clients' models on its unlabelled examples in each round."""

    rows: Annotated[str, "public | pool"] = "public"
    """the server's examples: public (data.public) or pool (synthetic images: --sharing server_synthetic)"""
    server_steps: Annotated[int, "[0, 1e9]"] = 200
    """steps of distillation in a round (paper: at most 10,000); 0: FedAvg"""
    server_batch: Annotated[int, "[1, 1e9]"] = 128
    """examples in a step of the server"""
    server_lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """largest learning rate of the server's Adam"""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            distils=True, sees_statistics=True, repeats={"distil": "server_steps"},
            needs_pool=self.rows == "pool", needs_public=self.rows == "public",
        )  # fmt: skip

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that the server gets BatchNorm's statistics, with which it evaluates the clients' models."""
        if fields["federation.buffers"] == "keep":
            raise UserError("feddf needs federation.buffers average: the server evaluates clients' models.")

    start, down = FedAvg.start, FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Train and reply as in FedAvg; the server also sees the update y_i - x outside of the sum."""
        x, w = flat(message.common, "model"), work.weight(data)
        y, metrics, spent = work.local(x, data, seed)
        delta, releases = sub(y, x), [spent.with_names("delta")]
        return Reply({"delta": scale(delta, w)}, {"delta": delta}, weight=w, metrics=metrics, releases=releases)

    def merge(
        self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int
    ) -> Merged:
        """Average as in FedAvg, then distil; report the mean loss of the distillation's steps."""
        if not self.server_steps:
            return FedAvg.merge(self, executor, state, total, replies, round, seed)
        models = store_models(state, total, replies, average=True)
        model, loss = executor.map(distil, ServerTask(self, models, round), [seed])[0]
        return {"model": model}, {"distillation_loss": loss}


def distil(worker: Worker, task: ServerTask[FedDF], seed: int) -> tuple[Flat, Tensor]:
    """Train the averaged model to match the clients' models; return its weights and the mean loss of the steps."""
    work, how, pool = worker.work, task.method, worker.data.pool
    examples = worker.data.public if how.rows == "public" else None if pool is None else pool.store
    if examples is None:
        raise ValueError(f"the server has no examples of feddf.rows {how.rows}")
    x, losses = examples.x, list[Tensor]()
    passes = ceil(how.server_steps / ceil(len(x) / how.server_batch))
    batches = [rows for e in range(passes) for rows in order(len(x), how.server_batch, seed_for(seed, e), work.device)]
    with onednn(work.loop.onednn):
        room = load_models(worker, task)
        set_default_generator(seed, "ensemble")  # a module may draw random numbers in evaluation mode
        with torch.no_grad():
            targets = torch.cat([room.ensemble.logits(some).mean(0) for some in x.split(CHUNK)])
        optimizer = torch.optim.Adam(work.named.values(), how.server_lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.server_steps)
        set_training_mode(work.module)
        for part in work.evaluating:
            part.training = False
        set_default_generator(seed, "random layers")
        for rows in batches[: how.server_steps]:
            loss = divergence(targets[rows], work.module(x[rows]), 1.0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    work.train_mode()
    return Flat(work.params.layout, work.params.buffer.detach().cpu().clone()), torch.stack(losses).mean().cpu()
