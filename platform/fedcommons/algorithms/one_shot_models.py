"""Common code of DENSE and Co-Boosting: clients send their models once after rounds of FedAvg, then the server trains.

x: server model;  y_i: client i's model, trained from x;  w_i: client i's weight. Each client sends y_i - x once, and
the engine sends BatchNorm's statistics with it. For the N clients that replied, in the order of the replies, the state
contains, with P weights and B statistics per model:

    ensemble (N, P): y_i    weights (N,): w_i / sum_j w_j    statistics (N, B)    velocity (P,): momentum of server SGD

It also contains the synthetic ``images``, uint8, that the server has generated so far. If no model arrives, all clients
take part again in the next round. In rounds without clients the server trains (``Lessons``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedcommons.algorithms.ensemble import Ensemble, Making
from fedcommons.core.algorithm import BUFFERS, Algorithm, Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.client_worker import Work
from fedcommons.core.local_training import LocalSGD
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, copy, flat, nbytes, scale, sub
from fedcommons.flat_tensors import data as values

M = TypeVar("M", bound=Algorithm)

MANY = 8
"""Ratio of the larger to the smaller of two batch sizes for which ``--dry-run`` measures the duration of a step."""


def check(name: str, warmup_rounds: int, rounds: int, participation: float, buffers: str) -> None:
    """Check that all clients can send their models once. name: the method's name in messages.

    Raises:
        UserError: no round follows the warm-up, clients are sampled, or clients keep their buffers.
    """
    if warmup_rounds >= rounds:
        raise UserError(
            f"{name}.warmup_rounds must be below federation.rounds = {rounds}, got {warmup_rounds}: the server "
            "trains after these rounds."
        )
    if participation < 1:
        raise UserError(
            f"{name} needs federation.participation 1, got {participation:g}: its ensemble needs all clients' models."
        )
    if buffers == "keep":
        raise UserError(f"{name} needs federation.buffers average: the server evaluates clients' models.")


def start(model: Flat, facts: Facts) -> State:
    """Return the state before round 1: the model and the number of clients."""
    return {"model": model, "clients": torch.tensor(facts.n_clients)}


def participants(state: State, warmup_rounds: int, round: int) -> Sequence[int]:
    """Return all clients until at least one model has arrived, then no client."""
    is_over = round > warmup_rounds + 1 and "ensemble" in state
    return range(0 if is_over else int(values(state["clients"])))


def reply(work: Work, message: Message, data: ClientData, seed: int, epochs: int | None) -> Reply:
    """Train locally for ``epochs`` epochs (None: client.epochs) and return a reply with the model update."""
    x, w = flat(message.common, "model"), work.weight(data)
    loop = work.loop if epochs is None else replace(work.loop, epochs=epochs)
    y, metrics, spent = loop.run(work, x, data, seed)
    delta = sub(y, x)
    return Reply(
        {"delta": scale(delta, w)}, {"delta": delta}, weight=w, metrics=metrics, releases=[spent.with_names("delta")]
    )


def store_models(state: State, total: Payload, replies: Replies, average: bool) -> State:
    """Return the state with all received models; average: whether the server model becomes their weighted mean."""
    if not replies:
        return state
    x, w = flat(state, "model"), torch.tensor([r.weight for r in replies.values()], dtype=torch.float64)
    sent = [r.each for r in replies.values()]
    statistics = [values(each[BUFFERS]) for each in sent if BUFFERS in each]
    return {
        **state,
        "model": weighted_mean(x, total, replies) if average else x,
        "ensemble": torch.stack([add(x, flat(each, "delta")).buffer for each in sent]),
        "weights": (w / w.sum()).to(x.buffer.dtype),
        "statistics": torch.stack(statistics) if statistics else torch.zeros(len(sent), 0),
        "velocity": torch.zeros_like(x.buffer),
    }


@dataclass(frozen=True)
class Lessons(Generic[M]):
    """The server's training task in a round; first: number of the server's epochs in earlier rounds."""

    state: State
    method: M
    first: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.state)


@dataclass(frozen=True)
class Classroom:
    """The server's training state on a worker, whose module is the student (the server model)."""

    ensemble: Ensemble
    weights: Tensor  # weights of the N clients, (N,), with sum 1
    images: Tensor  # synthetic images, uint8 (n, C, H, W)
    velocity: Tensor  # momentum buffer of the server's SGD, one number per weight; training changes it
    shape: tuple[int, ...]
    classes: int


def load_models(worker: Worker, state: State) -> Classroom:
    """Load the student and the clients' models on the worker and return the training state."""
    work, shape = worker.work, tuple(worker.data.clients.store.x.shape[1:])
    w = values(state["weights"])
    statistics = values(state["statistics"])
    if not statistics.shape[1]:  # No client has sent statistics: use the initial statistics.
        statistics = work.initial_buffers.buffer.expand(len(w), -1)
    mean = (w[:, None].double().to(statistics.device) * statistics).sum(0).to(work.buffers.buffer)
    work.load(Flat(work.params.layout, flat(state, "model").buffer.to(work.device)))
    work.load_buffers(Flat(work.buffers.layout, mean))
    work.module.eval()
    ensemble = Ensemble(work, values(state["ensemble"]), statistics)
    images = values(state["images"]) if "images" in state else torch.zeros((0, *shape), dtype=torch.uint8)
    with torch.no_grad():
        blank = torch.zeros((2, *shape), dtype=torch.uint8, device=work.device)
        classes = ensemble.student(blank).shape[1]
    return Classroom(
        ensemble, w.to(work.device), images.to(work.device), values(state["velocity"]).to(work.device, copy=True),
        shape, classes,
    )  # fmt: skip


def changed_state(work: Work, room: Classroom, images: Tensor) -> State:
    """Return the state's entries that training has changed, on the CPU: model, synthetic images, momentum buffer."""
    student = Flat(work.params.layout, copy(work.params).buffer.detach().cpu())
    return {"model": student, "images": images.cpu(), "velocity": room.velocity.cpu()}


def local_pieces(
    facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int], warmup_rounds: int, epochs: int | None
) -> Mapping[str, float]:
    """Return by how many examples the clients' last local training exceeds a training with client.epochs.

    epochs: local epochs of the last training; None: client.epochs, so the result is {}.
    """
    if epochs is None:
        return {}
    more = max(0, epochs - loop.epochs) if round > warmup_rounds else 0
    return {"local_examples": more * sum(facts.sizes[client] for client in clients)}


def epochs_of(round: int, warmup_rounds: int, epochs: int) -> range:
    """Return which server epochs run in a round, numbered from 0 after the warm-up; epochs: server epochs per round."""
    last = (round - warmup_rounds) * epochs
    return range(max(0, last - epochs), max(0, last))


def server_pieces(facts: Facts, epochs: range, making: Making, batch: int, passes: int) -> Mapping[str, float]:
    """Return the numbers of generator steps, of images in them, of server steps and of passes, for ``--dry-run``.

    A pass is a forward pass, or a backward pass to the image or weights, of one image. A generator step makes two
    passes per network; the ensemble makes one pass over each new batch of the pool. epochs: numbers of the round's
    epochs. batch: images per server step. passes: passes of an image of the pool per epoch.
    """
    pools, images = [(epoch + 1) * making.images for epoch in epochs], making.steps * making.images
    once = 2 * (facts.n_clients + 1) * images + facts.n_clients * making.images
    return {
        "generator_steps": making.steps * len(epochs),
        "generator_images": images * len(epochs),
        "server_steps": sum(-(-n // batch) for n in pools),
        "passes": once * len(epochs) + passes * sum(pools),
    }
