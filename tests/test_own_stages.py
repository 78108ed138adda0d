"""Stages and methods of somebody else's: owners, weights, what they declare and what they do not."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.config import presets
from fedcommons.config.flat import override
from fedcommons.config.sections import Data, Partition
from fedcommons.core.algorithm import Common
from fedcommons.core.local import LocalSGD
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.core.worker import RunData
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import ClientError, UserError
from fedcommons.runs import inputs
from fedcommons.runs.experiment import run
from fedcommons.runs.inputs import deal
from fedcommons.seeds import numpy_generator, set_default_generator
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.real import Real
from fedcommons.sharing.stage import (
    Assigned,
    Contribution,
    Contributions,
    share,
    share_by_method,
)
from fedcommons.testing import Federation
from lightning_modules import Classifier
from lightning_modules.networks import Linear

DATASET = inputs.load(Data())
N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259


def dealt(name: str = "dirichlet_niid", seed: int = 0) -> Dealt:
    """The digits of five clients, unequal ones unless cut IID."""
    cut = deal(Partition(name, n_clients=5), DATASET.train.y.numpy(), DATASET.n_classes, seed)
    return Dealt(Clients(DATASET.train, cut.rows), DATASET.n_classes, DATASET.flip, seed)


@dataclass(frozen=True)
class NoisedMeans:
    """Every client publishes one mean image with noise; everybody gets all of them, together as heavy as one example.

    One example, its pixels in [0, 1], moves a mean by at most side/n.
    """

    sigma: float = 0.1

    def check(self, fields: Mapping[str, Any]) -> None:
        if fields["dp.local"]:
            raise UserError("dp.local must be false with noised means.")

    def check_dealt(self, dealt: Dealt) -> None:
        if min(dealt.own.sizes) < 2:
            raise UserError("every client needs two images.")

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        assert not drawn
        means = []
        for client in dealt.own:
            x = client.x.float().mean(0, keepdim=True).to(client.x.dtype)
            means.append(Contribution(Examples(x, client.y.mode().values.view(1))))
        return Contributions.of_made(dealt, means)

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        store, releases, sd = contributed.store, [], []
        for client, n in zip(contributed.owners.tolist(), dealt.own.sizes, strict=True):
            sensitivity = 8 / n
            releases.append(
                Release(
                    client,
                    ("mean image",),
                    mechanism=SAMPLED_GAUSSIAN,
                    sigma=self.sigma,
                    sensitivity=sensitivity,
                    steps=1,
                )
            )
            sd.append(255 * self.sigma * sensitivity)
        noise = numpy_generator(dealt.seed, "noise").standard_normal((len(sd), 64)) * np.array(sd)[:, None]
        rows = torch.from_numpy(contributed.rows)
        x = store.x.clone()
        x[rows] = (x[rows] + torch.from_numpy(noise).view(-1, *dealt.shape)).clamp(0, 255).to(torch.uint8)
        return replace(contributed, store=Examples(x, store.y)), releases

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        m = len(released.rows)
        weights = [np.concatenate([np.ones(n), np.full(m, 1 / m)]) for n in dealt.own.sizes]
        everybody = [released.rows] * len(dealt.own)
        return Assigned(dealt.own.rows, everybody, weights, n_own=dealt.own.sizes, pool=[released.rows])


def test_somebody_elses_stage_has_owners_events_and_weights() -> None:
    """With nothing of ours edited for it."""
    given = dealt("iid")
    shared = share(NoisedMeans(), given)
    assert [r.client for r in shared.releases] == list(range(5))
    assert all(r.covered for r in shared.releases)
    assert [r.covered for r in share(NoisedMeans(0.0), given).releases] == [False] * 5
    assert shared.owners is not None
    assert shared.owners[N_TOTAL:].tolist() == list(range(5))
    assert shared.p == pytest.approx(25 / (N_TOTAL + 25))
    assert shared.data.pool is not None
    assert shared.data.pool.sizes == [5]
    assert shared.traffic.once == 6 * 5 * 65
    data, own = shared.data.clients[2], shared.data.own[2]
    assert data.weight is not None
    assert torch.allclose(data.weight, torch.cat([torch.ones(259), torch.full((5,), 0.2)]) * (264 / 260))  # mean 1
    assert data.size == pytest.approx(260)
    assert torch.equal(data.x[:259], own.x)
    assert own.weight is None
    plain = share(NoisedMeans(0.0), given).data.clients[2].x[-3]
    assert torch.equal(plain, DATASET.train.x[given.own.rows[2]].float().mean(0).to(torch.uint8))
    assert not torch.equal(data.x[-3], plain)


@pytest.mark.parametrize("n_own", [[-1], 3, ["x"] * 5, [float("nan")] * 5, [1, 2, 3, 4], [-1] * 5])
def test_a_stage_counts_own_rows_for_each_client(n_own: object) -> None:
    class Odd(NoisedMeans):
        def assign(self, dealt, released: Contributions) -> Assigned:
            return Assigned(dealt.own.rows, [released.rows] * len(dealt.own), n_own=n_own)  # pyright: ignore

    with pytest.raises(UserError, match="n_own as a number of 0 or more for each of 5 clients"):
        share(Odd(), dealt("iid"))


@dataclass(frozen=True)
class Silent(NoisedMeans):
    """Declares nothing."""

    def release(self, dealt: Dealt, contributed: Contributions) -> tuple[Contributions, Sequence[Release]]:
        return super().release(dealt, contributed)[0], super().release(dealt, contributed)[1][:2]


@dataclass(frozen=True)
class Smuggler(Real):
    """Contributes nothing, and hands client 3's first image to client 0."""

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        rows = list(dealt.own.rows)
        nothing = rows[0][:0]
        return Assigned(rows, [rows[3][:1], *[nothing] * 4])


def test_what_a_stage_does_not_declare_is_uncovered() -> None:
    given = dealt("iid")
    assert [(r.client, r.covered) for r in share(Silent(), given).releases] == [
        (0, True), (1, True), (2, False), (3, False), (4, False)
    ]  # fmt: skip
    smuggled = share(Smuggler(), given)
    assert [(r.client, r.covered) for r in smuggled.releases] == [(3, False)]
    assert smuggled.disclosed == 1
    assert share(NoisedMeans(), given).disclosed == 0  # what is made of real images is none


@dataclass(frozen=True)
class Whisperer:
    """A method that shares and declares nothing."""

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        return Common(clients[0:1].store[slice(0, 1)], 0)


@dataclass(frozen=True)
class Moves(Real):
    """Hands out rows as ``how`` says, and states no bytes; client i contributes two rows that are made."""

    how: Callable[[Dealt, Contributions], Assigned]

    def make(self, dealt: Dealt, drawn: Sequence[Contribution]) -> Contributions:
        return Contributions.of_made(dealt, [Contribution(dealt.own.store[rows[:2]]) for rows in dealt.own.rows])

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        return self.how(dealt, released)


def _around(dealt: Dealt, released: Contributions) -> list[np.ndarray]:
    """Each client's contributions for the next client."""
    mine = released.of_each(len(dealt.own))
    return [mine[-1], *mine[:-1]]


NONE = np.zeros(0, np.int64)
MOVES: dict[str, tuple[Callable[[Dealt, Contributions], Assigned], int]] = {
    "to all others": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5), 10 + 4 * 10),
    "to all others, each row listed three times": (lambda d, r: Assigned(d.own.rows, [np.tile(r.rows, 3)] * 5), 50),
    "to all, out of a pool": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5, pool=[r.rows]), 10 + 5 * 10),
    "to the next client": (lambda d, r: Assigned(d.own.rows, _around(d, r)), 10 + 10),
    "to the next client, as if kept": (
        lambda d, r: Assigned([np.concatenate(b) for b in zip(d.own.rows, _around(d, r), strict=True)], [NONE] * 5), 20
    ),
    "to the server's pool": (lambda d, r: Assigned(d.own.rows, pool=[r.rows]), 10),
    "to a server that drops half of them": (
        lambda d, r: Assigned(d.own.rows, [r.rows[:5], *[r.rows[:0]] * 4], pool=[r.rows[:5]]), 10 + 5
    ),
    "nowhere": (lambda d, r: Assigned(d.own.rows, r.of_each(5)), 0),
    "one real row that was not contributed": (
        lambda d, r: Assigned(d.own.rows, [d.own.rows[3][:1], *r.of_each(5)[1:]], pool=[]), 2 + 1 + 1
    ),
    "what the stage states": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5, once=65 * 7), 7),
    "nothing, as the stage states": (lambda d, r: Assigned(d.own.rows, [r.rows] * 5, once=0), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_the_engine_counts_the_bytes_of_the_rows_that_travel(name: str) -> None:
    how, examples = MOVES[name]
    assert share(Moves(how), dealt("iid")).traffic.once == examples * (8 * 8 + 1)


@pytest.mark.parametrize("once", [-1, 1.5, "x", float("nan")])
def test_bytes_that_a_stage_states_are_a_number(once: Any) -> None:
    with pytest.raises(UserError, match="once as a whole number of bytes"):
        share(Moves(lambda d, r: Assigned(d.own.rows, once=once)), dealt("iid"))


def test_what_a_method_shares_is_counted_unless_it_says_so() -> None:
    class Sharing(Whisperer):
        def __init__(self, nbytes: int | None) -> None:
            self.nbytes = nbytes

        def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
            return Common(clients.store[slice(0, 3)], self.nbytes)

    shared = share(Real(), dealt("iid"))
    assert share_by_method(shared, Sharing(None), 10, 0).traffic.once == 5 * 3 * (8 * 8 + 8)
    assert share_by_method(shared, Whisperer(), 10, 0).traffic.once == 0
    with pytest.raises(UserError, match=r"Common\.nbytes"):
        share_by_method(shared, Sharing(-1), 10, 0)


def test_what_a_method_does_not_declare_is_uncovered() -> None:
    releases = share_by_method(share(Real(), dealt("iid")), Whisperer(), 10, 0).releases
    assert [(r.client, r.covered) for r in releases] == [(client, False) for client in range(5)]


@dataclass(frozen=True)
class Forgetful(NoisedMeans):
    """Leaves a client out."""

    weights: bool = False

    def assign(self, dealt: Dealt, released: Contributions) -> Assigned:
        whole = super().assign(dealt, released)
        assert whole.weights is not None
        if self.weights:
            return replace(whole, weights=whole.weights[1:])
        return replace(whole, received=whole.received[1:])


@pytest.mark.parametrize(("weights", "why"), [(False, "shorter"), (True, "one weight for each of its examples")])
def test_a_stage_that_leaves_a_client_out_is_found_out(weights: bool, why: str) -> None:
    with pytest.raises(ClientError, match=why):
        share(Forgetful(weights=weights), dealt("iid"))


def test_the_weights_of_a_stage_reach_the_loss() -> None:
    """One full-batch step of every client is the gradient of sum_j w_j F(x, xi_j) / sum_j w_j, written out."""
    shared, lr = share(NoisedMeans(), dealt("iid")), 0.5

    def module() -> Classifier:
        set_default_generator("weights of the tests")
        return Classifier(Linear((1, 8, 8), 10), lr=lr, mean=DATASET.mean, std=DATASET.std)

    federation = Federation(shared.data, module).training(LocalSGD(1, 1000))
    ((after, _),) = federation.play(FedAvg(), federation.plan(1))
    step = (federation.model.buffer - after.model.buffer) / lr
    expected, found = torch.zeros_like(step), module()
    for data in shared.data.clients:
        assert data.weight is not None
        losses = torch.nn.functional.cross_entropy(found(data.x), data.y, reduction="none")
        value = sum(w * loss for w, loss in zip(data.weight.tolist(), losses, strict=True)) / len(data)
        assert isinstance(value, Tensor)
        expected += torch.cat([g.flatten() for g in torch.autograd.grad(value, list(found.parameters()))]) / 5
    assert torch.allclose(step, expected, rtol=0, atol=1e-5)
    unweighted = Federation(
        RunData(Clients(shared.data.clients.store, list(shared.data.clients.rows)), shared.data.own), module
    )
    unweighted = unweighted.training(LocalSGD(1, 1000))
    ((other, _),) = unweighted.play(FedAvg(), unweighted.plan(1))
    assert (other.model.buffer - after.model.buffer).abs().max() > 1e-3


def test_somebody_elses_stage_is_run_and_may_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stage = "test_own_stages:NoisedMeans"
    monkeypatch.setitem(sys.modules, "test_own_stages", sys.modules[__name__])
    values = {"sharing.setting": stage, "federation.rounds": 1, "measure.every": 1, "tracking.wandb": "off"}
    config = presets.experiment("smoke", "digits", values)
    summary = run(config, tmp_path / "run")
    assert summary["p"] == pytest.approx(16 / 216)
    assert summary["bytes_once"] == 5 * 4 * 65
    assert {"delta_sq", "zeta_hat_sq"} <= summary.keys()
    with pytest.raises(UserError, match=r"dp\.local must be false"):
        run(override(config, {"dp.local": True}), tmp_path / "other")
    assert not (tmp_path / "other").exists()
