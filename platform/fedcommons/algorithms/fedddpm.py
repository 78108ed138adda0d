"""FedDDPM: clients train a diffusion model by FedAvg, and the server corrects it on images of local diffusion models.

It follows Peng et al., arXiv:2503.06426. Only the abstract was available, so the details are our own choices. x: server
model, a DDPM (model.name ddpm);  S: pool of synthetic images, sampled from the clients' local DDPMs before round 1
(sharing.setting server_synthetic);  y_i: client i's model after local training started at x;  w_i: client i's weight,
1 or number of examples.

    x <- x + sum_i w_i (y_i - x) / sum_i w_i;   x <- ``server_epochs`` of training on S from x

FedDDPM+ (``correct`` slow) corrects once: after the first round in which the mean loss on S falls by less than the
share ``slow`` of its value one round before. The loss on S uses the same diffusion times and noise in all rounds.

Departs from the paper: unknown, because only its abstract was read. The abstract says that FedDDPM+ corrects once when
learning slows; as far as we know, it does not say how FedDDPM+ detects this.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_training import ServerTask, loss_on_pool, train_on_pool
from fedcommons.core.algorithm import Facts, Replies, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.executor import Executor
from fedcommons.flat_tensors import Flat, Payload, flat, scalar


@dataclass(frozen=True)
class FedDDPM:
    """FedAvg of a diffusion model; after averaging, the server trains (corrects) it on its pool of synthetic images."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        averages=True, needs_pool=True, repeats={"train_on_pool": "server_epochs"}
    )

    server_epochs: Annotated[int, "[1, 1e9]"] = 1
    """epochs of the server on its pool of synthetic images in a round with a correction"""
    correct: Annotated[str, "always | slow"] = "always"
    """rounds with a correction: always (every round), or slow: once, after the first slow round (FedDDPM+)"""
    slow: Annotated[float, "[0, 1)"] = 0.01
    """a round is slow if the loss on the pool falls by less than this share of its value before the round"""

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        if self.correct == "always":
            return {"model": model}
        return {"model": model, "pool_loss": torch.zeros(()), "corrections": torch.tensor(0)}

    down, client = FedAvg.down, FedAvg.client

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        mean = weighted_mean(flat(state, "model"), total, replies)
        task = ServerTask(self, {"model": mean}, round)
        if self.correct == "always":
            return {"model": executor.map(train_on_pool, task, [seed])[0]}
        loss = executor.map(loss_on_pool, task, [0])[0]
        before, corrections = scalar(state, "pool_loss"), int(scalar(state, "corrections"))
        is_slow = round > 1 and not corrections and float(loss) > (1 - self.slow) * before
        model = executor.map(train_on_pool, task, [seed])[0] if is_slow else mean
        return {"model": model, "pool_loss": loss, "corrections": torch.tensor(corrections + is_slow)}
