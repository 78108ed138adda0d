"""FedDDPM: FedAvg's step and then training on the pool; FedDDPM+ corrects once, after the first slow round."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import fedcommons
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.fedddpm import FedDDPM
from fedcommons.config import presets
from fedcommons.core.local import LocalSGD
from fedcommons.errors import UserError
from fedcommons.runs.build import prepare
from fedcommons.seeds import generator, seed_for
from fedcommons.tensors import data, scalar
from fedcommons.testing import Federation, digits
from lightning_modules import Classifier

LR = 0.05


@pytest.fixture
def federation() -> Federation:
    """Softmax regression; the pool is the clients' data."""
    return digits(linear=True, lr=LR, method=FedDDPM()).training(LocalSGD(1, 16))


def on_pool(federation: Federation, model: torch.Tensor, number: int, epochs: int) -> torch.Tensor:
    """SGD on the pool in round ``number``, as a loop of its own."""
    store, module = federation.data.clients.store, federation.module()
    assert isinstance(module, Classifier)
    x = module.normalise(store.x).flatten(1).double()
    weight, bias = model.double()[:640].reshape(10, 64).clone(), model.double()[640:].clone()
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=generator(seed_for(0, "merge", number), "order", epoch))
        for rows in order.split(16):
            error = F.softmax(x[rows] @ weight.T + bias, 1) - F.one_hot(store.y[rows], 10)
            weight -= LR * error.T @ x[rows] / len(rows)
            bias -= LR * error.mean(0)
    return torch.cat([weight.flatten(), bias])


def test_a_round_is_fedavgs_and_then_sgd_on_the_pool(federation: Federation) -> None:
    averaged = federation.play(FedAvg(), federation.plan(1))[0][0]
    corrected = federation.play(FedDDPM(server_epochs=2), federation.plan(1))[0][0]
    expected = on_pool(federation, data(averaged.model), 1, 2)
    torch.testing.assert_close(data(corrected.model).double(), expected, rtol=0, atol=2e-6)


def test_the_plus_corrects_once_after_the_first_slow_round(federation: Federation) -> None:
    """Where every round from the second on counts as slow, the second is corrected; where none does, it is FedAvg."""
    plan = federation.plan(4)
    plain = [data(now.model) for now, _ in federation.play(FedAvg(), plan)]
    often = [now for now, _ in federation.play(FedDDPM(correct="slow", slow=0.99), plan)]
    assert [int(scalar(now.state, "corrections")) for now in often] == [0, 1, 1, 1]
    assert torch.equal(data(often[0].model), plain[0])
    torch.testing.assert_close(data(often[1].model).double(), on_pool(federation, plain[1], 2, 1), rtol=0, atol=2e-6)
    never = [now for now, _ in federation.play(FedDDPM(correct="slow", slow=0.0), plan)]
    losses = [scalar(now.state, "pool_loss") for now in never]
    assert losses == sorted(losses, reverse=True)  # convex, so no round is slow
    assert all(torch.equal(data(now.model), x) for now, x in zip(never, plain, strict=True))


def test_it_needs_a_pool() -> None:
    with pytest.raises(UserError, match=r"use sharing\.setting server_synthetic"):
        prepare(presets.experiment("smoke", "digits", {"algorithm": "fedddpm", "model": "ddpm"}))


@pytest.mark.long
def test_a_diffusion_model_is_federated(tmp_path: Path) -> None:
    """Its loss on test data falls, and the model of the last round draws images."""
    values = {
        "algorithm": "fedddpm", "model": "ddpm", "model.channels": (8, 8), "sharing": "server_synthetic",
        "generator.channels": (8, 8), "generator.epochs": 1, "generator.sampling_steps": 2, "data.limit": 60,
        "partition.n_clients": 2, "client.optimizer": "adam", "client.lr": 0.01, "client.epochs": 4,
        "federation.rounds": 3, "measure.every": 0, "target": "loss <= 1", "tracking.wandb": "off",
        "artifacts": str(tmp_path / "artifacts"),
    }  # fmt: skip
    fedcommons.run(presets.experiment("smoke", "digits", values), tmp_path / "run")
    rounds = fedcommons.load_rounds(tmp_path / "run")
    assert rounds["test/loss"].iloc[-1] < 0.8 * rounds["test/loss"].iloc[0]
    model = fedcommons.load(tmp_path / "run").model
    images = model.ddpm.sample(torch.arange(3), 0, sampler="ddim", steps=2)  # pyright: ignore
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (3, 1, 8, 8))
