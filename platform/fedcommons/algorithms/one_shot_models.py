"""Clients send their whole models once, after rounds of FedAvg; afterwards the server trains alone, on what it keeps.

y_i: client i's model, trained from the server model x;  w_i: its weight. y_i - x travels, once, and with it BatchNorm's
statistics, by the engine. The state keeps of the clients that replied, one after another:

    ensemble (N, P): y_i    weights (N,): w_i / sum_j w_j    statistics (N, B)    velocity (P,): of the server's SGD

and of the server's work ``images``, uint8, made so far. Where nobody's model came, all are asked again in the next
round. Rounds in which nobody takes part train (``Lessons``).
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
"""How many times as much the larger of two batches has through which a price's line goes."""


def check(name: str, warmup_rounds: int, rounds: int, participation: float, buffers: str) -> None:
    """Refuse an experiment in which not all clients send their models once.

    Raises:
        UserError: it is one.
    """
    if warmup_rounds >= rounds:
        raise UserError(
            f"{name}.warmup_rounds must be below federation.rounds = {rounds}, got {warmup_rounds}: the server "
            "trains from the round after them."
        )
    if participation < 1:
        raise UserError(
            f"{name} needs federation.participation 1, got {participation:g}: its ensemble is of all clients' models."
        )
    if buffers == "keep":
        raise UserError(f"{name} needs federation.buffers average: the server evaluates clients' models.")


def start(model: Flat, facts: Facts) -> State:
    """The state before round 1."""
    return {"model": model, "clients": torch.tensor(facts.n_clients)}


def participants(state: State, warmup_rounds: int, round: int) -> Sequence[int]:
    """All clients until models have come, at least one, then nobody."""
    is_over = round > warmup_rounds + 1 and "ensemble" in state
    return range(0 if is_over else int(values(state["clients"])))


def reply(work: Work, message: Message, data: ClientData, seed: int, epochs: int | None) -> Reply:
    """A client's whole model, y_i - x, after so many epochs; None: as many as in other rounds."""
    x, w = flat(message.common, "model"), work.weight(data)
    loop = work.loop if epochs is None else replace(work.loop, epochs=epochs)
    y, metrics, spent = loop.run(work, x, data, seed)
    delta = sub(y, x)
    return Reply({"delta": scale(delta, w)}, {"delta": delta}, weight=w, metrics=metrics, releases=[spent.of("delta")])


def kept(state: State, total: Payload, replies: Replies, average: bool) -> State:
    """The state with all models that have come; average: x becomes their mean."""
    if not replies:
        return state
    x, w = flat(state, "model"), torch.tensor([one.weight for one in replies.values()], dtype=torch.float64)
    sent = [one.each for one in replies.values()]
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
    """A round of the server: its state, the method, and the number of epochs before."""

    state: State
    method: M
    first: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.state)


@dataclass(frozen=True)
class Classroom:
    """What a worker holds of the server while it trains: the student is in its module."""

    ensemble: Ensemble
    weights: Tensor  # (N,)
    images: Tensor  # (n, C, H, W)
    velocity: Tensor  # (P,), which training changes
    shape: tuple[int, ...]
    classes: int


def enter(worker: Worker, state: State) -> Classroom:
    """Load the student and the clients' models."""
    work, shape = worker.work, tuple(worker.data.clients.store.x.shape[1:])
    w = values(state["weights"])
    statistics = values(state["statistics"])
    if not statistics.shape[1]:  # no BatchNorm, or clients keep its statistics
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


def left(work: Work, room: Classroom, images: Tensor) -> State:
    """What is kept of the server's training, on the CPU."""
    student = Flat(work.params.layout, copy(work.params).buffer.detach().cpu())
    return {"model": student, "images": images.cpu(), "velocity": room.velocity.cpu()}


def local_pieces(
    facts: Facts, loop: LocalSGD, round: int, clients: Sequence[int], warmup_rounds: int, epochs: int | None
) -> Mapping[str, float]:
    """Examples in the last training's epochs beyond those of other rounds; none where it has no number of its own."""
    if epochs is None:
        return {}
    more = max(0, epochs - loop.epochs) if round > warmup_rounds else 0
    return {"local_examples": more * sum(facts.sizes[client] for client in clients)}


def epochs_of(round: int, warmup_rounds: int, epochs: int) -> range:
    """The server's epochs in a round of so many, counted from 0; none while clients warm up."""
    last = (round - warmup_rounds) * epochs
    return range(max(0, last - epochs), max(0, last))


def server_pieces(facts: Facts, epochs: range, making: Making, batch: int, passes: int) -> Mapping[str, float]:
    """Steps and images of the generator, steps of the server, and passes of an image through a network, for dry runs.

    A pass is a forward pass, or a backward one to the image or to the weights. A step of the generator makes two with
    each network; the ensemble looks once at what is kept. passes: of an image of the pool, in an epoch.
    """
    pools, made = [(epoch + 1) * making.images for epoch in epochs], making.steps * making.images
    once = 2 * (facts.n_clients + 1) * made + facts.n_clients * making.images
    return {
        "generator_steps": making.steps * len(epochs),
        "generator_images": made * len(epochs),
        "server_steps": sum(-(-n // batch) for n in pools),
        "passes": once * len(epochs) + passes * sum(pools),
    }
