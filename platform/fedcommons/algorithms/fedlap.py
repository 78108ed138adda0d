"""FedLAP and FedLAP-DP: clients send synthetic images whose gradients stand for those of their real images.

Wang, Chen, Kerkouche, Fritz, "FedLAP-DP: Federated learning by sharing differentially private loss approximations",
PoPETs 2024(3), arXiv:2302.01068: local approximation, global optimisation, record-level differential privacy.
x: server model;  w: weights on a trajectory that starts at x;  r: ``radius``;  D_k, S_k: client k's real and synthetic
images, N_k real ones of N;  L(w, D): mean loss on the images D;  C, sigma: clipping norm and noise multiplier;  B:
``match_batch``.

Client k begins with noise S_k and repeats R times (``trajectories``), T times (``steps``) on each trajectory from x:

    g    <- ( sum_j g_j min(1, C/||g_j||) + N(0, sigma^2 C^2 I) ) / min(B, N_k)   over a Poisson batch of D_k
    S_k  <- S_k - image_lr grad_S L_dis(g, grad L(w, S_k))              ``image_steps`` times
    w    <- w - eta grad L(w, S_k)                                      ``local_steps`` times, then w <- P(w)

g_j: grad L(w, j) on example j.  P: projection onto the ball ||w - x|| <= r.  L_dis: sum over parameters of the mean of
1 - cos over output units, plus ``mse`` times the squared distance. The server makes gradient steps
w <- w - eta sum_k N_k/N grad L(w, S_k)  from x, and stops at ||w - x|| = r. Clients have not fitted the S_k outside of
this ball.

Privacy: with ``dp.local``, each g is a Gaussian mechanism on a Poisson sample, and everything else is computed from the
g's. The privacy ledger charges R T of them per round, at sampling rate B/N_k. Each client adds its own noise, so the
epsilon holds against the server, other clients and all of them together. It needs ``classes`` all, because images of
a client's own classes show the classes. Images of a user-defined model are uncovered, because the model may store real
examples, such as in a metric, and read them in the next steps on S_k, which have no noise. Without ``dp.local``
(FedLAP), g is the gradient of a random batch, without guarantee.

Departs from the paper: r is public. In the paper, clients without noise choose r by their loss on real images, which an
epsilon would have to count; with noise, the authors' code has a constant r, too. A trajectory has T points, so that the
number of noisy gradients is known before the run; at the radius it is projected, and does not end. The authors' code
has 10 batches per point and a cosine decay of eta; here a point has one batch, and eta is constant. S_k begins with
noise in each round, not with real images or the last S_k. The server's last step is shortened to the radius. Networks
are in evaluation mode, and images are not augmented. ``federation.weighting`` sets the weights of clients: by default
uniform; with samples, they are N_k/N.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcommons.algorithms import fedlap_matching
from fedcommons.algorithms.ball import project
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import Facts, Message, Replies, Reply, State
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import NO_CONTEXT, onednn
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, flat
from fedcommons.flat_tensors import data as data_of
from fedcommons.seeding import keyed_besides_torch, set_default_generator


@dataclass(frozen=True)
class FedLAP:
    """Clients fit images to (private) gradients along a short trajectory; the server descends the images' loss.

    w <- w - eta sum_k N_k/N grad L(w, S_k), until ||w - x|| = r.  x: server model;  S_k: client k's synthetic images.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        computes_inputs=True, needs_classes=True, refuses_batch_norm=True, trains_locally=False,
        repeats={"train_block": "trajectories", "descend": "server_steps"},
    )  # fmt: skip

    radius: Annotated[float, "(0, 1e38]"] = 1.5
    """r, largest distance of trajectories and of the server's steps from the server model (authors: 1.5 with noise)"""
    ipc: Annotated[int, "[1, 1e6]"] = 10
    """synthetic images per class"""
    classes: Annotated[str, "own | all"] = "own"
    """classes of a client's synthetic images: its own, which no epsilon covers, or all (dp.local needs it)"""
    trajectories: Annotated[int, "[1, 1e6]"] = 2
    """R, trajectories per round that a client begins at the server model (authors: 4 with noise, 1 without)"""
    steps: Annotated[int, "[1, 1e6]"] = 5
    """T, points on a trajectory, each with a batch of real images (authors: 5 points with 10 batches each)"""
    image_steps: Annotated[int, "[1, 1e6]"] = 5
    """SGD steps on the pixels per batch of real images"""
    local_steps: Annotated[int, "[0, 1e6]"] = 2
    """gradient steps on the synthetic images to the next point of a trajectory"""
    match_batch: Annotated[int, "[1, 1e9]"] = 256
    """B, (expected) number of real images in a batch"""
    image_lr: Annotated[float, "(0, 1e38]"] = 1.0
    """learning rate of SGD on the pixels, with momentum 0.5 (authors: 100)"""
    mse: Annotated[float, "[0, 1e38]"] = 0.0
    """weight of the squared distance of gradients in the matching loss (authors: 0.1, with noise 0)"""
    model_lr: Annotated[float, "(0, 1e38]"] = 0.1
    """eta, learning rate of trajectories and of the server (authors: 0.1, with noise 0.002)"""
    server_steps: Annotated[int, "[1, 1e9]"] = 100
    """largest number of gradient steps of the server in a round"""

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields["dp.local"] and self.classes == "own":
            raise UserError("fedlap with dp.local needs fedlap.classes all: no epsilon covers a client's own classes.")

    def noisy_steps(self) -> tuple[int, int]:
        """Return (batch size, noisy gradients per round) of a client with DP-SGD, for ``dp.target_epsilon``."""
        return self.match_batch, self.trajectories * self.steps

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, **({"all": torch.arange(facts.n_classes or 0)} if self.classes == "all" else {})}

    def down(self, state: State, round: int, client: int) -> Message:
        return Message({name: state[name] for name in ("model", "all") if name in state})

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        labels = data_of(message.common["all"]) if "all" in message.common else data.y.unique()
        x = flat(message.common, "model")
        images, loss, spent = fedlap_matching.synthesise(work, x, data, labels.repeat_interleave(self.ipc), self, seed)
        sent = {"images": images.unflatten(0, (len(labels), -1))}
        if self.classes == "own":
            sent["labels"] = labels
            if spent.covered:
                spent = replace(spent, mechanism=None, reason="they follow the client's classes")
        spent = replace(spent, what=tuple(sent), n_disclosed=len(data), commons=True)
        return Reply(each=sent, weight=work.weight(data), metrics={"loss": loss}, releases=[spent])

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        """Return the next state, with the round's synthetic ``images`` and ``labels`` for inspection."""
        images = [data_of(reply.each["images"]) for reply in replies.values()]
        labels = [data_of(state["all"] if "all" in state else reply.each["labels"]) for reply in replies.values()]
        n = torch.tensor([reply.weight for reply in replies.values()], dtype=torch.float64)
        synthetic: dict[str, Flat | Tensor] = {
            "images": torch.cat([x.flatten(0, 1) for x in images]),
            "labels": torch.cat([y.repeat_interleave(self.ipc) for y in labels]),
        }
        sizes = torch.tensor([x.shape[0] * x.shape[1] for x in images])
        payload = {"model": state["model"], **synthetic, "sizes": sizes, "shares": n / n.sum()}
        after = executor.map(descend, ServerTask(self, payload, round), [seed])[0]
        return {**state, **synthetic, "model": after}


def descend(worker: Worker, task: ServerTask[FedLAP], seed: int) -> Flat:
    """Make gradient steps from the server model x down the clients' surrogate losses, up to the radius; return w.

    The task has the ``model``, ``images`` and ``labels`` of all clients, one client after another, and per client the
    number of images (``sizes``) and N_k/N (``shares``). ``seed`` keys random draws of the module.
    """
    work, how, payload = worker.work, task.method, task.payload
    x, sizes = data_of(payload["model"]).to(work.device), data_of(payload["sizes"]).tolist()
    images, labels = (data_of(payload[name]).to(work.device).split(sizes) for name in ("images", "labels"))
    clients = list(zip(images, labels, data_of(payload["shares"]).tolist(), strict=True))
    work.load(flat(payload, "model"))
    work.module.eval()
    set_default_generator(seed, "random layers")
    optimizer, w = torch.optim.SGD(work.named.values(), how.model_lr), work.params.buffer
    stopped = torch.zeros((), dtype=torch.bool, device=work.device)
    with work.logged, onednn(work.loop.onednn), keyed_besides_torch(seed) if work.has_user_code else NO_CONTEXT:
        for step in range((task.round - 1) * how.server_steps, task.round * how.server_steps):
            work.clock.set(task.round, step, step)
            optimizer.zero_grad()
            for s_k, y_k, share in clients:
                loss = work.loss((s_k, y_k))
                (share * loss).backward()
            before = w.clone()
            optimizer.step()
            reached = torch.linalg.vector_norm(w - x) >= how.radius
            project(w, x, how.radius)
            w.copy_(torch.where(stopped, before, w))
            stopped = stopped | reached
            if work.device.type == "cpu" and stopped:  # on a GPU, this question would wait for the step
                break
    return Flat(work.params.layout, w.detach().cpu().clone())
