"""What clients keep: memory in RAM and in files, and BatchNorm statistics, local or averaged with the model."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons import ClientError, LocalSGD, Work, seed_for, set_default_generator
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import BUFFERS
from fedcommons.core.evaluation import ModelTask, evaluate
from fedcommons.federation import checkpoint, rounds
from fedcommons.federation.client_memory import ClientMemory, remove_files
from fedcommons.federation.client_sampling import participants
from fedcommons.federation.rounds import Standing
from fedcommons.flat_tensors import Flat, Layout, Payload, data, flat, nbytes
from fedcommons.testing import Federation, digits
from fedcommons.testing.comparing import raw
from lightning_modules import Classifier
from lightning_modules.networks import CNN

LAYOUT = Layout(("w",), ((10,),))


def _payload(value: float) -> Payload:
    return {"control": Flat(LAYOUT, torch.full((10,), value)), "times": torch.tensor(int(value))}  # 48 bytes


def _values(memory: ClientMemory) -> dict[int, float]:
    return {client: float(data(payload["control"])[0]) for client, payload in memory.items()}


@pytest.mark.long
def test_the_bound_holds_and_no_value_changes(tmp_path: Path) -> None:
    """A plain dict is the reference, over many rounds of random clients."""
    draw = np.random.default_rng(0)
    memory, reference = ClientMemory(cap_bytes=5 * 48, folder=tmp_path), {}
    for number in range(1, 40):
        new = {int(i): float(draw.integers(1000)) for i in draw.choice(20, 3, replace=False)}
        memory = memory.updated(number, {i: _payload(v) for i, v in new.items()})
        reference |= new
        assert sum(nbytes(payload) for payload in memory.in_ram.values()) <= 5 * 48
        assert set(new) <= set(memory.in_ram)  # the latest stay
        assert _values(memory) == reference
    assert len(memory.in_ram) == 5
    assert len(memory.in_files) == len(reference) - 5


def test_an_earlier_memory_is_left_as_it_was(tmp_path: Path) -> None:
    """In files, or in RAM where there is no folder, whatever the bound; a user's own file stays."""
    (tmp_path / "client-best.safetensors").write_text("mine")
    for folder in (tmp_path, None):
        first = ClientMemory(cap_bytes=100, folder=folder).updated(1, {i: _payload(float(i)) for i in range(4)})
        second = first.updated(2, {0: _payload(7.0), 3: _payload(9.0)})
        assert _values(first) == {0: 0, 1: 1, 2: 2, 3: 3}
        assert _values(second) == {0: 7, 1: 1, 2: 2, 3: 9}
        assert len(second.in_ram) == (2 if folder else 4)
    assert len(ClientMemory()) == 0
    remove_files(tmp_path, set())
    assert [path.name for path in tmp_path.iterdir()] == ["client-best.safetensors"]


def test_a_file_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    memory = ClientMemory(cap_bytes=0, folder=tmp_path).updated(1, {5: _payload(5), 6: _payload(6)})
    (tmp_path / memory.in_files[5]).write_bytes(b"short")
    with pytest.raises(ClientError, match=r"memory of client 5 cannot be read.*truncated or altered"):
        memory[5]
    assert _values(memory.restored({6: memory.in_files[6]})) == {6: 6}
    with pytest.raises(ClientError, match="client 5"):
        memory.restored(memory.in_files)
    for path in tmp_path.glob("*round-000001*"):
        path.unlink()
    with pytest.raises(ClientError, match="file with the memory of client 6 is missing"):
        memory[6]


def test_a_checkpoint_names_files_and_removes_those_that_nothing_names(tmp_path: Path) -> None:
    memory = ClientMemory(cap_bytes=2 * 48, folder=tmp_path / "memory")
    for number in range(1, 9):
        memory = memory.updated(number, {i: _payload(100 * number + i) for i in (number % 4, (number + 1) % 4)})
        checkpoint.save(tmp_path / "checkpoints", Standing(number, {"model": Flat(LAYOUT, torch.zeros(10))}, memory))
        back = checkpoint.load_latest(tmp_path / "checkpoints", ClientMemory(cap_bytes=96, folder=tmp_path / "memory"))
        assert back is not None
        assert _values(back.memory) == _values(memory)
        assert list(back.memory) == list(memory)  # who goes to a file next is the same
    files = sorted((tmp_path / "checkpoints").glob("*.json"))
    named = {name for path in files for name in json.loads(path.read_text())["files"].values()}
    assert {path.name for path in (tmp_path / "memory").glob("*.safetensors")} == named
    assert len(named) <= 4
    (tmp_path / "memory" / memory.in_files[0]).write_bytes(b"")  # a damaged one gives way to the one before
    back = checkpoint.load_latest(tmp_path / "checkpoints", ClientMemory(cap_bytes=0, folder=tmp_path / "memory"))
    assert back is not None
    assert (back.round, _values(back.memory)[0]) == (7, 700)


@pytest.mark.parametrize("name", ["scaffold", "fedbn"])
@pytest.mark.long
def test_a_federation_is_the_same_wherever_its_memory_is(name: str, quick: Any, tmp_path: Path) -> None:
    """With no RAM at all for it, broken off half-way and continued: the bits of one that kept all in RAM."""
    algorithm = quick(name)
    federation = digits(dropout=0.3, method=algorithm).training(LocalSGD(1, 5))

    def play(memory: ClientMemory, upto: int, start: Standing | None = None) -> Standing:
        plan = federation.plan(4, participation=0.6)
        start = start or Standing(0, algorithm.start(federation.model, plan.facts, plan.seed), memory)
        played = rounds.run(algorithm, federation.serial(algorithm), plan, start)
        return list(islice(played, upto - start.round))[-1][0]

    in_ram = play(ClientMemory(), 4)
    on_disk = ClientMemory(cap_bytes=0, folder=tmp_path / "memory")
    checkpoint.save(tmp_path, play(on_disk, 2))
    in_files = play(on_disk, 4, checkpoint.load_latest(tmp_path, on_disk))
    assert raw(in_files.state) == raw(in_ram.state)
    assert in_files.memory.keys() == in_ram.memory.keys()
    assert not in_files.memory.in_ram
    for client, payload in in_ram.memory.items():
        assert all(torch.equal(data(x), data(in_files.memory[client][n])) for n, x in payload.items())


# BatchNorm statistics

LOCAL = LocalSGD(epochs=2, batch_size=5)
FLOATS = 2 * 3 + 2 * 4  # mean and variance of two layers with 3 and 4 channels


def _module() -> LightningModule:
    set_default_generator("initial weights of the tests")
    return Classifier(CNN((1, 8, 8), 10, channels=(3, 4), hidden=16, batch_norm=True), lr=0.1, mean=(0.3,), std=(0.4,))


@pytest.fixture
def federation() -> Federation:
    return replace(digits(), module=_module)


def _trained(federation: Federation, client: int, start: Standing, number: int) -> Flat:
    """Return the statistics with which ``client`` ends round ``number``, without the engine."""
    work = federation.work()
    statistics = start.memory.get(client, {}).get(BUFFERS, start.buffers)
    assert isinstance(statistics, Flat)
    work.load_buffers(statistics if len(statistics) else work.initial_buffers)
    seed = seed_for(0, "client", number, client)
    LOCAL.run(work, start.model, federation.data.clients[client], seed)
    return work.buffers


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_averages_are_weighted_means_of_the_clients(weighting: str, federation: Federation, tmp_path: Path) -> None:
    federation = replace(federation, weighting=weighting)
    algorithm, plan = FedAvg(), federation.plan(2)
    model = data(federation.model).nbytes
    now = replace(federation.start(algorithm, plan), buffers=federation.work().initial_buffers)
    for after, facts in (rounds := federation.run(algorithm, plan, start=now)):
        assert facts["comm/up_bytes"] == facts["comm/down_bytes"] == 5 * (model + 4 * FLOATS)
        ended = [_trained(federation, i, now, after.round).buffer.double() for i in range(5)]
        weights = torch.tensor([len(federation.data.clients[i]) if weighting == "samples" else 1 for i in range(5)])
        mean = (torch.stack(ended) * weights[:, None]).sum(0) / weights.sum()
        assert torch.allclose(after.buffers.buffer.double(), mean, rtol=1e-6, atol=0)
        assert not after.memory
        now = after
    checkpoint.save(tmp_path, rounds[0][0])
    resumed = federation.run(algorithm, plan, start=checkpoint.load_latest(tmp_path))[-1][0]
    assert torch.equal(resumed.buffers.buffer, now.buffers.buffer)


def test_local_statistics_are_not_sent_and_reach_the_same_client(federation: Federation, tmp_path: Path) -> None:
    algorithm = FedAvg()
    plan = replace(federation.plan(4, participation=0.4, seed=0), keep_buffers=True)
    now = federation.start(algorithm, plan)
    model = data(federation.model).nbytes
    for after, facts in (rounds := federation.run(algorithm, plan)):
        clients = participants(5, 0.4, 0, after.round)
        for client in clients:
            ended = _trained(federation, client, now, after.round).buffer
            assert torch.equal(flat(after.memory[client], BUFFERS).buffer, ended)
        for client in set(now.memory) - set(clients):
            assert after.memory[client] is now.memory[client]
        assert facts["comm/up_bytes"] == facts["comm/down_bytes"] == 2 * model
        assert len(after.buffers) == 0
        now = after
    assert len(now.memory) > 2
    checkpoint.save(tmp_path, rounds[1][0])
    resumed = federation.run(algorithm, plan, start=checkpoint.load_latest(tmp_path))[-1][0]
    assert torch.equal(resumed.model.buffer, now.model.buffer)


def test_evaluation_uses_the_averaged_statistics_or_those_of_what_it_sees(federation: Federation) -> None:
    executor = federation.serial(FedAvg())
    end = federation.run(FedAvg(), federation.plan(2), executor)[-1][0]
    x, y = (getattr(federation.data.sets["test"], n) for n in "xy")

    def loss(prepare: Callable[[Work], None]) -> float:
        work = federation.work()
        work.load(end.model)
        work.module.eval()
        prepare(work)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(work.module(x), y))

    def train_norms(work: Work) -> None:
        for layer in work.module.modules():
            layer.train(isinstance(layer, nn.BatchNorm2d))

    losses = [evaluate(executor, ModelTask(end.model, b), {"test": 100})["test/loss"] for b in (end.buffers, None)]
    assert losses[0] == pytest.approx(loss(lambda work: work.load_buffers(end.buffers)), rel=1e-5)
    assert losses[1] == pytest.approx(loss(train_norms), rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
