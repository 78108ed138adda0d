"""Common code of DENSE and Co-Boosting: clients send their models once after rounds of FedAvg, then the server trains.

x: server model;  y_i: client i's model, trained from x;  w_i: client i's weight. Each client sends y_i - x once, and
the engine adds BatchNorm's statistics to this reply. For N replies, in their order, and for models with P weights and B
statistics of BatchNorm, the server's state then has these entries:

    ensemble (N, P): y_i    weights (N,): w_i / sum_j w_j    statistics (N, B)    velocity (P,): momentum of server SGD
    images: the synthetic images, uint8, that the server has generated so far

If no model arrives, all clients take part again in the next round. In rounds without clients, only the server trains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from fedcommons.algorithms.ensemble import Ensemble, Making
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import BUFFERS, Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, copy, flat, nbytes, scale, sub
from fedcommons.flat_tensors import data as values

if TYPE_CHECKING:
    from fedcommons.algorithms.coboosting import CoBoosting
    from fedcommons.algorithms.dense import DENSE


M = TypeVar("M", bound="DENSE | CoBoosting")


@dataclass(frozen=True)
class Lessons(Generic[M]):
    """The server's training task in a round; first: number of the server's epochs in earlier rounds."""

    state: State
    method: M
    first: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.state)


def check(self: "DENSE | CoBoosting", fields: Mapping[str, Any]) -> None:
    """Check that a round follows the warm-up, in which all clients send models with BatchNorm's statistics."""
    name, rounds = type(self).__name__.lower(), fields["federation.rounds"]
    if self.warmup_rounds >= rounds:
        raise UserError(
            f"{name}.warmup_rounds must be below federation.rounds = {rounds}, got {self.warmup_rounds}: the server "
            "trains after these rounds."
        )
    if (participation := fields["federation.participation"]) < 1:
        raise UserError(
            f"{name} needs federation.participation 1, got {participation:g}: its ensemble needs all clients' models."
        )
    if fields["federation.buffers"] == "keep":
        raise UserError(f"{name} needs federation.buffers average: the server evaluates clients' models.")


def effective_constants(self: "DENSE | CoBoosting", model: Flat, facts: Facts, epochs: int) -> dict[str, int]:
    """Return the ``client_epochs`` that a run uses: the option, or ``epochs`` (client.epochs) if the option is None."""
    return {"client_epochs": self.client_epochs or epochs}


def start(self: object, model: Flat, facts: Facts, seed: int) -> State:
    return {"model": model, "clients": torch.tensor(facts.n_clients)}


def participants(self: "DENSE | CoBoosting", state: State, round: int) -> Sequence[int]:
    """Return all clients until at least one model has arrived, then no client."""
    is_over = round > self.warmup_rounds + 1 and "ensemble" in state
    return range(0 if is_over else int(values(state["clients"])))


def client(
    self: "DENSE | CoBoosting", work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int
) -> Reply:
    """Train and reply as in FedAvg; after the warm-up, also send the update y_i - x outside of the sum."""
    if round <= self.warmup_rounds:
        return FedAvg.client(self, work, message, memory, data, round, seed)
    x, w = flat(message.common, "model"), work.weight(data)
    loop = work.loop if self.client_epochs is None else replace(work.loop, epochs=self.client_epochs)
    y, metrics, spent = loop.run(work, x, data, seed)
    delta = sub(y, x)
    return Reply(
        {"delta": scale(delta, w)}, {"delta": delta}, weight=w, metrics=metrics, releases=[spent.with_names("delta")]
    )


def merge(
    self: "DENSE | CoBoosting",
    teach: Callable[..., State],
    executor: Executor,
    state: State,
    total: Payload,
    replies: Replies,
    round: int,
    seed: int,
) -> State:
    """In the warm-up, average as in FedAvg; afterwards, store received models and train the server by ``teach``."""
    if round <= self.warmup_rounds:
        return {**state, "model": weighted_mean(flat(state, "model"), total, replies)}
    new_state = store_models(state, total, replies, self.start_from == "average")
    first = (round - self.warmup_rounds - 1) * self.server_epochs
    return {**new_state, **executor.map(teach, Lessons(new_state, self, first), [seed])[0]}


def store_models(state: State, total: Payload, replies: Replies, average: bool) -> State:
    """Return the state with all received models; average: whether the server model becomes the models' mean."""
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


def making(self: "DENSE | CoBoosting", clip: float | None = None) -> Making:
    """Return the constants of the image generator's training; clip: see ``Making``."""
    how = self.generated, self.latent, self.width, self.generator_steps, self.generator_lr
    return Making(*how, clip, self.norm_bias)
