"""What a module reads of the round it is in: the schedule of a weight moves, and no worker's past is in it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.surrogate import ServerSGD, Surrogate, minimise
from fedcommons.core.local import LocalSGD
from fedcommons.core.worker import RunData, Worker
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.federation.evaluation import ModelTask, evaluate
from fedcommons.federation.participation import participants
from fedcommons.testing.elsewhere import Apart
from fedcommons.testing.federations import Federation


class Scheduled(LightningModule):
    """Its loss has a weight that grows with the steps; it notes round, epoch and step at each."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 2)
        for p in self.last.parameters():
            nn.init.zeros_(p)
        self.notes: list[tuple[int, int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)

    def note(self) -> None:
        self.notes.append((self.trainer.round, self.current_epoch, self.global_step))  # pyright: ignore

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        self.note()
        return self.global_step * (self(batch[0]).square().mean() + self.last.weight.sum())

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, float]:
        self.note()
        return {"epoch": float(self.current_epoch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


SIZES = (4, 10, 7)
LOOP = LocalSGD(epochs=3, batch_size=4)


@pytest.fixture
def federation() -> Federation:
    store = Examples(torch.linspace(-1, 1, 21)[:, None], torch.arange(21) % 2)
    rows = [torch.arange(a, b).numpy() for a, b in ((0, 4), (4, 14), (14, 21))]
    clients = Clients(store, rows)
    return Federation(RunData(clients, clients, {"test": store}), Scheduled, LOOP)


def notes(executor: Any) -> list[tuple[int, int, int]]:
    return executor.worker.work.module.notes


def test_epochs_and_steps_go_on_from_round_to_round(federation: Federation) -> None:
    """As if a client had trained in all rounds before, whichever clients take part."""
    executor = federation.serial(FedAvg())
    federation.play(FedAvg(), federation.plan(3, participation=0.7, seed=3), executor)
    expected = []
    for round in (1, 2, 3):
        for client in participants(3, 0.7, 3, round):
            batches = -(-SIZES[client] // 4)
            expected += [
                (round, (round - 1) * 3 + e, ((round - 1) * 3 + e) * batches + k)
                for e in range(3)
                for k in range(batches)
            ]
    assert notes(executor) == expected


def test_no_worker_and_no_stop_changes_what_a_schedule_makes(federation: Federation) -> None:
    plan = federation.plan(4, participation=0.7, blocks=3)
    played = federation.play(FedAvg(), plan)
    apart = federation.play(FedAvg(), plan, Apart(federation, FedAvg()))
    rest = federation.play(FedAvg(), plan, start=played[1][0])
    for other in (apart, rest):
        assert torch.equal(other[-1][0].model.buffer, played[-1][0].model.buffer)
    moved = [(a.model.buffer - b.model.buffer).norm() for (a, _), (b, _) in zip(played[1:], played, strict=False)]
    assert moved[2] > 1.5 * moved[0] > 0  # the weight has grown


def test_evaluation_and_the_server_read_the_end_of_a_round_and_other_jobs_none(federation: Federation) -> None:
    def read(worker: Worker, task: ModelTask, job: int) -> tuple[int, int, int]:
        module: Any = worker.work.module
        return module.trainer.round, module.current_epoch, module.global_step

    executor, store = federation.serial(FedAvg()), federation.data.sets["test"]
    found = evaluate(executor, ModelTask(federation.model, round=4, step=6), {"test": 21})
    assert notes(executor) == [(4, 12, 24)]
    assert found == {"test/epoch": 12.0, "test/accuracy": pytest.approx(found["test/accuracy"])}
    assert executor.map(read, ModelTask(federation.model), [0]) == [(0, 0, 0)]
    task = Surrogate(
        model=federation.model, images=store.x, labels=store.y, weights=None, sgd=ServerSGD(2, 8, 0.1, 0.0, 0.0),
        radius=None, round=3,
    )  # fmt: skip
    executor.map(minimise, task, [0])
    assert notes(executor)[1:] == [(3, (12 + k) // 3, 12 + k) for k in range(6)]


def test_the_steps_of_a_round_are_those_that_are_made(federation: Federation) -> None:
    """With equal work, an own share of the examples, and full batches only."""
    for n, own, drop_last in ((10, None, True), (7, 3.0, False), (7, 3.0, True), (3, None, True), (9, 9.0, False)):
        loop = replace(LOOP, epochs=5, drop_last=drop_last)
        data = replace(federation.data.clients[1], n_own=own)
        work = federation.training(loop).work()
        work.local(work.initial, replace(data, x=data.x[:n], y=data.y[:n]), 0)
        assert loop.steps_for(n, own) == len(work.module.notes)  # pyright: ignore
