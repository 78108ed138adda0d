"""Local steps as CUDA graphs (``client.graphs``), on a GPU that is not there: bits, waits, recordings, refusals."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config import parts
from fedcommons.config.presets import experiment
from fedcommons.core import graphs
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.core.graphs import Graphs
from fedcommons.core.local import Correction, LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.stragglers import Slow
from fedcommons.runs.build import prepare
from fedcommons.seeds import set_default_generator
from fedcommons.tensors import Payload, flat, sub
from fedcommons.testing import Federation, digits
from fedcommons.testing.comparing import bits
from fedcommons.testing.on_device import two_rounds
from fedcommons.testing.pretend_gpu import GPU, PretendGPU
from fedcommons.testing.pretend_graphs import pretend_graphs

METHODS: list[Algorithm] = [
    FedAvg(), FedProx(mu=0.5), SCAFFOLD(), FedDyn(alpha=0.1), FedDyn(squared=False, clip=None), FedPVR(), FedNova(),
]  # fmt: skip
LOCAL = LocalSGD(epochs=2, batch_size=4)
SIZES = (9, 5, 14)


def by_graphs(algorithm: Algorithm, federation: Federation) -> tuple[dict[str, bytes], list[int]]:
    """The bits after two rounds, and the operations of each recording."""
    there = federation.training(replace(federation.loop, graphs=True)).on(GPU)
    with pretend_graphs() as recorded, PretendGPU() as gpu:
        return bits(two_rounds(algorithm, there, gpu)), recorded


@pytest.mark.parametrize("variant", [{}, {"dropout": 0.3, "batch_norm": True}], ids=["plain", "dropout, batch norm"])
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_the_bits_are_those_of_one_operation_after_another(algorithm: Algorithm, variant: dict[str, Any]) -> None:
    federation = digits(SIZES, method=algorithm, **variant).training(LOCAL)
    there, recorded = by_graphs(algorithm, federation)
    assert there == bits(two_rounds(algorithm, federation))
    assert len(recorded) == 3  # batches of 4, 2 and 1


@pytest.mark.parametrize("name", parts.KINDS["algorithm"].known)
@pytest.mark.long
def test_so_they_are_of_every_method(name: str, quick: Callable[[str], Algorithm]) -> None:
    federation = digits(SIZES, method=quick(name)).training(LOCAL)
    assert by_graphs(quick(name), federation)[0] == bits(two_rounds(quick(name), federation))


@pytest.mark.parametrize(
    "loop",
    [
        replace(LOCAL, batch_size=100), replace(LOCAL, drop_last=True), replace(LOCAL, clip_norm=0.1),
        replace(LOCAL, augment=True), replace(LOCAL, precision="tf32"),
        replace(LOCAL, schedule=lambda round: 1 / round),
    ],
    ids=["full batches", "no short batch", "clipped", "augmented", "TF32", "a schedule"],
)  # fmt: skip
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_way_of_training(loop: LocalSGD, momentum: float) -> None:
    federation = digits(SIZES, momentum=momentum, method=FedAvg()).training(loop)
    assert by_graphs(FedAvg(), federation)[0] == bits(two_rounds(FedAvg(), federation))


def test_a_schedules_rates_are_recorded_anew() -> None:
    federation = digits((8, 8), method=FedAvg())
    counts = [
        len(by_graphs(FedAvg(), federation.training(replace(LOCAL, schedule=schedule)))[1])
        for schedule in (None, lambda round: 1.0, lambda round: 1 / round)
    ]
    assert counts == [1, 1, 2]


def test_partial_work_of_late_clients() -> None:
    federation = digits(SIZES, method=FedProx()).training(LOCAL)
    plan = federation.plan(3, late=Slow(share=0.6))
    right = federation.play(FedProx(), plan)[-1][0]
    with pretend_graphs(), PretendGPU():
        there = federation.training(replace(LOCAL, graphs=True)).on(GPU).play(FedProx(), plan)[-1][0]
    assert bits(there) == bits(right)


def test_a_step_neither_waits_nor_copies_between_the_devices() -> None:
    federation = digits((20,), method=FedAvg()).on(GPU).training(replace(LOCAL, epochs=1, graphs=True))

    def seen(n: int) -> tuple[int, int]:
        with pretend_graphs(), PretendGPU() as gpu:
            worker = federation.serial(FedAvg()).worker
            rows = worker.data.clients[0]
            worker.work.local(worker.work.initial, rows, 0)
            before = gpu.seen.waits.total(), gpu.seen.copies.total()
            worker.work.local(worker.work.initial, replace(rows, x=rows.x[:n], y=rows.y[:n]), 0)
            return gpu.seen.waits.total() - before[0], gpu.seen.copies.total() - before[1]

    assert seen(20) == seen(8)


class _Net(LightningModule):
    """Two layers, and what the tests ask for."""

    def __init__(self, optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers, self.made = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)), optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float() / 255)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        said = self(batch[0])
        self.log("right", (said.argmax(1) == batch[1]).float().mean())
        self.log_dict({"constant": 0.25})
        return F.cross_entropy(said, batch[1])

    def configure_optimizers(self) -> Any:
        return (self.made or (lambda p: torch.optim.SGD(p, 0.1)))(self.parameters())


def of(module: Callable[[], LightningModule]) -> Federation:
    set_default_generator(0, "weights")
    weights = module().state_dict()

    def make() -> LightningModule:
        one = module()
        one.load_state_dict(weights)
        return one

    return replace(digits(SIZES, method=FedAvg()), module=make).training(LOCAL)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
        lambda p: torch.optim.SGD([{"params": [next(p)], "lr": 0.2, "momentum": 0.5}, {"params": list(p)}], 0.05),
        lambda p: torch.optim.SGD(p, 0.05, foreach=False),
    ],
    ids=["Nesterov", "two groups", "one by one"],
)
def test_each_sgd(optimizer: Callable[..., Any]) -> None:
    federation = of(partial(_Net, optimizer))
    assert by_graphs(FedAvg(), federation)[0] == bits(two_rounds(FedAvg(), federation))


def test_what_a_client_logs_is_the_mean_over_its_steps() -> None:
    federation = of(_Net)
    right = federation.play(FedAvg(), federation.plan(2))[-1][1]
    with pretend_graphs(), PretendGPU():
        there = federation.training(replace(LOCAL, graphs=True)).on(GPU).play(FedAvg(), federation.plan(2))[-1][1]
    logged = [name for name in right if name.startswith("train/")]
    assert {"train/right", "train/constant", "train/loss", "train/steps"} <= set(logged)
    assert {name: there[name] for name in logged} == {name: right[name] for name in logged}


# --- what is not recorded


@dataclass(frozen=True)
class _NewFunctions(FedAvg):
    """FedAvg whose corrections are another function for each client."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        def pull(params: Any, x: Any) -> None:
            for name, parameter in params.items():
                parameter.grad.add_(parameter.detach() - x[name], alpha=float(round))

        x = flat(message.common, "model")
        trained = work.local(x, data, seed, add_to_grad=Correction(pull, (x,)))
        return Reply({"delta": sub(trained.model, x)}, metrics=trained.metrics)


def test_functions_that_are_new_each_time_are_right_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 4)
    method, kept, inner = _NewFunctions(), list[int](), Graphs.train

    def train(self: Graphs, *given: Any) -> Any:
        result = inner(self, *given)
        kept.append(len(self.graphs))
        return result

    monkeypatch.setattr(Graphs, "train", train)
    federation = digits((8,) * 6, method=method).training(LOCAL)
    assert by_graphs(method, federation)[0] == bits(two_rounds(method, federation))
    assert max(kept) == 4


def test_a_method_with_a_loss_of_its_own_is_trained_step_by_step() -> None:
    federation = digits(SIZES, method=MOON()).training(LOCAL)
    there, recorded = by_graphs(MOON(), federation)
    assert there == bits(two_rounds(MOON(), federation))
    assert not recorded


def test_on_a_cpu_nothing_changes() -> None:
    federation = digits(SIZES, method=FedAvg()).training(replace(LOCAL, graphs=True))
    assert federation.serial(FedAvg()).worker.work.graphs is None
    assert bits(two_rounds(FedAvg(), federation)) == bits(two_rounds(FedAvg(), federation.training(LOCAL)))


# --- what is refused


class _Branches(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 1 else loss


class _ReadsItsClock(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class _ReadsItsNumber(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 if batch_idx else 2)


class _Mixes(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(np.random.beta(1, 1))  # noqa: NPY002  (as users do)


class _Flips(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * random.random()


class _Schedules(_Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (_Net, None),
        (_ReadsItsClock, "it reads self.current_epoch, which a graph has as it was when recorded"),
        (_ReadsItsNumber, r"it reads its step's number \(batch_idx\)"),
        (_Mixes, "it draws random numbers from Python or numpy"),
        (_Flips, "it draws random numbers from Python or numpy"),
        (_Schedules, "it has a learning rate scheduler of its own"),
        (partial(_Net, torch.optim.Adam), "its optimizer is Adam, and not SGD"),
        (partial(_Net, lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, dampening=0.5)), "its optimizer has dampening"),
    ],
)
def test_what_a_graph_cannot_hold_is_told_before_any_work(
    module: Callable[[], LightningModule], why: str | None
) -> None:
    work = of(module).work()
    before = [t.clone() for t in (work.params.buffer, *work.module.buffers())]
    batch = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    said = graphs.flaw(work, batch)
    assert said is None if why is None else re.search(why, said or "")
    assert all(torch.equal(a, b) for a, b in zip(before, (work.params.buffer, *work.module.buffers()), strict=True))


def test_a_step_that_waits_is_named_with_its_client() -> None:
    federation = of(_Branches).training(replace(LOCAL, graphs=True)).on(GPU)
    with pretend_graphs(), PretendGPU(), pytest.raises(ClientError, match="cannot be recorded") as told:
        federation.play(FedAvg(), federation.plan(1))
    assert "client 0, round 1" in told.value.sentence


@pytest.mark.parametrize(
    "values",
    [{"dp.local": True}, {"client.batched": True}, {"client.accumulate": 2}, {"client.precision": "fp16-mixed"}],
)
def test_it_is_refused_beside(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"client.graphs needs dp.local false, client.batched false"):
        prepare(experiment("smoke", values={"client.graphs": True, **values}))


def test_adam_is_refused_with_the_models_name() -> None:
    with pytest.raises(UserError, match=r"client.graphs must be false for model cnn: its optimizer is Adam"):
        prepare(experiment("smoke", values={"client.graphs": True, "client.optimizer": "adam"}))


def test_the_pretended_recording_keeps_what_python_decided() -> None:
    """As a graph does; so the tests above would see a number of Python's that changes between steps."""
    x, factor = torch.ones(3), [2.0]
    with pretend_graphs():
        launch = graphs.record(lambda: x.mul_(factor[0]).add_(torch.zeros(3) + 1))  # pyright: ignore[reportArgumentType]
    assert x.tolist() == [1, 1, 1]
    factor[0] = 100.0
    launch()
    launch()
    assert x.tolist() == [7, 7, 7]
