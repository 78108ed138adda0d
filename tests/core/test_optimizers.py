"""Local training with schedules, clipping, accumulation equals plain loops; a module reads its epoch and step."""

import functools
from collections.abc import Callable
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedcommons import ClientData, Clients, Examples, LocalSGD, UserError, Work, experiment
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddm import FedDM, minimise
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.core.evaluation import ModelTask, evaluate
from fedcommons.core.optimizers import plain_step
from fedcommons.core.schedules import constant, cosine, step
from fedcommons.core.worker import RunData, Worker
from fedcommons.federation.client_sampling import participants
from fedcommons.runs.build import build, noise_key
from fedcommons.runs.checks import schedule_of
from fedcommons.testing import Federation, digits, least_squares

CPU = torch.device("cpu")
ROWS = ClientData(torch.zeros(10, 1), torch.zeros(10))


class Slope(LightningModule):
    """f(w) = w: with SGD every step takes its rate from w."""

    def __init__(self, configure: Callable[[torch.optim.Optimizer], Any], momentum: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.configure, self.momentum = configure, momentum

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.w.sum()

    def configure_optimizers(self) -> Any:
        return self.configure(torch.optim.SGD(self.parameters(), 0.5, self.momentum))


def _half(sgd: torch.optim.Optimizer) -> schedulers.LRScheduler:
    return schedulers.StepLR(sgd, 1, gamma=0.5)


def _configured(interval: str, frequency: int = 1) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda sgd: {
        "optimizer": sgd, "lr_scheduler": {"scheduler": _half(sgd), "interval": interval, "frequency": frequency}
    }  # fmt: skip


FORMS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], list[float]]] = {
    # three epochs of two steps: the rates over 0.5
    "an optimizer": (lambda sgd: sgd, [1, 1, 1, 1, 1, 1]),
    "a dict": (lambda sgd: {"optimizer": sgd, "lr_scheduler": _half(sgd)}, [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
    "steps": (_configured("step"), [1 / 2**k for k in range(6)]),
    "every second step": (_configured("step", 2), [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
    "every second epoch": (_configured("epoch", 2), [1, 1, 1, 1, 1 / 2, 1 / 2]),
    "two": (
        lambda sgd: ([sgd], [_half(sgd), {"scheduler": schedulers.StepLR(sgd, 1, 0.1), "interval": "step"}]),
        [1, 1e-1, 1e-2 / 2, 1e-3 / 2, 1e-4 / 4, 1e-5 / 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("form", "factor"), [*((form, 0.25) for form in FORMS), ("an optimizer", 1.0), ("two", 1.0)])
def test_every_client_begins_its_scheduler_anew_times_the_rounds_factor(form: str, factor: float) -> None:
    configure, rates = FORMS[form]
    work = Work(Slope(configure), CPU, LocalSGD(3, 5, schedule=None if factor == 1 else lambda r: factor / r))
    for round in (2, 3, 1):  # a worker's past does not matter
        now = factor if factor == 1 else factor / round
        work.begin(round, ROWS)
        for _ in range(2):  # two trainings in a round
            result = work.local(work.initial, ROWS, 0)
            assert float(result.model.buffer) == pytest.approx(-0.5 * now * sum(rates), rel=1e-12)
            assert work.clock.global_step == 6 * (round - 1) + 5
    assert float(work.local(work.initial, ROWS, 0, lr=0.125).model.buffer) == -6 * 0.125  # then it has no say
    if form == "an optimizer":
        assert work.sgd("SCAFFOLD", momentum=False) == (0.5 * factor, 0)
    else:  # a method that divides by the rate refuses one that changes in a round
        with pytest.raises(ValueError, match="SCAFFOLD is defined for one learning rate in a round"):
            work.sgd("SCAFFOLD", momentum=False)


@pytest.mark.parametrize(("accumulate", "batch_size", "precision"), [(9, 3, "fp32"), (4, 5, "fp16-mixed")])
def test_accumulated_batches_are_one_large_batch(accumulate: int, batch_size: int, precision: str) -> None:
    """Also where the last batch of an epoch is smaller; steps are those of the optimizer."""
    federation = digits(linear=True, sizes=(5, 33))
    loops = [LocalSGD(2, batch_size, accumulate=accumulate), LocalSGD(2, accumulate * batch_size)]
    works = [federation.training(replace(loop, precision=precision)).work() for loop in loops]
    first, other = (work.local(federation.model, federation.data.clients[1], 5) for work in works)
    moved = (other.model.buffer - federation.model.buffer).norm()
    distance = (first.model.buffer - other.model.buffer).norm()
    tolerance = 1e-6 if precision == "fp32" else 0.01
    assert distance < tolerance * moved
    assert {loop.steps_for(33, None) for loop in loops} == {first.metrics["steps"]} == {other.metrics["steps"]}
    assert float(first.metrics["loss"]) == pytest.approx(float(other.metrics["loss"]), rel=10 * tolerance)


def test_clipping_bounds_the_losses_gradient_and_not_a_methods_correction() -> None:
    """So a control of SCAFFOLD is still the mean of the clipped gradients, whatever the correction."""
    problem, clip = least_squares(), 0.3
    federation = problem.federation(0.1).training(LocalSGD(1, 1000, clip_norm=clip))
    before = np.zeros(3)
    for now, _ in federation.run(SCAFFOLD(), federation.plan(4)):
        g = problem.gradients(before)
        expected = g * np.minimum(1, clip / (np.linalg.norm(g, axis=1, keepdims=True) + 1e-6))
        controls = np.stack([(now.memory.get(i) or {})["control"].buffer.numpy() for i in range(4)])  # pyright: ignore
        assert np.allclose(controls, expected, rtol=0, atol=1e-12)
        before = now.model.buffer.numpy()


def test_the_plain_step_has_the_bits_of_the_optimizers() -> None:
    """A hook of the optimizer makes its steps those of torch, and is called at each."""
    federation, calls = digits(momentum=0.9).training(LocalSGD(1, 6)), list[int]()
    work = federation.work()

    def train() -> Tensor:
        return work.local(federation.model, federation.data.clients[1], seed=3).model.buffer.clone()

    plain = train()
    for register in (work.optimizer.register_step_pre_hook, register_optimizer_step_post_hook):
        calls.clear()
        hook = register(lambda *_: calls.append(1))
        try:
            assert torch.equal(train(), plain)
        finally:
            hook.remove()
        train()
        assert len(calls) == 3


def test_steps_that_a_schedule_or_a_class_wraps_are_taken_as_they_are() -> None:
    calls = []
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)  # torch wraps a class's step when it makes the first one

    class Counted(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, *args: Any, **options: Any) -> None:
            calls.append("class")

    optimizer.step = lambda *args: calls.append("instance")  # pyright: ignore[reportAttributeAccessIssue]
    plain_step(Counted([torch.zeros(1)], lr=0.1))()
    plain_step(optimizer)()
    assert calls == ["class", "instance"]


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
    federation.run(FedAvg(), federation.plan(3, participation=0.7, seed=3), executor)
    expected = []
    for round in (1, 2, 3):
        for client in participants(3, 0.7, 3, round):
            batches = -(-SIZES[client] // 4)
            epochs = [(round - 1) * 3 + e for e in range(3)]
            expected += [(round, epoch, epoch * batches + k) for epoch in epochs for k in range(batches)]
    assert notes(executor) == expected


def test_evaluation_and_the_server_read_the_end_of_a_round_and_other_jobs_none(federation: Federation) -> None:
    def read(worker: Worker, task: ModelTask, job: int) -> tuple[int, int, int]:
        module: Any = worker.work.module
        return module.trainer.round, module.current_epoch, module.global_step

    executor, store = federation.serial(FedAvg()), federation.data.sets["test"]
    metrics = evaluate(executor, ModelTask(federation.model, round=4, step=6), {"test": 21})
    assert notes(executor) == [(4, 12, 24)]
    assert metrics == {"test/epoch": 12.0, "test/accuracy": pytest.approx(metrics["test/accuracy"])}
    assert executor.map(read, ModelTask(federation.model), [0]) == [(0, 0, 0)]
    method = FedDM(server_epochs=2, server_batch=8, server_lr=0.1, server_momentum=0.0, project=False)
    task = ServerTask(method, {"model": federation.model, "images": store.x, "labels": store.y}, 3)
    executor.map(minimise, task, [0])
    assert notes(executor)[1:] == [(3, (12 + k) // 3, 12 + k) for k in range(6)]


def test_the_steps_of_a_round_are_those_that_are_made(federation: Federation) -> None:
    """With equal work, an own share of the examples, and full batches only."""
    for n, n_own, drop_last in ((10, None, True), (7, 3.0, False), (7, 3.0, True), (3, None, True), (9, 9.0, False)):
        loop = replace(LOOP, epochs=5, drop_last=drop_last)
        data = replace(federation.data.clients[1], n_own=n_own)
        work = federation.training(loop).work()
        work.local(work.initial, replace(data, x=data.x[:n], y=data.y[:n]), 0)
        assert loop.steps_for(n, n_own) == len(work.module.notes)  # pyright: ignore


FULL = 1000  # a batch size above every client's number of examples


def test_the_factors_in_closed_form() -> None:
    assert [constant(r, warmup=3) for r in (1, 2, 3, 4, 50)] == [0.25, 0.5, 0.75, 1, 1]
    assert [step(r, every=2, gamma=0.1) for r in (1, 2, 3, 4, 5)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])
    factors = [cosine(r, 40, least=0.2) for r in range(1, 41)]
    assert factors == pytest.approx([0.6 + 0.4 * cos(pi * r / 40) for r in range(40)])
    assert cosine(3, 40, warmup=9) == pytest.approx(0.3 * cosine(3, 40))


def test_runs_of_other_lengths_share_their_noise_only_if_they_begin_alike() -> None:
    """At other learning rates the same noise stands in two messages, and their difference has none."""
    for schedule, keys in (("step", 1), ("cosine", 2)):
        values = [{"federation.rounds": rounds, "client.lr_schedule": schedule} for rounds in (5, 6)]
        assert len({noise_key(experiment("smoke", values=each)) for each in values}) == keys


def test_a_schedule_without_a_positive_factor_is_refused_before_any_work(tmp_path: Path) -> None:
    factors = ["0.0", "float('inf')", "'fast'", "1.0 if round < 3 else float('nan')", "1 / 0"]
    for i, factor in enumerate(factors):
        (tmp_path / f"mine{i}.py").write_text(f"def rates(round):\n    return {factor}\n")
        with pytest.raises(UserError, match=r"rates.* (factor above 0, got .*|ZeroDivisionError)"):
            build(experiment("smoke", values={"client.lr_schedule": f"{tmp_path}/mine{i}.py:rates"}))


def test_a_users_schedule_takes_its_constants_and_the_config_records_its_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def powers(round, rounds, power: float = 0.5):\n    return (1 - (round - 1) / rounds) ** power\n"
    )
    values = {"client.lr_schedule": f"{tmp_path}/mine.py:powers", "client.power": 2.0, "federation.rounds": 4}
    config = experiment("smoke", values=values)
    schedule = schedule_of(config.client.lr_schedule, config.client.constants, 4)
    assert schedule
    assert [schedule(r) for r in (1, 2, 3, 4)] == [1.0, 0.5625, 0.25, 0.0625]
    assert config.source["schedule"]
    assert schedule_of("constant", experiment("smoke").client.constants, 30) is None
