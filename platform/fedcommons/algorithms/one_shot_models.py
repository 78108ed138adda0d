"""Common code of DENSE and Co-Boosting: clients send their models once after rounds of FedAvg, then the server trains.

x: server model;  y_i: client i's model, trained from x;  w_i: client i's weight. Each client sends y_i - x once, and
the engine adds BatchNorm's statistics to this reply. For N replies, in their order, and for models with P weights and B
statistics of BatchNorm, the server's state then has these entries:

    ensemble (N, P): y_i    weights (N,): w_i / sum_j w_j    statistics (N, B)    velocity (P,): momentum of server SGD
    images: the synthetic images, uint8, that the server has generated so far, and entries of the method (``entries``)

If no model arrives, all clients take part again in the next round. In rounds without clients, only the server trains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcommons.algorithms.ensemble import Ensemble
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.algorithm import BUFFERS, Facts, Message, Replies, Reply, State
from fedcommons.core.averaging import weighted_mean
from fedcommons.core.capabilities import Capabilities
from fedcommons.core.client_worker import Work
from fedcommons.core.executor import Executor
from fedcommons.core.local_training import onednn
from fedcommons.core.worker import Worker
from fedcommons.data.clients import ClientData
from fedcommons.errors import UserError
from fedcommons.flat_tensors import Flat, Payload, add, copy, flat, scalar, scale, sub
from fedcommons.flat_tensors import data as values
from fedcommons.seeding import seed_for


@dataclass(frozen=True)
class OneShotModels:
    """Constants of both methods, and the functions that both methods have; ``epoch`` is the part that differs."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        needs_classes=True, distils=True, trains_images=True, sees_statistics=True, waits_for="ensemble",
        repeats={"train_block": "client_epochs", "teach": "server_epochs"},
    )  # fmt: skip

    warmup_rounds: Annotated[int, "[0, 1e9]"] = 0
    """rounds of FedAvg before the round in which clients send their models (Fedssyn's comparison: 10)"""
    client_epochs: Annotated[int | None, "[1, 1e9]"] = None
    """local epochs of the clients' last training, whose models form the ensemble; default: client.epochs"""
    start_from: Annotated[str, "average | server"] = "average"
    """initial server model of the distillation: mean of the clients' models, or the model sent to clients (server)"""
    server_epochs: Annotated[int, "[1, 1e9]"] = 1
    """epochs of the server in a round (DENSE's paper and Co-Boosting's code: 200 in total)"""
    generator_steps: Annotated[int, "[1, 1e9]"] = 30
    """training steps of the image generator in an epoch"""
    generated: Annotated[int, "[2, 1e6]"] = 64
    """synthetic images that join the server's pool in an epoch, one generator batch (DENSE: 256, Co-Boosting: 128)"""
    latent: Annotated[int, "[1, 1e6]"] = 256
    """length of the noise vector of a synthetic image"""
    width: Annotated[int, "[1, 1e6]"] = 32
    """channels of the generator's last feature maps; earlier maps have twice that number (authors of both: 64)"""
    norm_bias: bool = True
    """whether the generator's convolutions before BatchNorm have biases, which have no effect (released code: false)"""
    generator_lr: Annotated[float, "(0, 1e38]"] = 1e-3
    """learning rate of Adam for the generator and its input noise"""

    def epoch(self, room: "Classroom", epoch: int, seed: int) -> None:
        """Run an epoch of the server: add synthetic images to ``room.entries`` and train the student.

        epoch: number of the epoch, from 0, over all rounds. seed: seed for all random numbers of this epoch.
        """
        raise NotImplementedError

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that a round follows the warm-up, in which all clients send models with BatchNorm's statistics."""
        name, rounds = type(self).__name__.lower(), fields["federation.rounds"]
        if self.warmup_rounds >= rounds:
            raise UserError(
                f"{name}.warmup_rounds must be below federation.rounds = {rounds}, got {self.warmup_rounds}."
            )
        if (share := fields["federation.participation"]) < 1:
            raise UserError(f"{name} needs federation.participation 1, got {share:g}: all clients send models once.")
        if fields["federation.buffers"] == "keep":
            raise UserError(f"{name} needs federation.buffers average: the server evaluates clients' models.")

    def effective_constants(self, model: Flat, facts: Facts, epochs: int) -> dict[str, int]:
        """Return the ``client_epochs`` that a run uses: the option, or ``epochs`` (client.epochs) if it is None."""
        return {"client_epochs": self.client_epochs or epochs}

    def start(self, model: Flat, facts: Facts, seed: int) -> State:
        return {"model": model, "clients": torch.tensor(facts.n_clients)}

    def participants(self, state: State, round: int) -> Sequence[int]:
        """Return all clients until at least one model has arrived, then no client."""
        is_over = round > self.warmup_rounds + 1 and "ensemble" in state
        return range(0 if is_over else int(scalar(state, "clients")))

    down = FedAvg.down

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        """Train and reply as in FedAvg; after the warm-up, also send the update y_i - x outside of the sum."""
        if round <= self.warmup_rounds:
            return FedAvg.client(self, work, message, memory, data, round, seed)
        x, w = flat(message.common, "model"), work.weight(data)
        loop = work.loop if self.client_epochs is None else replace(work.loop, epochs=self.client_epochs)
        y, metrics, spent = loop.run(work, x, data, seed)
        delta, releases = sub(y, x), [spent.with_names("delta")]
        return Reply({"delta": scale(delta, w)}, {"delta": delta}, weight=w, metrics=metrics, releases=releases)

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        """In the warm-up, average as in FedAvg; afterwards, store received models and train the server."""
        if round <= self.warmup_rounds:
            return {**state, "model": weighted_mean(flat(state, "model"), total, replies)}
        new_state = store_models(state, total, replies, self.start_from == "average")
        return {**new_state, **executor.map(teach, ServerTask(self, new_state, round), [seed])[0]}


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

    work: Work
    ensemble: Ensemble
    state: State
    weights: Tensor  # weights of the N clients, (N,), with sum 1
    velocity: Tensor  # momentum buffer of the server's SGD, one number per weight; training changes it
    shape: tuple[int, ...]  # (C, H, W) of an image
    classes: int
    entries: dict[str, Tensor]  # entries of the state that epochs change, such as ``images``, uint8 (n, C, H, W)

    @property
    def n_images(self) -> int:
        """Number of synthetic images in the server's pool."""
        return len(self.entries.get("images", ()))

    def join(self, name: str, values: Tensor, axis: int = 0) -> Tensor:
        """Append ``values`` to the entry ``name``, create the entry if it does not exist, and return it."""
        before = [self.entries[name]] if name in self.entries else []
        self.entries[name] = torch.cat([*before, values], axis)
        return self.entries[name]


def teach(worker: Worker, task: ServerTask[OneShotModels], seed: int) -> State:
    """Run the server's epochs of one round on a worker; return the changed entries of the server state."""
    work, how = worker.work, task.method
    first = (task.round - how.warmup_rounds - 1) * how.server_epochs
    with onednn(work.loop.onednn):
        room = load_models(worker, task)
        for epoch in range(first, first + how.server_epochs):
            how.epoch(room, epoch, seed_for(seed, "epoch", epoch))
    changed = {"velocity": room.velocity, **room.entries}
    student = Flat(work.params.layout, copy(work.params).buffer.detach().cpu())
    return {"model": student, **{name: x.cpu() for name, x in changed.items()}}


def load_models(worker: Worker, task: ServerTask[Any]) -> Classroom:
    """Load the student and the clients' models on the worker and return the training state."""
    work, state, x = worker.work, task.payload, worker.data.clients.store.x
    w = values(state["weights"])
    statistics = values(state["statistics"])
    if not statistics.shape[1]:  # No client has sent statistics: use the initial statistics.
        statistics = work.initial_buffers.buffer.expand(len(w), -1)
    mean = (w[:, None].double().to(statistics.device) * statistics).sum(0).to(work.buffers.buffer)
    work.load(Flat(work.params.layout, flat(state, "model").buffer.to(work.device)))
    work.load_buffers(Flat(work.buffers.layout, mean))
    work.module.eval()
    ensemble = Ensemble(work, values(state["ensemble"]), statistics)
    with torch.no_grad():
        blank = torch.zeros((2, *x.shape[1:]), dtype=x.dtype, device=work.device)
        classes = ensemble.student(blank).shape[1]
    velocity = values(state["velocity"]).to(work.device, copy=True)
    names = [name for name in (*task.method.capabilities.grows, "learned") if name in state]
    entries = {name: values(state[name]).to(work.device) for name in names}
    return Classroom(work, ensemble, state, w.to(work.device), velocity, tuple(x.shape[1:]), classes, entries)
