"""Raw copies: who gets a copy of what, what it weighs, costs and discloses, and what is refused."""

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from cut_clients import of_digits
from five_clients import DATASET

from fedcommons import UserError
from fedcommons.config import presets
from fedcommons.runs import build
from fedcommons.sharing.optimal import evened
from fedcommons.sharing.placement import holdings, n_open, opened
from fedcommons.sharing.raw_copies import RawCopies
from fedcommons.sharing.stage import share

N_TOTAL = len(DATASET.train)
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
            chosen = opened(labels, owners, c, np.random.default_rng(1))
            assert len(set(chosen.tolist())) == len(chosen) == n_open(c, 300)
            assert abs(len(chosen) - c * 300) <= 0.5 + 1e-9
            for groups, off in ((labels, 1.0), (10 * owners + labels, 1.5)):  # Webster's rule is no quota rule
                sizes, result = np.bincount(groups), np.bincount(groups[chosen], minlength=groups.max() + 1)
                assert np.abs(result - c * sizes).max() <= off
    labels, owners = np.repeat([0, 1, 2], 20), np.tile([0, 0, 1, 1, 1, 1, 2, 2, 2, 2], 6)
    chosen = opened(labels, owners, 0.25, np.random.default_rng(0))  # where a cell's share is whole it is met
    assert np.bincount(3 * owners[chosen] + labels[chosen]).tolist() == [1] * 3 + [2] * 6


@pytest.mark.long
@all_placements
def test_every_client_keeps_its_own_and_only_what_is_not_private_is_copied(placement: str) -> None:
    for labels, owners in federations():
        held = holdings(labels, owners, 10, 0.3, 3, placement, np.random.default_rng(0))
        assert held[np.arange(300), owners].all()
        chosen = opened(labels, owners, 0.3, np.random.default_rng(0))
        assert set(np.flatnonzero(held.sum(1) > 1)) <= set(chosen)
        if placement != "binomial":  # to d distinct others
            assert (held.sum(1)[chosen] == 4).all()
        more = holdings(labels, owners, 10, 0.5, 5, placement, np.random.default_rng(0))
        assert placement == "optimal" or (more >= held).all()  # a larger c and a larger d share all of that, too


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
        result, least = evened(tuple(owned), tuple(not_private), d), by_brute_force(owned, not_private, d)
        assert result.distance == pytest.approx(least, abs=1e-12)
        assert result.bound == pytest.approx(least, abs=1e-9)  # so the gap is none
        assert (result.copies.sum(1) == d * not_private).all()
        assert (result.copies <= not_private[:, None]).all()
        assert not result.copies.diagonal().any()


@all_placements
@pytest.mark.parametrize("name", ["dirichlet_niid", "iid"])
def test_every_example_counts_once_over_all_clients(placement: str, name: str) -> None:
    start = of_digits(name)
    shared: Any = share(RawCopies(0.3, 3, placement), start)
    totals, copies = np.zeros(N_TOTAL), np.zeros(N_TOTAL, dtype=int)
    for client, rows in zip(shared.data.clients, start.own.rows, strict=True):
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
    RawCopies(0.5 / N_TOTAL).check_dealt(start)  # half of an image is rounded up to one
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
        build.prepare(presets.experiment("smoke", "digits", COPIED | values))
