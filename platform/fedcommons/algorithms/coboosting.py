"""Co-Boosting: one-shot distillation as in DENSE, with hard synthetic images and learned ensemble weights.

Dai et al., "Enhancing one-shot federated learning through data and ensemble co-boosting", ICLR 2024, arXiv:2402.15070.
x: server model, the student, with logits f_x;  f_i: logits of client i's model;  w_i: learned weight of client i's
model, in [0, 1];  f = sum_i w_i f_i / sum_i w_i: logits of the ensemble;  G: image generator, z: its input noise;  y:
labels; p_y: probability of the label y by softmax(f);  CE: cross entropy;  e = 0, 1, ..: epoch of the server;
KL_T(f || f_x) = T^2 KL(softmax(f/T) || softmax(f_x/T)): divergence with ``temperature`` T;  step: ``weight_step``.

Clients train and send their models as in ``dense``. One epoch of the server has three steps:

    1. hard images: new G and z, trained by Adam down  mean [1 - p_y] CE(f(G(z)), y) - ``boundary`` KL_T'(f || f_x), in
       which [.] has no gradient and T' is ``boundary_temperature``; result: the batch of lowest loss, and its labels
    2. weights, by one pass over the pool of the earlier epochs:  w <- clip(w - step 0.99^e sign(dCE(f, y)/dw), 0, 1)
    3. the batch joins the pool;  distillation, by one pass over the pool:  pixels <- pixels + ``move`` times sign of
       d(u . softmax(f/T)) / d(pixels),  with u uniform in (-1, 1) for each image and class;  x <- a step of SGD down
       KL_T(f || f_x) at these pixels

The server's pool contains the synthetic images of all epochs, as uint8. A client's weight w_i starts at its share of
``federation.weighting`` (paper: 1/N for N clients).

Departs from the paper, of which only the released code was available: a step after which all weights would be 0 is
skipped, because the ensemble would be undefined. Perturbed images are not clipped to valid pixels. Further departures
are those of ``dense``: all clients take part; the server's BatchNorm uses the mean of the clients' statistics; the pool
is not augmented; the generator has biases before BatchNorm (``norm_bias``); ``start_from`` sets where x starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms import one_shot_models
from fedcommons.algorithms.ensemble import Ensemble, divergence, make, optimizer_of, order, set_training_mode
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.one_shot_models import Lessons, making
from fedcommons.core.algorithm import Facts, Replies, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.features import seen
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.flat_tensors import Flat, Payload
from fedcommons.flat_tensors import data as values
from fedcommons.seeding import generator, seed_for

DECAY = 0.99
"""Factor by which the step size of the ensemble's weights is multiplied in each epoch."""


@dataclass(frozen=True)
class CoBoosting:
    """The server distils an ensemble with learned client weights, on hard and perturbed synthetic images."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_classes=True, distils=True, trains_images=True, sees_statistics=True, waits_for="ensemble",
        repeats={"train_block": "client_epochs", "teach": "server_epochs"},
        grows={"images": 0, "labels": 0, "logits": 1},
    )  # fmt: skip

    warmup_rounds: Annotated[int, "[0, 1e9]"] = 0
    """rounds of FedAvg before the round in which clients send their models"""
    client_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """local epochs of the clients' last training, whose models form the ensemble; default: client.epochs"""
    start_from: Annotated[str, "average | server"] = "average"
    """initial server model of the distillation: mean of the clients' models, or the model sent to clients (server)"""
    server_epochs: Annotated[int, "[1, 1e9]"] = 1
    """epochs of the server in a round (released code: 200 in total)"""
    generator_steps: Annotated[int, "[1, 1e9]"] = 30
    """training steps of the image generator in an epoch"""
    generated: Annotated[int, "[2, 1e6]"] = 64
    """synthetic images that join the server's pool in an epoch; they are one generator batch (released code: 128)"""
    latent: Annotated[int, "[1, 1e6]"] = 256
    """length of the noise vector of a synthetic image"""
    width: Annotated[int, "[1, 1e6]"] = 32
    """channels of the generator's last feature maps; earlier maps have twice that number (released code: 64)"""
    norm_bias: bool = True
    """whether the generator's convolutions before BatchNorm have biases, which have no effect (released code: false)"""
    generator_lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """learning rate of Adam for the generator and its input noise"""
    boundary: Annotated[float, "[0, 1e38]"] = 1.0
    """weight of the generator's reward for divergence between ensemble and server model"""
    boundary_temperature: Annotated[float, "(0, 1e6]"] = 3.0
    """softmax temperature of the divergence between ensemble and server model in the generator's loss"""
    weight_step: Annotated[float, "[0, 1]"] = 0.01
    """step size with which the ensemble's client weights are learned in the first epoch; 0: they stay constant"""
    move: Annotated[float, "[0, 255]"] = 4.0
    """perturbation of each pixel before the distillation, in grey values of 0..255"""
    temperature: Annotated[float, "(0, 1e6]"] = 4.0
    """T, softmax temperature of the distillation"""
    server_batch: Annotated[int, "[1, 1e9]"] = 128
    """synthetic images in a step of the server"""
    server_lr: Annotated[float, "(0, 1e38]"] = 0.01
    """learning rate of the server's SGD"""
    server_momentum: Annotated[float, "[0, 1)"] = 0.9
    """momentum of the server's SGD"""
    server_decay: Annotated[float, "[0, 1e38]"] = 1e-4
    """weight decay of the server's SGD"""
    server_schedule: Annotated[str, "cosine | constant"] = "cosine"
    """schedule of the server's learning rate: half a cosine to 0 over all server epochs, or constant"""
    clip: Annotated[float, "[1e-30, 1e30]"] = 10.0
    """norm to which the gradients of the generator's and of the server model's weights are clipped"""

    check, participants = one_shot_models.check, one_shot_models.participants
    effective_constants = one_shot_models.effective_constants
    down, client = FedAvg.down, one_shot_models.client

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        state = one_shot_models.start(self, model, facts, seed)
        if self.server_schedule == "constant":  # A constant learning rate needs no total number of epochs.
            return state
        return {**state, "in_all": torch.tensor((facts.rounds - self.warmup_rounds) * self.server_epochs)}

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        return one_shot_models.merge(self, teach, executor, state, total, replies, round, seed)

    def score(self, ensemble: Ensemble, weights: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's loss: mean of hardness times cross entropy, minus ``boundary`` times the divergence.

        Hardness: 1 minus the ensemble's probability of the label. Divergence: that of ensemble and student. x:
        generated images as network inputs, (n, C, H, W). labels: (n,). weights: the ensemble's client weights, (N,).
        """
        f = mixed(weights, ensemble.logits(x))
        loss = F.cross_entropy(f, labels, reduction="none")
        hardness = 1 - (-loss.detach()).exp()
        return (hardness * loss - self.boundary * divergence(f, ensemble.student(x), self.boundary_temperature)).mean()

    def reweighed(self, weights: Tensor, logits: Tensor, labels: Tensor, rate: float) -> Tensor:
        """Return the ensemble weights (N,) after one sign-gradient step of length ``rate`` on a batch.

        The step reduces the ensemble's cross entropy; weights stay in [0, 1]. A step that would set all weights to 0 is
        skipped. logits: those of the N clients' models, (N, n, classes). labels: (n,).
        """
        w = weights.requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(mixed(w, logits), labels), w)
        after = (weights.detach() - rate * g.sign()).clamp(0, 1)
        return torch.where(after.sum() > 0, after, weights.detach())

    def moved(self, work: Work, ensemble: Ensemble, weights: Tensor, images: Tensor, u: Tensor) -> Tensor:
        """Return images as network inputs, with each pixel moved by ``move`` grey values to increase u . softmax(f/T).

        f: the ensemble's logits. T: ``temperature``. images: uint8, (n, C, H, W). u: random directions, (n, classes).
        """
        pixels = (images.to(u.dtype) / 255).requires_grad_()
        f = mixed(weights, ensemble.logits(seen(work.module, pixels)))
        (g,) = torch.autograd.grad((u * (f / self.temperature).softmax(1)).sum(), pixels)
        return seen(work.module, pixels.detach() + self.move / 255 * g.sign())

    def distil(
        self,
        work: Work,
        ensemble: Ensemble,
        weights: Tensor,
        images: Tensor,
        velocity: Tensor,
        lr: float,
        batches: Sequence[Tensor],
        u: Tensor,
    ) -> None:
        """Train the student (the module) for one pass over the server's pool, to match the ensemble's logits.

        images: the pool, uint8. weights: the ensemble's client weights, (N,). velocity: momentum buffer, changed in
        place. batches: image indices of each step. u: random directions, (n, classes), see ``moved``.
        """
        optimizer = optimizer_of(work, velocity, lr, self.server_momentum, self.server_decay)
        for rows in batches:
            work.module.eval()
            x = self.moved(work, ensemble, weights, images[rows], u[rows])
            with torch.no_grad():
                f = mixed(weights, ensemble.logits(x))
            set_training_mode(work.module)
            loss = divergence(f, work.module(x), self.temperature).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(work.named.values(), self.clip)
            optimizer.step()
        work.module.train()


def mixed(weights: Tensor, logits: Tensor) -> Tensor:
    """Return the ensemble's logits (n, classes): the mean with ``weights`` (N,) of N models' logits (N, n, classes)."""
    return torch.tensordot(weights / weights.sum(), logits, 1)


def teach(worker: Worker, task: Lessons[CoBoosting], seed: int) -> State:
    """Run the server's epochs of one round on a worker; return the changed entries of the server state."""
    work, how, state = worker.work, task.method, task.state
    with onednn(work.loop.onednn):
        room = one_shot_models.load_models(worker, state)
        images, ensemble, device = room.images, room.ensemble, work.device
        w = values(state.get("learned", state["weights"])).to(device, copy=True)
        labels = (
            values(state["labels"]).to(device)
            if "labels" in state
            else torch.zeros(0, dtype=torch.int64, device=device)
        )
        logits = [values(state["logits"]).to(device)] if "logits" in state else []
        for epoch in range(task.first, task.first + how.server_epochs):
            key, n = seed_for(seed, "epoch", epoch), len(images)
            before = order(n, how.server_batch, seed_for(key, "weights"), device) if n else ()
            batches = order(n + how.generated, how.server_batch, key, device)
            u = 2 * torch.rand(n + how.generated, room.classes, generator=generator(key, "directions")) - 1
            u = u.to(device, w.dtype)
            generated, new_labels = make(
                work, partial(how.score, ensemble, w), making(how, how.clip), room.shape, room.classes, key
            )
            for rows in before:
                w = how.reweighed(w, torch.cat(logits, 1)[:, rows], labels[rows], how.weight_step * DECAY**epoch)
            with torch.no_grad():
                logits.append(ensemble.logits(generated))
            images, labels = torch.cat([images, generated]), torch.cat([labels, new_labels])
            share = (1 + cos(pi * epoch / int(values(state["in_all"])))) / 2 if "in_all" in state else 1.0
            how.distil(work, ensemble, w, images, room.velocity, how.server_lr * share, batches, u)
        learned = {"learned": w, "labels": labels, "logits": torch.cat(logits, 1)}
        return {**one_shot_models.changed_state(work, room, images), **{name: x.cpu() for name, x in learned.items()}}
