"""Steps as tensor programs: clients of a block at once (``client.batched``) and CUDA graphs (``client.graphs``).

Both give the results of one operation, and one client, after another: graphs bit for bit, on a GPU that is not there.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pretend_graphs import pretend_graphs
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import fedcommons
from fedcommons import ClientData, ClientError, LocalSGD, Payload, Work, experiment, flat, set_default_generator
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.feddyn import FedDyn
from fedcommons.algorithms.fednova import FedNova
from fedcommons.algorithms.fedper import FedPer
from fedcommons.algorithms.fedprox import FedProx
from fedcommons.algorithms.fedpvr import FedPVR
from fedcommons.algorithms.moon import MOON
from fedcommons.algorithms.scaffold import SCAFFOLD
from fedcommons.config.dotted import deciding, same_results
from fedcommons.core import cuda_graphs, vmap_clients
from fedcommons.core.algorithm import Algorithm, Message, Reply
from fedcommons.federation.stragglers import Slow
from fedcommons.testing import GPU, Federation, PretendGPU, digits
from fedcommons.testing.comparing import bits
from fedcommons.testing.on_device import two_rounds

UNEQUAL, EQUAL = (13, 20, 20, 7, 16), (20, 20, 20, 20, 20)
LOCAL = LocalSGD(epochs=2, batch_size=5)
SMALL = (9, 6)
"""Clients that are trained by graphs: batches of 5, 4 and 1."""


METHODS: list[Algorithm] = [
    FedAvg(), FedProx(mu=0.5), SCAFFOLD(), FedDyn(alpha=0.1), FedDyn(squared=False, clip=None), FedPVR(), FedNova(),
]  # fmt: skip
"""Methods without a loss of their own."""

Change = Callable[[Any, Tensor, Any], Tensor]

CHANGES: dict[str, Change] = {
    "reads its place": lambda module, loss, at: loss * (1 + at),
    "reads its clock": lambda module, loss, at: loss * (1 + module.current_epoch),
    "branches": lambda module, loss, at: loss * 2 if loss > 1 else loss,
    "draws from numpy": lambda module, loss, at: loss * float(np.random.beta(1, 1)),  # noqa: NPY002  (as users do)
}
"""What a training step does with its loss, by the module, the loss and the place of the batch."""


class Net(LightningModule):
    """Logs a tensor and a number in its steps."""

    def __init__(
        self, optimizer: Callable[..., Any] | None = None, change: str = "", *, dropout: float = 0.0, norm: bool = False
    ) -> None:
        super().__init__()
        layers = [nn.Linear(64, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 10)]
        self.layers, self.create, self.change = nn.Sequential(nn.Flatten(), *layers), optimizer, CHANGES.get(change)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float() / 255)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.log("right", (logits.argmax(1) == batch[1]).float().mean())
        self.log_dict({"number": float(len(batch[1]))})
        loss = F.cross_entropy(logits, batch[1])
        return self.change(self, loss, batch_idx) if self.change else loss

    def configure_optimizers(self) -> Any:
        return (self.create or (lambda p: torch.optim.SGD(p, 0.1)))(self.parameters())


def clients_of(module: Callable[[], LightningModule], sizes: Sequence[int], loop: LocalSGD) -> Federation:
    """Return clients of these sizes whose module has the same initial weights in every process."""
    set_default_generator(0, "weights")
    weights = module().state_dict()

    def make() -> LightningModule:
        net = module()
        net.load_state_dict(weights)
        return net

    return replace(digits(sizes=sizes, method=FedAvg()), module=make).training(loop)


def watched_training() -> Any:
    """A context that notes the calls of the function that trains clients at once."""
    return mock.patch.object(vmap_clients, "train", wraps=vmap_clients.train)


def require_same(federation: Federation, algorithm: Algorithm, rounds: int = 2, **more: Any) -> None:
    """See that rounds with clients at once are those of one after another, up to rounding."""
    plan = federation.plan(rounds, blocks=1, **more)
    with watched_training() as trained:
        a, b = (
            flat(federation.training(replace(federation.loop, batched=is_)).run(algorithm, plan)[-1][0].state, "model")
            for is_ in (False, True)
        )
    assert sum(len(call.args[1]) for call in trained.call_args_list) == rounds * len(federation.data.clients)
    assert (a.buffer - b.buffer).norm() < 1e-5 * a.buffer.norm()


def require_same_bits(federation: Federation, algorithm: Algorithm) -> list[int]:
    """See that two rounds by graphs have the bits of those without; return the operations of each recording."""
    there = federation.training(replace(federation.loop, graphs=True)).on(GPU)
    with pretend_graphs() as recorded, PretendGPU() as gpu:
        result = bits(two_rounds(algorithm, there, gpu))
    assert result == bits(two_rounds(algorithm, federation))
    return recorded


@pytest.mark.parametrize(("algorithm", "sizes"), [*((method, UNEQUAL) for method in METHODS), (METHODS[2], EQUAL)])
def test_clients_at_once_are_those_of_one_after_another(algorithm: Algorithm, sizes: tuple[int, ...]) -> None:
    require_same(digits(sizes=sizes, method=algorithm).training(LOCAL), algorithm)


@pytest.mark.parametrize("algorithm", [*METHODS, FedPer(), MOON()], ids=repr)
def test_graphs_give_the_bits_of_one_operation_after_another(algorithm: Algorithm) -> None:
    """MOON has a loss of its own, and is trained step by step."""
    variant = {"dropout": 0.3, "batch_norm": True} if algorithm in (METHODS[0], METHODS[2]) else {}
    federation = digits(SMALL, method=algorithm, **variant).training(replace(LOCAL, epochs=1))
    assert len(require_same_bits(federation, algorithm)) == (0 if isinstance(algorithm, MOON) else 3)


LOOPS: dict[str, dict[str, Any]] = {
    "full batches": {"batch_size": 100}, "no short batch": {"drop_last": True}, "clipped": {"clip_norm": 0.1},
    "augmented": {"augment": True}, "without oneDNN": {"onednn": False}, "TF32": {"precision": "tf32"},
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_each_way_of_training(name: str) -> None:
    loop, momentum = replace(LOCAL, **LOOPS[name]), 0.9 if name in ("no short batch", "TF32") else 0.0
    if name != "without oneDNN":
        assert require_same_bits(digits(SMALL, momentum=momentum, method=FedAvg()).training(loop), FedAvg())
    if name != "TF32":
        require_same(digits(sizes=UNEQUAL, method=FedAvg()).training(loop), FedAvg())


@pytest.mark.parametrize("name", ["Nesterov", "two groups", "Adam"])
def test_each_optimizer(name: str) -> None:
    """A client that has ended keeps its weights, while momentum would carry it on."""
    optimizer = {
        "Nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True, foreach=False),
        "two groups": lambda p: torch.optim.SGD(
            [{"params": [next(p)], "lr": 0.2, "momentum": 0.5}, {"params": p}], 0.05
        ),
        "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    }[name]
    require_same(clients_of(partial(Net, optimizer), UNEQUAL, LOCAL), FedAvg())
    if name != "Adam":
        assert require_same_bits(clients_of(partial(Net, optimizer), SMALL, LOCAL), FedAvg())


def test_a_step_launches_as_much_for_eight_clients_as_for_four() -> None:
    """And less than 2.5 times what a step of a client alone launches; it neither waits nor copies."""
    launches = []
    for n_clients, at_once in ((4, True), (8, True), (4, False)):
        loop = LocalSGD(epochs=1, batch_size=5, batched=at_once)
        federation = digits(sizes=(20,) * n_clients, method=SCAFFOLD()).training(loop).on(GPU)
        with PretendGPU() as gpu:
            federation.run(SCAFFOLD(), federation.plan(1, blocks=1))
        assert not any(step.waits or step.copies for step in gpu.steps[:2])
        (n,) = {step.launches.total() for step in gpu.steps[:2]}
        launches.append(n)
    assert launches[0] == launches[1] < 2.5 * launches[2]


def test_a_schedules_rates_are_recorded_anew_and_a_cpu_has_no_graphs() -> None:
    federation = digits((10, 10), method=FedAvg())
    for schedule, recordings in ((None, 1), (lambda round: 1.0, 1), (lambda round: 1 / round, 2)):
        there = federation.training(replace(LOCAL, schedule=schedule))
        assert len(require_same_bits(there, FedAvg())) == recordings
    on_cpu = two_rounds(FedAvg(), federation.training(replace(LOCAL, graphs=True)))
    assert bits(on_cpu) == bits(two_rounds(FedAvg(), federation.training(LOCAL)))


@pytest.mark.parametrize("how", [{"batched": True}, {"graphs": True}], ids=str)
def test_what_a_client_logs_is_the_mean_over_its_steps(how: dict[str, bool]) -> None:
    federation = clients_of(Net, UNEQUAL, LOCAL)
    plan = federation.plan(3, blocks=1, late=Slow(share=0.6))
    right, expected = federation.run(FedProx(), plan)[-1]
    there = federation.training(replace(LOCAL, **how))
    with pretend_graphs() as recorded, PretendGPU(), watched_training() as trained:
        end, facts = (there.on(GPU) if "graphs" in how else there).run(FedProx(), plan)[-1]
    assert (bool(recorded), trained.called) == ("graphs" in how, "batched" in how)
    logged = [name for name in expected if name.startswith("train/")]
    assert {"train/right", "train/number", "train/loss", "train/steps"} <= set(logged)
    assert {name: facts[name] for name in logged} == pytest.approx({n: expected[n] for n in logged}, rel=1e-5)
    assert torch.allclose(end.model.buffer, right.model.buffer, rtol=0, atol=1e-5)


@dataclass(frozen=True)
class Fails(FedAvg):
    """The client with seven examples fails after its training."""

    def client(self, work: Work, message: Message, memory: Payload, data: ClientData, round: int, seed: int) -> Reply:
        reply = super().client(work, message, memory, data, round, seed)
        if len(data) == 7:
            raise ValueError("on purpose")
        return reply


def test_a_client_that_fails_is_named_as_if_it_trained_alone() -> None:
    federation = digits(sizes=UNEQUAL, method=FedAvg()).training(replace(LOCAL, batched=True))
    with watched_training() as trained, pytest.raises(ClientError, match=r"client 3, round 1.*on purpose"):
        federation.run(Fails(), federation.plan(1, blocks=1))
    assert trained.called


def test_a_graphs_step_that_waits_is_named_with_its_client() -> None:
    federation = clients_of(partial(Net, change="branches"), SMALL, replace(LOCAL, graphs=True)).on(GPU)
    with pretend_graphs(), PretendGPU(), pytest.raises(ClientError, match=r"client 0, round 1.*cannot be recorded"):
        federation.run(FedAvg(), federation.plan(1))


@pytest.mark.parametrize(
    ("module", "of_batched", "of_graphs"),
    [(Net, None, None), (partial(Net, norm=True), "statistics of its batches", None),
     (partial(Net, dropout=0.5), "random", None),
     (partial(Net, change="reads its clock"), "reads self.current_epoch", "reads self.current_epoch"),
     (partial(Net, change="reads its place"), "batch_idx", r"\(batch_idx\)"),
     (partial(Net, change="branches"), "data-dependent|vmap", None),
     (partial(Net, change="draws from numpy"), None, "random numbers from Python or numpy"),
     (partial(Net, lambda p: ([sgd := torch.optim.SGD(p, 0.1)], [StepLR(sgd, 1)])), "scheduler", "scheduler"),
     (partial(Net, lambda p: torch.optim.RMSprop(p, 0.1)), "is RMSprop", "is RMSprop"),
     (partial(Net, lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, dampening=0.5)), None, "dampening")],
    ids=range(10),
)  # fmt: skip
def test_a_module_that_batching_or_graphs_cannot_take_says_why_and_stays_unchanged(
    module: Callable[[], LightningModule], of_batched: str | None, of_graphs: str | None
) -> None:
    federation = clients_of(module, SMALL, LOCAL)
    for flaw, why in ((vmap_clients.flaw, of_batched), (cuda_graphs.flaw, of_graphs)):
        work, data = federation.work(), federation.data.clients[0]
        before = [t.clone() for t in (work.params.buffer, *work.module.buffers())]
        reason = flaw(work, (data.x[:2], data.y[:2]))
        assert reason is None if why is None else re.search(why, reason or "")
        after = (work.params.buffer, *work.module.buffers())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert {"right", "number"} <= work.local(work.snapshot(), data, 0).metrics.keys()  # it logs as before


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"algorithm": "fedprox", "federation.blocks": 2}, None),
        ({"algorithm": "moon", "federation.blocks": 2}, "changes the loss, learning rate or gradient"),
        ({}, "4 clients of a round are in a block each"),  # preset smoke
        ({"federation.blocks": 1, "federation.participation": 0.25}, "a round has one client"),
        ({"client.batched": False, "client.graphs": True}, "client.graphs changes nothing"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs change something on a GPU")
def test_a_run_says_where_clients_are_trained_alone(values: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    few = {"federation.rounds": 1, "data.limit": 60, "client.epochs": 1, "wandb": "off", "measure.every": 0}
    config, messages = experiment("smoke", values={"client.batched": True, **few, **values}), list[str]()
    fedcommons.run(config, tmp_path / "run", say=messages.append)
    notes = [text for text in messages if text.startswith(("client.batched", "client.graphs"))]
    assert [words in note for note in notes] == [True] if words else not notes
    if "client.graphs" not in values:
        other = experiment("smoke", values={**few, **values})
        assert same_results(config, other) == ["client.batched"]  # so no run goes on with another value
        assert deciding(config).keys() - deciding(other).keys() == {"client.batched"}


def test_the_pretended_recording_keeps_what_python_decided() -> None:
    """The tests above would detect a number of Python's that changes between steps."""
    x, factor = torch.ones(3), [2.0]
    with pretend_graphs():
        launch = cuda_graphs.record(lambda: x.mul_(factor[0]).add_(torch.zeros(3) + 1))  # pyright: ignore[reportArgumentType]
    assert x.tolist() == [1, 1, 1]
    factor[0] = 100.0
    launch()
    launch()
    assert x.tolist() == [7, 7, 7]
