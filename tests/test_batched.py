"""Clients of a block that are trained at once (``client.batched``): results, launches, refusals."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from tiny_net import METHODS, Net, clients_of, nesterov, two_groups, with_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import fedcommons
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedprox import FedProx
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
from fedcommons.tensors import Flat, Payload, flat
from fedcommons.testing import Federation, digits
from fedcommons.testing.pretend_gpu import GPU, PretendGPU

UNEQUAL, EQUAL = (13, 20, 20, 7, 16), (20, 20, 20, 20, 20)
LOCAL = LocalSGD(epochs=2, batch_size=5)


def played(federation: Federation, algorithm: Algorithm, *, at_once: bool, rounds: int = 3, **more: Any) -> Flat:
    """The model after so many rounds."""
    plan = federation.plan(rounds, blocks=1, **more)
    training = federation.training(replace(federation.loop, batched=at_once))
    return flat(training.play(algorithm, plan)[-1][0].state, "model")


def off(federation: Federation, algorithm: Algorithm, **more: Any) -> float:
    """Relative distance between clients at once and one after another."""
    a, b = (played(federation, algorithm, at_once=at_once, **more) for at_once in (False, True))
    return float((a.buffer - b.buffer).norm() / a.buffer.norm())


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("algorithm", METHODS, ids=repr)
def test_rounds_are_those_of_one_client_after_another(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    assert off(digits(sizes=sizes, method=algorithm).training(LOCAL), algorithm) < 1e-5


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
    assert off(federation, FedAvg()) < 1e-5
    if loop.clip_norm:  # else a norm over all clients together, in place of one per client, would not be seen
        clipped, whole = (played(each, FedAvg(), at_once=True) for each in (federation, federation.training(LOCAL)))
        assert (clipped.buffer - whole.buffer).norm() > 1e-3 * whole.buffer.norm()


@pytest.mark.parametrize("optimizer", [nesterov, lambda p: torch.optim.Adam(p, 1e-2), two_groups])
def test_each_optimizer(optimizer: Callable[..., Any]) -> None:
    """A client that has ended keeps its weights, while momentum would carry it on."""
    assert off(clients_of(partial(Net, optimizer), UNEQUAL, LOCAL), FedAvg()) < 1e-5


def test_what_a_client_logs_is_the_mean_over_its_steps() -> None:
    federation = clients_of(Net, UNEQUAL, LOCAL)
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
    assert off(federation, FedProx(), rounds=4, late=Slow(share=0.6)) < 1e-5


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
def test_a_step_launches_as_much_for_eight_clients_as_for_four(algorithm: Algorithm) -> None:
    four, eight = (launches(algorithm, n, at_once=True) for n in (4, 8))
    assert four == eight < 2.5 * launches(algorithm, 4, at_once=False)


@pytest.mark.parametrize(
    ("algorithm", "blocks", "steps"),
    [(SCAFFOLD(), 1, 8), (SCAFFOLD(), 2, 16), (MOON(), 1, 34)],  # clients alone: 6 + 8 + 8 + 4 + 8
    ids=["one block", "two blocks", "a loss of its own"],
)
def test_a_block_is_one_program_unless_the_method_has_its_own_loss(
    algorithm: Algorithm, blocks: int, steps: int
) -> None:
    federation, calls = digits(sizes=UNEQUAL, method=algorithm).training(replace(LOCAL, batched=True)), list[int]()
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        federation.play(algorithm, federation.plan(1, blocks=blocks))
    finally:
        handle.remove()
    assert len(calls) == steps


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algorithm": "fedprox", "federation.blocks": 2}, None),
        ({"algorithm": "moon", "federation.blocks": 2}, "loss, rate or gradient of its own"),
        ({}, "4 clients of a round are in a block each"),  # preset smoke
        ({"federation.blocks": 2, "federation.participation": 0.5}, "2 clients of a round are in a block each"),
        ({"federation.blocks": 1, "federation.participation": 0.25}, "a round has one client"),
        ({"federation.blocks": 3}, None),
        ({"client.batched": False, "client.graphs": True}, "client.graphs changes nothing"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs change something on a GPU")
def test_a_run_says_where_clients_are_trained_alone_all_the_same(
    values: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    more = {"client.batched": True, "federation.rounds": 1, "data.limit": 60, "client.epochs": 1, "wandb": "off"}
    said, more["measure.every"] = list[str](), 0
    fedcommons.run(experiment("smoke", values=more | values), tmp_path / "run", say=said.append)
    notes = [text for text in said if text.startswith(("client.batched", "client.graphs"))]
    assert [words in note for note in notes] == [True] if words else not notes


@dataclass(frozen=True)
class Fails(FedAvg):
    """One client fails, before or after its training."""

    error: type[BaseException] = ValueError
    trained: bool = False

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed) if self.trained or len(data) != 7 else None
        if len(data) == 7:
            raise self.error("on purpose")
        assert reply
        return reply


@pytest.mark.parametrize(("error", "trained"), [(ValueError, False), (ValueError, True), (SystemExit, True)])
def test_a_client_that_fails_is_named_as_if_it_trained_alone(error: type[BaseException], *, trained: bool) -> None:
    federation, sentences = digits(sizes=UNEQUAL, method=FedAvg()).training(LOCAL), []
    for at_once in (False, True):
        with pytest.raises(ClientError, match="client 3, round 1") as caught:
            played(federation, Fails(error, trained), at_once=at_once, rounds=1)
        sentences.append((caught.value.sentence, caught.value.client, caught.value.round))
    assert sentences[0] == sentences[1]


def test_it_decides_results_so_that_no_run_goes_on_with_another_value() -> None:
    one, other = (experiment("smoke", "digits", {"client.batched": value}) for value in (False, True))
    assert deciding(other).keys() - deciding(one).keys() == {"client.batched"}
    assert same_results(one, other) == ["client.batched"]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (partial(Net, norm=True), "statistics of its batches"),
        (partial(Net, dropout=0.5), "random"),
        (partial(Net, change="reads its clock"), "reads self.current_epoch"),
        (partial(Net, change="reads its place"), "batch_idx"),
        (partial(Net, change="branches"), "data-dependent|vmap"),
        (partial(Net, lambda p: torch.optim.RMSprop(p, 0.1)), "its optimizer is RMSprop"),
        (partial(Net, with_scheduler), "scheduler"),
    ],
)
def test_a_module_that_cannot_be_batched_says_why(module: Callable[[], LightningModule], why: str) -> None:
    work = Work(module(), torch.device("cpu"))
    data = digits(sizes=EQUAL, method=FedAvg()).data.clients[0]
    found = batched.flaw(work, (data.x[:2], data.y[:2])) or ""
    assert any(part in found for part in why.split("|")), found
    assert work.module.training
    work.local(work.snapshot(), data, 0)  # and is as it was


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model.batch_norm": True}, "must be false for model cnn: .*statistics"),
        ({"dp.local": True}, "needs dp.local false"),
        ({"client.accumulate": 2}, "needs .*client.accumulate 1"),
        ({"client.precision": "bf16"}, "needs .*client.precision"),
        ({"algorithm": "feddm"}, "changes nothing for feddm"),
    ],
)
def test_a_run_that_cannot_be_batched_is_refused_before_any_work(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"client.batched {words}"):
        prepare(experiment("smoke", "digits", {"client.batched": True, **fields}))
