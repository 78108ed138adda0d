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
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcommons.algorithms.ensemble import Ensemble, divergence, make, optimizer_of, order, set_training_mode
from fedcommons.algorithms.one_shot_models import Classroom, OneShotModels
from fedcommons.core.capabilities import Capabilities


@dataclass(frozen=True)
class DENSE(OneShotModels):
    """The server distils the ensemble of the clients' models into its own model, on generated images."""

    capabilities: ClassVar[Capabilities] = replace(OneShotModels.capabilities, grows={"images": 0, "targets": 0})

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

    def epoch(self, room: Classroom, epoch: int, seed: int) -> None:
        # The order includes the batch that ``make`` generates next.
        batches = order(room.n_images + self.generated, self.server_batch, seed, room.work.device)
        generated, _ = make(room, self, partial(self.score, room.ensemble, room.weights), seed)
        with torch.no_grad():
            targets = torch.tensordot(room.weights, room.ensemble.logits(generated), 1)
        self.distil(room, room.join("images", generated), room.join("targets", targets), batches)

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

    def distil(self, room: Classroom, images: Tensor, targets: Tensor, batches: Sequence[Tensor]) -> None:
        """Train the student for one pass over the pool ``images``, to match the ensemble's logits ``targets``.

        batches: image indices of each step.
        """
        module = room.work.module
        set_training_mode(module)
        optimizer = optimizer_of(room.work, room.velocity, self.server_lr, self.server_momentum)
        for rows in batches:
            loss = divergence(targets[rows], module(images[rows]), self.temperature).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        module.train()
