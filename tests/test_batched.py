"""Clients of a block that are trained at once (``client.batched``): results, launches, refusals."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

import fedcommons
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config.flat import deciding, same_results
from fedcommons.config.presets import experiment
from fedcommons.core import batched
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.stragglers import Slow
from fedcommons.runs.build import prepare
from fedcommons.seeds import set_default_generator
from fedcommons.tensors import Flat, Payload, flat
from fedcommons.testing import digits
from fedcommons.testing.federations import Federation
from fedcommons.testing.pretend_gpu import GPU, PretendGPU

UNEQUAL, EQUAL = (13, 20, 20, 7, 16), (20, 20, 20, 20, 20)
METHODS: list[Algorithm] = [
    FedAvg(), FedProx(mu=0.5), SCAFFOLD(), FedDyn(alpha=0.1), FedDyn(squared=False, clip=None), FedPVR(), FedNova(),
]  # fmt: skip
LOCAL = LocalSGD(epochs=2, batch_size=5)


def played(federation: Federation, algorithm: Algorithm, *, at_once: bool, rounds: int = 10, **more: Any) -> Flat:
    """The model after so many rounds."""
    plan = federation.plan(rounds, blocks=1, **more)
    training = federation.training(replace(federation.loop, batched=at_once))
    return flat(training.play(algorithm, plan)[-1][0].state, "model")


def off(a: Flat, b: Flat) -> float:
    return float((a.buffer - b.buffer).norm() / a.buffer.norm())


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
@pytest.mark.long
def test_ten_rounds_are_those_of_one_client_after_another(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    federation = digits(sizes=sizes, method=algorithm).training(LOCAL)
    assert off(*(played(federation, algorithm, at_once=at_once) for at_once in (False, True))) < 1e-5


@pytest.mark.parametrize(
    "loop",
    [
        replace(LOCAL, batch_size=100), replace(LOCAL, drop_last=True), replace(LOCAL, clip_norm=0.1),
        replace(LOCAL, augment=True), replace(LOCAL, onednn=False),
    ],
    ids=["full batches", "no short batch", "clipped", "augmented", "without oneDNN"],
)  # fmt: skip
def test_each_way_of_training(loop: LocalSGD) -> None:
    federation = digits(sizes=UNEQUAL, method=FedAvg()).training(loop)
    assert off(*(played(federation, FedAvg(), at_once=at_once, rounds=3) for at_once in (False, True))) < 1e-5


def test_clipping_as_above_changes_the_model() -> None:
    """So that a norm over all clients together, in place of one a client, would be seen there."""
    federation = digits(sizes=UNEQUAL, method=FedAvg()).training(replace(LOCAL, clip_norm=0.1))
    whole = digits(sizes=UNEQUAL, method=FedAvg()).training(LOCAL)
    assert off(*(played(one, FedAvg(), at_once=True, rounds=2) for one in (federation, whole))) > 1e-3


class _Net(LightningModule):
    """Two layers, and what the tests ask for."""

    def __init__(self, optimizer: Callable[..., Any] | None = None, *, dropout: float = 0.0, norm: bool = False):
        super().__init__()
        layers = [nn.Linear(64, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 10)]
        self.layers, self.made = nn.Sequential(nn.Flatten(), *layers), optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float() / 255)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        said = self(batch[0])
        self.log("right", (said.argmax(1) == batch[1]).float().mean())
        self.log_dict({"number": float(len(batch[1]))})
        return F.cross_entropy(said, batch[1])

    def configure_optimizers(self) -> Any:
        return (self.made or (lambda p: torch.optim.SGD(p, 0.1)))(self.parameters())


class _ReadsItsPlace(_Net):
    """Its loss follows the place of the batch in the epoch, which differs between clients of unequal sizes."""

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class _ReadsItsClock(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class _Branches(_Net):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss > 1 else loss


def _momentum(p: Any) -> Any:
    return torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True)


def _adam(p: Any) -> Any:
    return torch.optim.Adam(p, 1e-2)


def _two_rates(p: Any) -> Any:
    one, *others = p
    return torch.optim.SGD([{"params": [one], "lr": 0.2}, {"params": others}], 0.05)


def of(module: Callable[[], LightningModule], sizes: tuple[int, ...] = UNEQUAL) -> Federation:
    set_default_generator(0, "weights")
    weights = module().state_dict()

    def make() -> LightningModule:
        one = module()
        one.load_state_dict(weights)
        return one

    return replace(digits(sizes=sizes, method=FedAvg()), module=make).training(LOCAL)


@pytest.mark.parametrize("optimizer", [_momentum, _adam, _two_rates])
def test_each_optimizer(optimizer: Callable[..., Any]) -> None:
    """A client that has ended keeps what it has, while momentum would carry it on."""
    federation = of(lambda: _Net(optimizer))
    assert off(*(played(federation, FedAvg(), at_once=at_once, rounds=3) for at_once in (False, True))) < 1e-5


def test_what_a_client_logs_is_the_mean_over_its_steps() -> None:
    federation = of(_Net)
    ends = [
        federation.training(replace(LOCAL, batched=at_once)).play(FedAvg(), federation.plan(2, blocks=1))[-1][1]
        for at_once in (False, True)
    ]
    assert {"train/right", "train/number", "train/loss", "train/steps"} <= ends[0].keys()
    for name in ends[0]:
        if name.startswith("train/"):
            assert ends[1][name] == pytest.approx(ends[0][name], rel=1e-5), name


def test_partial_work_of_late_clients() -> None:
    federation = digits(sizes=UNEQUAL, method=FedProx()).training(LOCAL)
    late = Slow(share=0.6)
    ends = [played(federation, FedProx(), at_once=at_once, rounds=4, late=late) for at_once in (False, True)]
    assert off(*ends) < 1e-5


# --- launches


def launches(algorithm: Algorithm, n_clients: int, *, at_once: bool) -> int:
    """Of a step within an epoch, on a GPU that is not there: of all clients at once, or of one."""
    loop = LocalSGD(epochs=1, batch_size=5, batched=at_once)
    federation = digits(sizes=(20,) * n_clients, method=algorithm).training(loop).on(GPU)
    with PretendGPU() as gpu:
        federation.play(algorithm, federation.plan(1, blocks=1))
    assert not any(step.waits or step.copies for step in gpu.steps[:2])
    (n,) = {step.launches.total() for step in gpu.steps[:2]}
    return n


@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_a_step_launches_as_much_for_sixteen_clients_as_for_four(algorithm: Algorithm) -> None:
    four, sixteen = (launches(algorithm, n, at_once=True) for n in (4, 16))
    assert four == sixteen < 2.5 * launches(algorithm, 4, at_once=False)


# --- who is trained alone


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients each call trains at once."""
    sizes: list[int] = []
    inner = batched.train

    def train(work: Work, requests: Sequence[batched.Asked]) -> Any:
        sizes.append(len(requests))
        return inner(work, requests)

    monkeypatch.setattr(batched, "train", train)
    return sizes


def test_a_method_with_a_loss_of_its_own_trains_each_client_alone_and_once(
    trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, runs = digits(sizes=UNEQUAL, method=MOON()).training(LOCAL), []
    inner = LocalSGD.run

    def run(self: LocalSGD, work: Work, *given: Any, **named: Any) -> Any:
        if not work.instead:
            runs.append(1)
        return inner(self, work, *given, **named)

    monkeypatch.setattr(LocalSGD, "run", run)
    played(federation, MOON(), at_once=True, rounds=2)
    assert trained == []
    assert len(runs) == 2 * len(UNEQUAL)


@pytest.mark.parametrize(("algorithm", "said"), [("fedprox", []), ("moon", ["moon"])])
def test_a_run_says_where_clients_are_trained_alone_all_the_same(
    algorithm: str, said: list[str], tmp_path: Path
) -> None:
    values = {"algorithm": algorithm, "client.batched": True, "federation.rounds": 1, "data.limit": 100}
    told = list[str]()
    fedcommons.run(experiment("smoke", values=values), tmp_path / "run", say=told.append)
    found = [
        re.search(r"client.batched changes nothing: (\w+) trains with a loss, rate or gradient of its own", x)
        for x in told
    ]
    assert [one[1] for one in found if one] == said


def test_a_block_is_one_program(trained: list[int]) -> None:
    federation = digits(sizes=UNEQUAL, method=SCAFFOLD()).training(replace(LOCAL, batched=True))
    federation.play(SCAFFOLD(), federation.plan(1, blocks=2))
    assert trained == [3, 2] or trained == [2, 3]


@dataclass(frozen=True)
class _Fails(FedAvg):
    """One client fails, before or after its training."""

    error: type[BaseException] = ValueError
    trained: bool = False

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed) if self.trained or len(data) != 7 else None
        if len(data) == 7:
            raise self.error("on purpose")
        assert reply
        return reply


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("trained", [False, True])
def test_a_client_that_fails_is_named_as_if_it_trained_alone(error: type[BaseException], *, trained: bool) -> None:
    federation, said = digits(sizes=UNEQUAL, method=FedAvg()).training(LOCAL), []
    for at_once in (False, True):
        with pytest.raises(ClientError, match="client 3, round 1") as caught:
            played(federation, _Fails(error, trained), at_once=at_once, rounds=1)
        said.append((caught.value.sentence, caught.value.client, caught.value.round))
    assert said[0] == said[1]


def test_it_decides_results_so_that_no_run_goes_on_with_another_value() -> None:
    one, other = (experiment("smoke", "digits", {"client.batched": value}) for value in (False, True))
    assert deciding(other).keys() - deciding(one).keys() == {"client.batched"}
    assert same_results(one, other) == ["client.batched"]


# --- refusals


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: _Net(norm=True), "keeps statistics of its batches"),
        (lambda: _Net(dropout=0.5), "random"),
        (_ReadsItsClock, "reads self.current_epoch"),
        (_ReadsItsPlace, "batch_idx"),
        (_Branches, "data-dependent|vmap"),
        (lambda: _Net(lambda p: torch.optim.RMSprop(p, 0.1)), "its optimizer is RMSprop"),
        (
            lambda: _Net(lambda p: ([o := torch.optim.SGD(p, 0.1)], [torch.optim.lr_scheduler.StepLR(o, 1)])),
            "scheduler",
        ),
    ],
)
def test_a_module_that_cannot_be_batched_says_why(module: Callable[[], LightningModule], why: str) -> None:
    work = Work(module(), torch.device("cpu"))
    data = digits(sizes=EQUAL, method=FedAvg()).data.clients[0]
    found = batched.flaw(work, (data.x[:2], data.y[:2]))
    assert found
    assert any(part in found for part in why.split("|")), found
    assert work.module.training
    work.local(work.snapshot(), data, 0)  # and is as it was


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model.batch_norm": True}, "client.batched must be false for model cnn: it keeps statistics"),
        ({"dp.local": True}, "client.batched needs dp.local false, client.acc"),
        ({"client.accumulate": 2}, "client.batched needs dp.local false, client.acc"),
        ({"client.precision": "bf16"}, "client.batched needs dp.local false, client.acc"),
        ({"algorithm": "feddm"}, "client.batched changes nothing for feddm"),
    ],
)
def test_a_run_that_cannot_be_batched_is_refused_before_any_work(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        prepare(experiment("smoke", "digits", {"client.batched": True, **fields}))
