"""Local steps as CUDA graphs (``client.graphs``), on a GPU that is not there: bits, waits, recordings, refusals."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from tiny_net import METHODS, Net, clients_of, nesterov, two_groups, with_scheduler

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.moon import MOON
from fedcommons.config.presets import experiment
from fedcommons.core import graphs
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.core.local import Correction, LocalSGD
from fedcommons.core.work import Work
from fedcommons.data.clients import ClientData
from fedcommons.errors import ClientError, UserError
from fedcommons.federation.stragglers import Slow
from fedcommons.runs.build import prepare
from fedcommons.tensors import Payload, flat, sub
from fedcommons.testing import Federation, digits
from fedcommons.testing.comparing import bits
from fedcommons.testing.on_device import two_rounds
from fedcommons.testing.pretend_gpu import GPU, PretendGPU
from fedcommons.testing.pretend_graphs import pretend_graphs

LOCAL = LocalSGD(epochs=2, batch_size=4)
SIZES = (9, 5)


def require_same_bits(algorithm: Algorithm, federation: Federation) -> list[int]:
    """See that two rounds have the bits of one operation after another; return the operations of each recording."""
    there = federation.training(replace(federation.loop, graphs=True)).on(GPU)
    with pretend_graphs() as recorded, PretendGPU() as gpu:
        found = bits(two_rounds(algorithm, there, gpu))
    assert found == bits(two_rounds(algorithm, federation))
    return recorded


@pytest.mark.parametrize(
    ("algorithm", "variant", "recordings"),
    [
        *((algorithm, {}, 2) for algorithm in METHODS),  # batches of 4 and 1
        (METHODS[0], {"dropout": 0.3, "batch_norm": True}, 2),
        (METHODS[2], {"dropout": 0.3, "batch_norm": True}, 2),
        (MOON(), {}, 0),  # it has a loss of its own, and is trained step by step
    ],
    ids=repr,
)
def test_the_bits_are_those_of_one_operation_after_another(
    algorithm: Algorithm, variant: dict[str, Any], recordings: int
) -> None:
    federation = digits(SIZES, method=algorithm, **variant).training(LOCAL)
    assert len(require_same_bits(algorithm, federation)) == recordings


@pytest.mark.parametrize("name", ["fedproto", "fedgen", "fedvae", "fedper"])
@pytest.mark.long
def test_so_they_are_of_methods_with_other_clients(name: str, quick: Callable[[str], Algorithm]) -> None:
    require_same_bits(quick(name), digits(SIZES, method=quick(name)).training(LOCAL))


@pytest.mark.parametrize(
    ("loop", "momentum"),
    [
        (replace(LOCAL, batch_size=100), 0.0),
        (replace(LOCAL, drop_last=True), 0.9),
        (replace(LOCAL, clip_norm=0.1), 0.0),
        (replace(LOCAL, augment=True), 0.9),
        (replace(LOCAL, precision="tf32"), 0.9),
        (replace(LOCAL, precision="bf16"), 0.0),
        (replace(LOCAL, schedule=lambda round: 1 / round), 0.9),
    ],
    ids=["full batches", "no short batch", "clipped", "augmented", "TF32", "bf16", "a schedule"],
)
def test_each_way_of_training(loop: LocalSGD, momentum: float) -> None:
    require_same_bits(FedAvg(), digits(SIZES, momentum=momentum, method=FedAvg()).training(loop))


@pytest.mark.parametrize("optimizer", [nesterov, two_groups, lambda p: torch.optim.SGD(p, 0.05, foreach=False)])
def test_each_sgd(optimizer: Callable[..., Any]) -> None:
    require_same_bits(FedAvg(), clients_of(partial(Net, optimizer), SIZES, LOCAL))


@pytest.mark.parametrize(
    ("schedule", "recordings"), [(None, 1), (lambda round: 1.0, 1), (lambda round: 1 / round, 2)], ids=str
)
def test_a_schedules_rates_are_recorded_anew(schedule: Callable[[int], float] | None, recordings: int) -> None:
    federation = digits((8, 8), method=FedAvg()).training(replace(LOCAL, schedule=schedule))
    assert len(require_same_bits(FedAvg(), federation)) == recordings


@pytest.mark.parametrize("late", [None, Slow(share=0.6)], ids=["all", "partial work"])
def test_what_a_client_logs_is_the_mean_over_its_steps(late: Slow | None) -> None:
    federation = clients_of(Net, SIZES, LOCAL)
    plan = federation.plan(2, late=late)
    right, expected = federation.play(FedProx(), plan)[-1]
    with pretend_graphs(), PretendGPU():
        there, found = federation.training(replace(LOCAL, graphs=True)).on(GPU).play(FedProx(), plan)[-1]
    assert bits(there) == bits(right)
    logged = [name for name in expected if name.startswith("train/")]
    assert {"train/right", "train/number", "train/loss", "train/steps"} <= set(logged)
    assert {name: found[name] for name in logged} == {name: expected[name] for name in logged}


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


@dataclass(frozen=True)
class NewFunctions(FedAvg):
    """FedAvg whose corrections are another function for each client."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        def pull(params: Any, x: Any) -> None:
            for name, parameter in params.items():
                parameter.grad.add_(parameter.detach() - x[name], alpha=float(round))

        x = flat(message.common, "model")
        trained = work.local(x, data, seed, add_to_grad=Correction(pull, (x,)))
        assert work.graphs is None or len(work.graphs.graphs) <= graphs.MOST
        return Reply({"delta": sub(trained.model, x)}, metrics=trained.metrics)


def test_functions_that_are_new_each_time_are_right_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 4)
    recorded = require_same_bits(NewFunctions(), digits((8,) * 6, method=NewFunctions()).training(LOCAL))
    assert len(recorded) == 12


def test_on_a_cpu_nothing_changes() -> None:
    federation = digits(SIZES, method=FedAvg()).training(replace(LOCAL, graphs=True))
    assert federation.serial(FedAvg()).worker.work.graphs is None
    assert bits(two_rounds(FedAvg(), federation)) == bits(two_rounds(FedAvg(), federation.training(LOCAL)))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Net, None),
        (partial(Net, change="reads its clock"), "it reads self.current_epoch"),
        (partial(Net, change="reads its place"), r"\(batch_idx\)"),
        (partial(Net, change="draws from numpy"), "random numbers from Python or numpy"),
        (partial(Net, change="draws from Python"), "random numbers from Python or numpy"),
        (partial(Net, with_scheduler), "scheduler"),
        (partial(Net, torch.optim.Adam), "its optimizer is Adam"),
        (partial(Net, lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, dampening=0.5)), "dampening"),
    ],
)
def test_what_a_graph_cannot_hold_is_named_before_any_work(
    module: Callable[[], LightningModule], why: str | None
) -> None:
    work = clients_of(module, SIZES, LOCAL).work()
    before = [t.clone() for t in (work.params.buffer, *work.module.buffers())]
    batch = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    found = graphs.flaw(work, batch)
    assert found is None if why is None else re.search(why, found or "")
    assert all(torch.equal(a, b) for a, b in zip(before, (work.params.buffer, *work.module.buffers()), strict=True))


def test_a_step_that_waits_is_named_with_its_client() -> None:
    federation = clients_of(partial(Net, change="branches"), SIZES, replace(LOCAL, graphs=True)).on(GPU)
    with pretend_graphs(), PretendGPU(), pytest.raises(ClientError, match="cannot be recorded") as refused:
        federation.play(FedAvg(), federation.plan(1))
    assert "client 0, round 1" in refused.value.sentence


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp.local": True}, "needs dp.local false"),
        ({"client.batched": True}, "needs .*client.batched false"),
        ({"client.accumulate": 2}, "needs .*client.accumulate 1"),
        ({"client.precision": "fp16-mixed"}, "needs .*client.precision"),
        ({"client.optimizer": "adam"}, "model cnn: its optimizer is Adam"),
    ],
)
def test_what_graphs_do_not_go_with_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"client.graphs .*{words}"):
        prepare(experiment("smoke", values={"client.graphs": True, **values}))


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
