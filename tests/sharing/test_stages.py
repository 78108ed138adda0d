"""The sharing stages: who gets which examples, what is covered, what leaves whom, and what copies weigh."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cut_clients import SIZES, numbered, of_digits
from five_clients import DATASET, ONE_ROUND, RECEIPT, N, make_data
from torch import Tensor
from torch.nn.functional import one_hot

from fedcommons import (
    Capabilities,
    ClientDatasets,
    ClientError,
    Clients,
    Common,
    Examples,
    LocalSGD,
    Receipt,
    UserError,
)
from fedcommons.algorithms.fedavg import FedAvg
from fedcommons.algorithms.server_training import ServerTask
from fedcommons.config import presets
from fedcommons.core.communication import images_nbytes
from fedcommons.core.worker import RunData
from fedcommons.federation.server_executor import AtServer
from fedcommons.generators.requests import Contribution
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.runs import build
from fedcommons.runs.experiment import run
from fedcommons.sharing.exchange import Shared, share, share_by_method
from fedcommons.sharing.placement import holdings, n_open, optimal_copies, sample_shareable
from fedcommons.sharing.raw_copies import RawCopies
from fedcommons.sharing.real import Real, ShuffledReal
from fedcommons.sharing.stage import Assigned, Contributions
from fedcommons.sharing.synthetic import LocalSynthetic, ServerSynthetic, ShuffledSynthetic
from fedcommons.testing import Federation, digits
from lightning_modules import Classifier
from lightning_modules.networks import Linear

N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259


def sized(*sizes: int) -> ClientDatasets:
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return ClientDatasets(Clients(DATASET.train, rows), 10, False, 0)


POOLED = torch.cat([c.examples.x for c in numbered()])


def extra(shared: Shared, client: int) -> Tensor:
    start, data = of_digits().clients[client], shared.data.clients[client]
    assert data.n_own == len(start)
    assert torch.equal(data.x[: len(start)], start.x)
    assert torch.equal(data.y[: len(start)], start.y)
    more = data.x[len(start) :]
    assert torch.equal((more[:, 0, 0, 1].long() + 256 * more[:, 0, 0, 2].long()) % 10, data.y[len(start) :])
    return more


def test_local_synthetic_gives_every_client_its_own_images_and_sends_none() -> None:
    shared = share(LocalSynthetic(), of_digits(), numbered())
    for client, contributed in enumerate(numbered()):
        assert torch.equal(extra(shared, client), contributed.examples.x)
    assert shared.traffic.once == 0


def test_shuffled_synthetic_conserves_the_pool_and_mixes_it_with_its_labels() -> None:
    shared = share(ShuffledSynthetic(), of_digits(), numbered())
    each = [extra(shared, client) for client in range(5)]
    received = Counter(x.numpy().tobytes() for images in each for x in images)
    assert received == Counter(x.numpy().tobytes() for x in POOLED)
    assert [len(images) for images in each] == list(SIZES)
    sources = each[0][:, 0, 0, 0]
    assert set(sources.tolist()) == {0, 1, 2, 4}  # images of client i may come from any client (3 gave none)
    assert shared.p == pytest.approx(sum(SIZES) / (N_TOTAL + sum(SIZES)))


def _at_server(data: RunData) -> RunData:
    federation = Federation(data, lambda: Classifier(Linear(DATASET.shape, 10), lr=0.1, mean=(0.0,), std=(1.0,)))
    server, task = AtServer(federation.serial(FedAvg())), ServerTask(FedAvg(), {"model": federation.model}, 1)
    return server.map(lambda worker, *_: worker.data, task, [0])[0]


def test_the_servers_pool_reaches_no_client_and_travels_one_way() -> None:
    shared = share(ServerSynthetic(), of_digits(), numbered())
    assert shared.data.clients is shared.data.real
    assert (shared.p, shared.traffic.once) == (0, sum(SIZES) * (8 * 8 + 1))
    for both in (False, True):
        there = _at_server(replace(shared.data, serves=both))
        assert len(there.clients.store) == len(there.real.store) == 0
        assert (there.pool is not None) == both
    pool = _at_server(shared.data).pool
    assert pool is not None
    assert pool.sizes == [n for n in SIZES if n]
    assert torch.equal(pool.store.x, POOLED)


@pytest.mark.parametrize("p", [0.0, 0.06, 0.29, 0.9])
def test_shuffled_real_swaps_p_of_every_clients_rows_and_conserves_them(p: float) -> None:
    start = of_digits()
    shared = share(ShuffledReal(p), start)
    swapped, foreign = 0, 0
    for after, before in zip(shared.data.clients.rows, start.clients.rows, strict=True):
        assert len(after) == len(before)  # n_i unchanged
        remaining = len(before) - int(p * len(before) + 1e-9)
        assert set(after[:remaining].tolist()) <= set(before.tolist())
        swapped, foreign = swapped + len(before) - remaining, foreign + len(set(after.tolist()) - set(before.tolist()))
    assert sorted(np.concatenate(list(shared.data.clients.rows))) == sorted(np.concatenate(list(start.clients.rows)))
    assert shared.p == pytest.approx(swapped / N_TOTAL)
    assert abs(shared.p - p) <= 5 / N_TOTAL  # within one image a client
    assert shared.traffic.once == 2 * swapped * (8 * 8 + 1)
    assert 0.5 * swapped <= foreign <= swapped
    assert ShuffledReal(0.29).sizes(sized(100, 99)) == [29, 28]


def test_a_share_that_gives_no_client_an_image_is_refused() -> None:
    for kind, p, least in ((ShuffledSynthetic, 0.0038, 1 / 261), (ShuffledReal, 0.0076, 1 / 130)):
        with pytest.raises(UserError, match=rf"sharing\.p = {p:g} .*not one image"):
            kind(p).check_data(sized(129, 130))
        for enough in (0.0, least * 1.001):
            kind(enough).check_data(sized(129, 130))


@pytest.mark.parametrize("stage", [LocalSynthetic(), ShuffledSynthetic(), ServerSynthetic()], ids=str)
def test_synthetic_images_are_as_covered_as_their_generators_say(stage: LocalSynthetic) -> None:
    for receipt in (RECEIPT, None, Receipt()):
        releases = share(stage, of_digits(), numbered(receipt)).releases
        assert [r.client for r in releases] == [0, 1, 2, 4]
        for r in releases:
            assert r.what == ("synthetic images",)
            assert r.covered == (receipt is RECEIPT)
            if receipt is RECEIPT:
                assert (r.q, r.sigma, r.sensitivity, r.steps) == (0.1, 1.5, 1.0, 20)


def test_contributions_of_another_type_would_change_the_real_examples() -> None:
    x = torch.zeros(2, *DATASET.shape)
    with pytest.raises(ValueError, match=r"torch\.uint8 \(1, 8, 8\)"):
        Contributions.from_generated(of_digits(), [Contribution(Examples(x, torch.zeros(2, dtype=torch.int64)))] * 5)


NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Means:
    """Every client publishes its mean image; all get all of them, together as heavy as one example."""

    declared: int = N
    change: Callable[[Assigned], Assigned] = lambda rows: rows

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        means = [client.x.float().mean(0, keepdim=True).to(torch.uint8) for client in client_data.clients]
        each = [Contribution(Examples(x, torch.zeros(1).long())) for x in means]
        return Contributions.from_generated(client_data, each)

    def release(self, client_data: ClientDatasets, contributed: Contributions) -> tuple[Contributions, Any]:
        noise: dict[str, Any] = {"mechanism": SAMPLED_GAUSSIAN, "sigma": 1.0, "sensitivity": 0.1, "steps": 1}
        return contributed, [Release(i, ("mean image",), **noise) for i in range(self.declared)]

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        m = len(released.rows)
        weights = [np.concatenate([np.ones(n), np.full(m, 1 / m)]) for n in client_data.clients.sizes]
        every = [released.rows] * len(client_data.clients)
        rows, sizes = client_data.clients.rows, client_data.clients.sizes
        return self.change(Assigned(rows, every, weights, n_own=sizes, pool=[released.rows]))


def test_a_users_stage_has_owners_releases_and_weights() -> None:
    start = make_data()
    shared = share(Means(), start)
    assert [(r.client, r.covered) for r in shared.releases] == [(i, True) for i in range(5)]
    assert shared.owners is not None
    assert shared.owners[N_TOTAL:].tolist() == list(range(5))
    assert shared.disclosed == 0  # an image that is computed from real ones is none of them
    data, real = shared.data.clients[2], shared.data.real[2]
    assert data.weight is not None
    assert torch.allclose(data.weight, torch.cat([torch.ones(259), torch.full((5,), 0.2)]) * (264 / 260))  # mean 1
    assert data.size == pytest.approx(260)
    assert torch.equal(data.x[-3], real.x.float().mean(0).to(torch.uint8))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [*(({"n_own": n_own}, UserError, "n_own .*0 or more") for n_own in (3, [float("nan")] * 5, [-1] * 5)),
     *(({"nbytes": once}, UserError, "nbytes .*number of bytes") for once in (-1, 1.5)),
     ({"received": [NONE] * 4}, ClientError, "shorter"),
     ({"weights": [np.ones(264)] * 4}, ClientError, "one weight")],
)  # fmt: skip
def test_rows_weights_and_numbers_are_of_every_client(change: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        share(Means(change=lambda rows: replace(rows, **change)), make_data())
    assert share(Means(change=lambda rows: replace(rows, n_own=[0] * 5, nbytes=0)), make_data()).traffic.once == 0


@dataclass(frozen=True)
class Moves(Real):
    """Hands out rows as ``how`` says, and states no bytes; client i contributes two copies of its rows."""

    how: Callable[[ClientDatasets, Contributions], Assigned]
    labels: Callable[[Tensor], Tensor] = lambda y: y

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        each = [client_data.clients.store[rows[:2]] for rows in client_data.clients.rows]
        each = [replace(examples, y=self.labels(examples.y)) for examples in each]
        return Contributions.from_generated(client_data, [*map(Contribution, each)])

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        return self.how(client_data, released)


MOVES: dict[str, tuple[Callable[[ClientDatasets, Contributions], Assigned], int]] = {
    "to all others": (lambda d, r: Assigned(d.clients.rows, [r.rows] * 5), 10 + 4 * 10),
    "to all others, each row listed three times": (lambda d, r: Assigned(d.clients.rows, [np.tile(r.rows, 3)] * 5), 50),
    "nowhere": (lambda d, r: Assigned(d.clients.rows, r.rows_by_client(5)), 0),
    "one real row that was not contributed": (
        lambda d, r: Assigned(d.clients.rows, [d.clients.rows[3][:1], *r.rows_by_client(5)[1:]], pool=[]), 2 + 1 + 1
    ),
    "what the stage states": (lambda d, r: Assigned(d.clients.rows, [r.rows] * 5, nbytes=65 * 7), 7),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_the_engine_counts_the_bytes_of_the_rows_that_travel(name: str) -> None:
    how, examples = MOVES[name]
    assert share(Moves(how), make_data()).traffic.once == examples * (8 * 8 + 1)
    n_raw = {"one real row that was not contributed": 2, "what the stage states": examples}.get(name, 0)
    soft = share(Moves(how, _one_hot), make_data()).traffic.once
    assert soft == n_raw * (8 * 8 + 1) + (examples - n_raw) * (8 * 8 + 4 * 10)


def _one_hot(y: Tensor) -> Tensor:
    return one_hot(y, 10).float()


def test_one_hot_soft_labels_train_as_classes_do() -> None:
    how, runs = MOVES["to all others"][0], list[Tensor]()
    for labels in (lambda y: y, _one_hot, lambda y: 0.9 * _one_hot(y) + 0.01):
        shared = share(Moves(how, labels), make_data())
        federation = replace(digits(), data=shared.data).training(LocalSGD(1, 50))
        runs.append(federation.run(FedAvg(), federation.plan(1))[0][0].model.buffer)
        assert shared.data.real.store.y.dtype == torch.int64  # so that clients are evaluated as without sharing
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-6)
    assert not torch.allclose(runs[2], runs[0], atol=1e-5)
    with pytest.raises(UserError, match=r"class counts .*soft labels"):
        shared.data.clients.counts(10)  # pyright: ignore[reportPossiblyUnbound]


def test_beside_soft_labels_classes_become_one_hot() -> None:
    """Client 0 has soft labels, client 1 classes, and the other clients contribute nothing."""
    client_data = make_data()
    each = [client_data.clients.store[rows[: 2 * (i < 2)]] for i, rows in enumerate(client_data.clients.rows)]
    soft = [replace(each[0], y=_one_hot(each[0].y)), *each[1:]]
    contributed = Contributions.from_generated(client_data, [*map(Contribution, soft)])
    assert contributed.soft is not None
    assert contributed.soft.equal(_one_hot(torch.cat([examples.y for examples in each])))
    assert contributed.store.y.equal(torch.cat([client_data.clients.store.y, *(examples.y for examples in each)]))


@pytest.mark.parametrize(
    "labels", [lambda y: 2 * _one_hot(y), lambda y: _one_hot(y)[:, :9], lambda y: 2 * _one_hot(y) - _one_hot(1 - y % 2)]
)
def test_soft_labels_are_probabilities(labels: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UserError, match=r"Moves .*soft labels .*\(10, 10\)"):
        share(Moves(MOVES["nowhere"][0], labels), make_data())


class SoftCopies(Real):
    """All clients and the server get copies of two examples of each client, with soft labels."""

    capabilities: ClassVar[Capabilities] = Capabilities(serves_pool=True)

    def make(self, client_data: ClientDatasets, generated: Sequence[Contribution]) -> Contributions:
        return Moves(MOVES["nowhere"][0], _one_hot).make(client_data, generated)

    def assign(self, client_data: ClientDatasets, released: Contributions) -> Assigned:
        return Assigned(client_data.clients.rows, [released.rows] * len(client_data.clients), pool=[released.rows])


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [{"client.batched": True}, {"model": "vae"}, {"algorithm": "feddf", "feddf.rows": "pool"},
     {"algorithm": "fedproto"}],
)  # fmt: skip
def test_soft_labels_are_refused_only_if_the_method_works_by_class(fields: dict[str, Any], tmp_path: Path) -> None:
    values = {"sharing.setting": f"{__file__}:SoftCopies", **ONE_ROUND, "evaluate.clients": True, **fields}
    works_by_class = fields.get("algorithm") == "fedproto"
    config = presets.experiment("smoke", "digits", {**values, "measure.every": int(not works_by_class)})
    if not works_by_class:
        assert run(config, tmp_path / "run", say=lambda text: None)["rounds"] == 1
        return
    with pytest.raises(UserError, match=r"fedproto works by class, .*SoftCopies gives soft labels"):
        run(config, tmp_path / "run", say=lambda text: None)


def test_labels_of_shared_examples_have_as_many_bytes_as_their_classes_need() -> None:
    sizes = [replace(make_data(), n_classes=n).label_nbytes for n in (None, 1, 2, 256, 257, 65_536, 65_537)]
    assert sizes == [0, 1, 1, 1, 2, 2, 3]
    assert images_nbytes(7, (30,), 4) == 7 * (30 * 4 + 1)


@dataclass(frozen=True)
class Sharing:
    nbytes: int | None = 0

    def share(self, clients: Clients, n_classes: int, seed: int) -> Common:
        return Common(clients.store[slice(0, 3)], self.nbytes)


def test_what_is_not_declared_is_uncovered_and_what_a_method_shares_counted_unless_it_states_a_number() -> None:
    silent = share(Means(declared=2), make_data()).releases
    assert [(r.client, r.covered) for r in silent] == [(0, True), (1, True), (2, False), (3, False), (4, False)]
    shared = share(Real(), make_data())
    for nbytes, once in ((None, 5 * 3 * (8 * 8 + 8)), (0, 0), (7, 7)):
        outcome = share_by_method(shared, Sharing(nbytes), 10, 0)
        assert outcome.traffic.once == once
        assert [(r.client, r.covered, r.n_disclosed) for r in outcome.releases] == [(i, False, 259) for i in range(5)]
    with pytest.raises(UserError, match=r"Common\.nbytes"):
        share_by_method(shared, Sharing(-1), 10, 0)


PLACEMENTS = ("exact", "binomial", "optimal")
all_placements = pytest.mark.parametrize("placement", PLACEMENTS)


def federations() -> list[tuple[np.ndarray, np.ndarray]]:
    labels, rng = np.repeat(np.arange(10), 30), np.random.default_rng(0)
    uneven = [rng.choice(10, 300, p=rng.dirichlet([0.3] * 10)) for _ in range(8)]
    classes = rng.choice(10, 300, p=rng.dirichlet([1] * 10))
    return [(labels, rng.permutation(labels)), (labels, labels), (classes, labels), *((labels, o) for o in uneven)]


def test_the_share_that_is_not_private_is_right_overall_and_about_right_in_each_class_and_cell() -> None:
    for labels, owners in federations():
        for c in (0.0, 0.07, 0.2, 0.25, 0.5, 0.9, 1.0):
            chosen = sample_shareable(labels, owners, c, np.random.default_rng(1))
            assert len(set(chosen.tolist())) == len(chosen) == n_open(c, 300)
            assert abs(len(chosen) - c * 300) <= 0.5 + 1e-9
            for groups, off in ((labels, 1.0), (10 * owners + labels, 1.5)):  # Webster's rule is no quota rule
                sizes, result = np.bincount(groups), np.bincount(groups[chosen], minlength=groups.max() + 1)
                assert np.abs(result - c * sizes).max() <= off
    labels, owners = np.repeat([0, 1, 2], 20), np.tile([0, 0, 1, 1, 1, 1, 2, 2, 2, 2], 6)
    chosen = sample_shareable(labels, owners, 0.25, np.random.default_rng(0))  # where a cell's share is whole it is met
    assert np.bincount(3 * owners[chosen] + labels[chosen]).tolist() == [1] * 3 + [2] * 6


@pytest.mark.long
@all_placements
def test_every_client_keeps_its_own_and_only_what_is_not_private_is_copied(placement: str) -> None:
    for labels, owners in federations():
        holds = holdings(labels, owners, 10, 0.3, 3, placement, np.random.default_rng(0))
        assert holds[np.arange(300), owners].all()
        chosen = sample_shareable(labels, owners, 0.3, np.random.default_rng(0))
        assert set(np.flatnonzero(holds.sum(1) > 1)) <= set(chosen)
        if placement != "binomial":  # to d distinct others
            assert (holds.sum(1)[chosen] == 4).all()
        more = holdings(labels, owners, 10, 0.5, 5, placement, np.random.default_rng(0))
        assert placement == "optimal" or (more >= holds).all()  # a larger c and a larger d share all of that, too


def test_the_law_of_exact_and_binomial_copies() -> None:
    n, n_clients, d = 20_000, 5, 2
    labels, owners = np.zeros(n, dtype=int), np.zeros(n, dtype=int)
    p = d / (n_clients - 1)
    for placement, both in (("exact", d * (d - 1) / ((n_clients - 1) * (n_clients - 2))), ("binomial", p**2)):
        others = holdings(labels, owners, n_clients, 1.0, d, placement, np.random.default_rng(0))[:, 1:]
        assert np.abs(others.mean(0) - p).max() < 4 * (p * (1 - p) / n) ** 0.5
        for i, j in combinations(range(n_clients - 1), 2):
            assert abs((others[:, i] & others[:, j]).mean() - both) < 4 * (both * (1 - both) / n) ** 0.5


def by_brute_force(owned: np.ndarray, not_private: np.ndarray, d: int) -> float:
    """The least ||Y - 1/N||^2 over all ways to send each such example of a class to d others."""
    n = len(owned)
    each = [[np.bincount(to, minlength=n) for to in combinations(set(range(n)) - {i}, d)] for i in range(n)]
    ways = product(*(each[i] for i in range(n) for _ in range(not_private[i])))
    counts = np.array([owned + sum(way) for way in ways])
    return float(((counts / counts.sum(1, keepdims=True) - 1 / n) ** 2).sum(1).min())


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_is_more_even_than_the_optimal_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 5))
    owned = rng.multinomial(int(rng.integers(1, 9)), rng.dirichlet([0.7] * n))
    not_private = rng.multivariate_hypergeometric(owned, int(rng.integers(0, min(5, owned.sum()) + 1)))
    for d in range(1, n):
        result, least = optimal_copies(tuple(owned), tuple(not_private), d), by_brute_force(owned, not_private, d)
        assert result.distance == pytest.approx(least, abs=1e-12)
        assert result.bound == pytest.approx(least, abs=1e-9)  # so the gap is none
        assert (result.copies.sum(1) == d * not_private).all()
        assert (result.copies <= not_private[:, None]).all()
        assert not result.copies.diagonal().any()


@all_placements
@pytest.mark.parametrize("name", ["dirichlet_niid", "iid"])
def test_every_example_counts_once_over_all_clients(placement: str, name: str) -> None:
    start = of_digits(name)
    shared: Any = share(stage := RawCopies(0.3, 3, placement), start)
    assert shared.releases == list(stage.release(start, stage.make(start, []))[1])
    totals, copies = np.zeros(N_TOTAL), np.zeros(N_TOTAL, dtype=int)
    for client, rows in zip(shared.data.clients, start.clients.rows, strict=True):
        assert client.ids[: len(rows)].tolist() == rows.tolist()
        copies[client.ids] += 1
        totals[client.ids] += client.weight.double().numpy() * client.size / len(client)
    assert totals == pytest.approx(np.ones(N_TOTAL), abs=1e-6)
    others = copies.sum() - N_TOTAL
    assert shared.p == pytest.approx(others / copies.sum())
    assert shared.facts["mean_copies"] == pytest.approx(copies.mean())
    assert shared.facts["disclosed_examples"] == (copies > 1).sum()
    if placement != "binomial":
        assert (copies > 1).sum() == n_open(0.3, N_TOTAL)
        assert others == 3 * n_open(0.3, N_TOTAL)
    # a copied image goes up once and down to each that gets it: 64 pixels and a label
    assert shared.traffic.once == 65 * ((copies > 1).sum() + others)
    RawCopies(0.5 / N_TOTAL).check_data(start)  # half of an image is rounded up to one
    assert share(RawCopies(0.5 / N_TOTAL), start).facts["disclosed_examples"] == 1


COPIED = {"tracking.wandb": "off", "measure.every": 0, "federation.rounds": 1, "client.epochs": 1,
          "sharing.setting": "raw_copies", "sharing.c": 0.3, "sharing.d": 2}  # fmt: skip


FORTY = {"partition.name": "dirichlet_plain", "partition.n_clients": 40, "partition.alpha": 0.01}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sharing.c": 0.002}, r"sharing\.c .*not one image"),
        ({"sharing.d": 4}, r"sharing\.d .*N - 1 = 3"),
        ({**FORTY, "sharing.d": 39}, r"sharing\.d .*N - 1 = \d\d?,"),  # some clients are dropped
        ({"partition.name": "iid", "partition.n_clients": 1}, r"raw_copies .*2 clients"),
        ({"sharing.placement": "optimal", "data.limit": 8, "partition.name": "iid"}, "placement .*every class"),
    ],
)
def test_what_cannot_be_met_is_refused_before_any_work(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build.build(presets.experiment("smoke", "digits", COPIED | values))
