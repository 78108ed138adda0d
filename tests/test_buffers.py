"""BatchNorm's statistics in a federation, averaged with the model or kept by each client; and clients that are late."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.core.algorithm import BUFFERS, Replies, State
from fedcommons.core.executor import Executor
from fedcommons.core.local import LocalSGD
from fedcommons.core.work import Work
from fedcommons.federation import checkpoint
from fedcommons.federation.evaluation import ModelTask, evaluate
from fedcommons.federation.participation import participants
from fedcommons.federation.rounds import Standing
from fedcommons.seeds import seed_for, set_default_generator
from fedcommons.tensors import Flat, Payload, data, flat
from fedcommons.testing import Federation, digits
from lightning_modules import Classifier
from lightning_modules.networks import CNN

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
    kept = start.memory.get(client, {}).get(BUFFERS, start.buffers)
    assert isinstance(kept, Flat)
    work.load_buffers(kept if len(kept) else work.initial_buffers)
    seed = seed_for(0, "client", number, client)
    LOCAL.run(work, start.model, federation.data.clients[client], seed)
    return work.buffers


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_averages_are_weighted_means_of_the_clients(weighting: str, federation: Federation, tmp_path: Path) -> None:
    federation = replace(federation, weighting=weighting)
    algorithm, plan = FedAvg(), federation.plan(2)
    model = data(federation.model).nbytes
    now = replace(federation.start(algorithm, plan), buffers=federation.work().initial_buffers)
    for after, facts in (rounds := federation.play(algorithm, plan, start=now)):
        assert facts["comm/up_bytes"] == facts["comm/down_bytes"] == 5 * (model + 4 * FLOATS)
        ended = [_trained(federation, i, now, after.round).buffer.double() for i in range(5)]
        weights = torch.tensor([len(federation.data.clients[i]) if weighting == "samples" else 1 for i in range(5)])
        mean = (torch.stack(ended) * weights[:, None]).sum(0) / weights.sum()
        assert torch.allclose(after.buffers.buffer.double(), mean, rtol=1e-6, atol=0)
        assert not after.memory
        now = after
    checkpoint.save(tmp_path, rounds[0][0])
    resumed = federation.play(algorithm, plan, start=checkpoint.load_latest(tmp_path))[-1][0]
    assert torch.equal(resumed.buffers.buffer, now.buffers.buffer)


class _Asks(FedAvg):
    """Takes BatchNorm's statistics of every client into its state."""

    sees_statistics = True

    def merge(self, executor: Executor, state: State, total: Payload, replies: Replies, round: int, seed: int) -> State:
        after = super().merge(executor, state, total, replies, round, seed)
        return {**after, **{str(i): reply.each[BUFFERS] for i, reply in replies.items() if BUFFERS in reply.each}}


def test_a_method_that_asks_sees_each_clients_statistics_and_the_average_stays(federation: Federation) -> None:
    plan, start = federation.plan(2), federation.start(FedAvg(), federation.plan(2))
    start = replace(start, buffers=federation.work().initial_buffers)
    ours, theirs = (federation.play(algorithm, plan, start=start) for algorithm in (_Asks(), FedAvg()))
    for (now, facts), (other, expected) in zip(ours, theirs, strict=True):
        assert torch.equal(now.buffers.buffer, other.buffers.buffer)
        assert facts == expected  # bytes too
    for i in range(5):
        assert torch.equal(flat(ours[0][0].state, str(i)).buffer, _trained(federation, i, start, 1).buffer)
    assert set(federation.play(_Asks(), replace(plan, keep_buffers=True))[-1][0].state) == {"model"}  # clients keep it


def test_local_statistics_are_not_sent_and_reach_the_same_client(federation: Federation, tmp_path: Path) -> None:
    algorithm = FedAvg()
    plan = replace(federation.plan(4, participation=0.4, seed=0), keep_buffers=True)
    now = federation.start(algorithm, plan)
    model = data(federation.model).nbytes
    for after, facts in (rounds := federation.play(algorithm, plan)):
        drawn = participants(5, 0.4, 0, after.round)
        for client in drawn:
            ended = _trained(federation, client, now, after.round).buffer
            assert torch.equal(flat(after.memory[client], BUFFERS).buffer, ended)
        for client in set(now.memory) - set(drawn):
            assert after.memory[client] is now.memory[client]
        assert facts["comm/up_bytes"] == facts["comm/down_bytes"] == 2 * model
        assert len(after.buffers) == 0
        now = after
    assert len(now.memory) > 2
    checkpoint.save(tmp_path, rounds[1][0])
    resumed = federation.play(algorithm, plan, start=checkpoint.load_latest(tmp_path))[-1][0]
    assert torch.equal(resumed.model.buffer, now.model.buffer)


def test_evaluation_uses_the_averaged_statistics_or_those_of_what_it_sees(federation: Federation) -> None:
    executor = federation.serial(FedAvg())
    end = federation.play(FedAvg(), federation.plan(2), executor)[-1][0]
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

    found = [evaluate(executor, ModelTask(end.model, b), {"test": 100})["test/loss"] for b in (end.buffers, None)]
    assert found[0] == pytest.approx(loss(lambda work: work.load_buffers(end.buffers)), rel=1e-5)
    assert found[1] == pytest.approx(loss(train_norms), rel=1e-5)
    assert found[0] != pytest.approx(found[1], rel=1e-3)
