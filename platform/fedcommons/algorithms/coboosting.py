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
from dataclasses import dataclass, replace
from functools import partial
from math import cos, pi
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.ensemble import Ensemble, divergence, make, optimizer_of, order, set_training_mode
from fedcommons.algorithms.one_shot_models import Classroom, OneShotModels
from fedcommons.core.algorithm import Facts, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.features import seen
from fedcommons.flat_tensors import Flat, scalar
from fedcommons.seeding import generator, seed_for

DECAY = 0.99
"""Factor by which the step size of the ensemble's weights is multiplied in each epoch."""


@dataclass(frozen=True)
class CoBoosting(OneShotModels):
    """The server distils an ensemble with learned client weights, on hard and perturbed synthetic images."""

    capabilities: ClassVar[Capabilities] = replace(
        OneShotModels.capabilities, grows={"images": 0, "labels": 0, "logits": 1}
    )

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

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        state = OneShotModels.start(self, model, facts, seed)
        if self.server_schedule == "constant":  # A constant learning rate needs no total number of epochs.
            return state
        return {**state, "in_all": torch.tensor((facts.rounds - self.warmup_rounds) * self.server_epochs)}

    def epoch(self, room: Classroom, epoch: int, seed: int) -> None:
        n, device, ensemble, entries = room.n_images, room.work.device, room.ensemble, room.entries
        w = entries.get("learned", room.weights)
        before = order(n, self.server_batch, seed_for(seed, "weights"), device) if n else ()
        batches = order(n + self.generated, self.server_batch, seed, device)
        u = 2 * torch.rand(n + self.generated, room.classes, generator=generator(seed, "directions")) - 1
        u = u.to(device, w.dtype)
        generated, labels = make(room, self, partial(self.score, ensemble, w), seed, self.clip)
        for rows in before:
            step = self.weight_step * DECAY**epoch
            w = self.reweighed(w, entries["logits"][:, rows], entries["labels"][rows], step)
        images, entries["learned"] = room.join("images", generated), w
        room.join("labels", labels)
        with torch.no_grad():
            room.join("logits", ensemble.logits(generated), 1)
        share = (1 + cos(pi * epoch / int(scalar(room.state, "in_all")))) / 2 if "in_all" in room.state else 1.0
        self.distil(room, w, images, self.server_lr * share, batches, u)

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
        w = weights.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(F.cross_entropy(mixed(w, logits), labels), w)
        after = (weights - rate * g.sign()).clamp(0, 1)
        return torch.where(after.sum() > 0, after, weights)

    def moved(self, room: Classroom, weights: Tensor, images: Tensor, u: Tensor) -> Tensor:
        """Return images as network inputs, with each pixel moved by ``move`` grey values to increase u . softmax(f/T).

        f: the ensemble's logits. T: ``temperature``. images: uint8, (n, C, H, W). u: random directions, (n, classes).
        """
        module, pixels = room.work.module, (images.to(u.dtype) / 255).requires_grad_()
        f = mixed(weights, room.ensemble.logits(seen(module, pixels)))
        (g,) = torch.autograd.grad((u * (f / self.temperature).softmax(1)).sum(), pixels)
        return seen(module, pixels.detach() + self.move / 255 * g.sign())

    def distil(
        self, room: Classroom, weights: Tensor, images: Tensor, lr: float, batches: Sequence[Tensor], u: Tensor
    ) -> None:
        """Train the student (the module) for one pass over the server's pool, to match the ensemble's logits.

        images: the pool, uint8. weights: the ensemble's client weights, (N,). batches: image indices of each step. u:
        random directions, (n, classes), see ``moved``.
        """
        work = room.work
        optimizer = optimizer_of(work, room.velocity, lr, self.server_momentum, self.server_decay)
        for rows in batches:
            work.module.eval()
            x = self.moved(room, weights, images[rows], u[rows])
            with torch.no_grad():
                f = mixed(weights, room.ensemble.logits(x))
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
