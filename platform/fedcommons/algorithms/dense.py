"""DENSE: clients send their models once, and the server distils their ensemble into its model on synthetic images.

Zhang et al., "DENSE: data-free one-shot federated learning", NeurIPS 2022, arXiv:2112.12371, equations 2 to 7 and
algorithm 1.   x: server model, the student, with logits f_x;  y_i: client i's model, with logits f_i; w_i: client i's
weight;  a_i = w_i / sum_j w_j;  f = sum_i a_i f_i: logits of the ensemble;  G: image generator, z: its input noise; y:
labels, drawn uniformly;  CE: cross entropy;  p_T(f) = softmax(f/T) with ``temperature`` T.

Rounds 1 to ``warmup_rounds`` are FedAvg's. In the next round, clients train and send y_i - x, and x becomes the mean of
the received models y_i. If no model arrives, all clients train and send again in the next round. Afterwards only the
server trains, ``server_epochs`` epochs per round, and no client takes part. One epoch:

    new G and z, trained by ``generator_steps`` steps of Adam down  CE(f(G(z)), y) + BN + boundary * div
    BN  = mean_i sum_l (||mean_l - m_il|| + ||variance_l - v_il||), over the BatchNorm layers l of f_i
    div = - mean over images of [argmax f != argmax f_x] KL(softmax(f) || softmax(f_x))
    the batch with the lowest loss joins the pool
    x <- one pass of SGD over the whole pool down  T^2 KL(p_T(f) || p_T(f_x))

mean_l, variance_l: statistics of the batch of images at layer l;  m_il, v_il: the layer's running statistics in y_i.
BN is zero for a model without BatchNorm. In the released code BN is zero for every model (``bn released``), because the
code's hooks do not find the clients' models, which are in a plain Python list. Clients send their models once, with
BatchNorm's statistics. The privacy guarantee of local training covers the models. The later rounds use no client data
and cost no privacy.

Departs from the paper: an epoch generates one batch of images, as in the released code. All clients take part. Images
of the pool are not cropped and mirrored anew, so the ensemble labels each image once. The server's BatchNorm uses the
mean of the clients' statistics. G's convolutions before BatchNorm have biases (``norm_bias``); in the released code
they have none. Two options set what the paper leaves open: ``start_from`` sets the model from which x starts, and
``boundary_temperature`` the temperature of div.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.algorithms import one_shot_models
from fedcommons.algorithms.ensemble import Ensemble, divergence, make, optimizer_of, order, set_training_mode
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.one_shot_models import Lessons, making
from fedcommons.core.algorithm import Replies, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Payload
from fedcommons.flat_tensors import data as values
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class DENSE:
    """The server distils the ensemble of the clients' models into its own model, on generated images."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_classes=True, distils=True, trains_images=True, sees_statistics=True, waits_for="ensemble",
        repeats={"train_block": "client_epochs", "teach": "server_epochs"}, grows={"images": 0, "targets": 0},
    )  # fmt: skip

    warmup_rounds: Annotated[int, "[0, 1e9]"] = 0
    """rounds of FedAvg before the round in which clients send their models (Fedssyn's comparison: 10)"""
    client_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """local epochs of the clients' last training, whose models form the ensemble; default: client.epochs"""
    start_from: Annotated[str, "average | server"] = "average"
    """initial server model of the distillation: mean of the clients' models, or the model sent to clients (server)"""
    server_epochs: Annotated[int, "[1, 1e9]"] = 1
    """epochs of the server in a round (paper: 200 in total)"""
    generator_steps: Annotated[int, "[1, 1e9]"] = 30
    """training steps of the image generator in an epoch"""
    generated: Annotated[int, "[2, 1e6]"] = 64
    """synthetic images that join the server's pool in an epoch; they are one generator batch (paper: 256)"""
    latent: Annotated[int, "[1, 1e6]"] = 256
    """length of the noise vector of a synthetic image"""
    width: Annotated[int, "[1, 1e6]"] = 32
    """channels of the generator's last feature maps; earlier maps have twice that number (paper: 64)"""
    norm_bias: bool = True
    """whether the generator's convolutions before BatchNorm have biases, which have no effect (released code: false)"""
    generator_lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """learning rate of Adam for the generator and its input noise"""
    bn: Annotated[str, "paper | released"] = "paper"
    """paper: the generator's loss has a term of BatchNorm's statistics; released: no such term, as in released code"""
    boundary: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of the generator's reward for images on which ensemble and server model disagree"""
    boundary_temperature: Annotated[float, "(0, 1e6]"] = 1.0
    """softmax temperature of the divergence between ensemble and server model in the generator's loss"""
    temperature: Annotated[float, "(0, 1e6]"] = 20.0
    """T, softmax temperature of the distillation"""
    server_batch: Annotated[int, "[1, 1e9]"] = 256
    """synthetic images in a step of the server"""
    server_lr: Annotated[float, "(0, 1e38]"] = 0.005
    """learning rate of the server's SGD"""
    server_momentum: Annotated[float, "[0, 1)"] = 0.9
    """momentum of the server's SGD"""

    check, participants = one_shot_models.check, one_shot_models.participants
    effective_constants = one_shot_models.effective_constants
    start, down, client = one_shot_models.start, FedAvg.down, one_shot_models.client

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return one_shot_models.merge(self, teach, executor, state, total, replies, round, seed)

    def score(self, ensemble: Ensemble, weights: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's loss, a scalar:  cross entropy of the ensemble + BN + boundary * div.

        BN: distance of the batch's statistics from those of the clients' BatchNorm layers. div: minus the mean
        divergence of ensemble and student, which is 0 for images on which both predict the same class. x: generated
        images as network inputs. labels: (n,). weights: the ensemble's client weights, (N,).
        """
        with ensemble.gaps() as gaps:
            f = torch.tensordot(weights, ensemble.logits(x), 1)
        loss = F.cross_entropy(f, labels)
        if gaps and self.bn == "paper":
            loss = loss + torch.stack(gaps).sum() / len(weights)
        if self.boundary:
            student = ensemble.student(x)
            apart = (f.argmax(1) != student.argmax(1)) * divergence(f, student, self.boundary_temperature)
            loss = loss - self.boundary * apart.mean()
        return loss

    def distil(self, work: Work, images: Tensor, targets: Tensor, velocity: Tensor, batches: Sequence[Tensor]) -> None:
        """Train the student for one pass over the pool ``images``, to match the ensemble's logits ``targets``.

        velocity: momentum buffer, changed in place. batches: image indices of each step.
        """
        set_training_mode(work.module)
        optimizer = optimizer_of(work, velocity, self.server_lr, self.server_momentum)
        for rows in batches:
            loss = divergence(targets[rows], work.module(images[rows]), self.temperature).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        work.module.train()


def teach(worker: Worker, task: Lessons[DENSE], seed: int) -> State:
    """Run the server's epochs of one round on a worker; return the changed entries of the server state."""
    work, how = worker.work, task.method
    with onednn(work.loop.onednn):
        room = one_shot_models.load_models(worker, task.state)
        images, ensemble = room.images, room.ensemble
        targets = [values(task.state["targets"]).to(work.device)] if "targets" in task.state else []
        for epoch in range(task.first, task.first + how.server_epochs):
            key, score = seed_for(seed, "epoch", epoch), partial(how.score, ensemble, room.weights)
            batches = order(
                len(images) + how.generated, how.server_batch, key, work.device
            )  # The order includes the batch that ``make`` generates next.
            generated, _ = make(work, score, making(how), room.shape, room.classes, key)
            with torch.no_grad():
                targets.append(torch.tensordot(room.weights, ensemble.logits(generated), 1))
            images = torch.cat([images, generated])
            how.distil(work, images, torch.cat(targets), room.velocity, batches)
        return {**one_shot_models.changed_state(work, room, images), "targets": torch.cat(targets).cpu()}
