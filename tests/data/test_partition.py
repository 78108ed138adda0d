"""Partitions, each by its law: invariants over many seeds, closed forms and slow loops."""

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fedcommons.config import presets, registry
from fedcommons.config.dotted import choose
from fedcommons.data.dirichlet import group_sizes, plain_sizes, sizes_by_all_priors, sizes_by_priors
from fedcommons.data.partition import Partitioned, default_n_aux
from fedcommons.errors import UserError
from fedcommons.runs import load_data
from fedcommons.runs.assemble import assemble
from fedcommons.runs.build import build

SEEDS = range(100)
N_CLASSES = 10
# 1,295 rows in classes of unequal size, as the digits have them; 1,295 is no multiple of 8 clients
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(N_CLASSES), [*[129] * 5, *[130] * 5]))
DIRICHLETS = [name for name in registry.KINDS["partition"].components if name.startswith("dirichlet")]
NO_WARNING = pytest.mark.filterwarnings("error::RuntimeWarning")


def deal(name: str, seed: int = 0, labels: Any = LABELS, n_classes: int = N_CLASSES, **values: Any) -> Partitioned:
    recipe = choose({"partition.name": name, **{f"partition.{n}": value for n, value in values.items()}}).partition
    return load_data.partition_rows(
        recipe.name, recipe.constants, np.asarray(labels), n_classes, seed, n_clients=recipe.n_clients
    )


def sizes_of(name: str, seeds: int = 20, **values: Any) -> np.ndarray:
    """(seeds, clients): how many of the rows each of eight clients has."""
    return np.array([[len(rows) for rows in deal(name, seed, n_clients=8, **values).rows] for seed in range(seeds)])


def log_gamma(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Logarithms of Gamma(alpha) draws: Gamma(alpha) = Gamma(alpha + 1) U^(1/alpha)."""
    return np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha


def test_sizes_of_clients_are_equal_or_above_their_minimum() -> None:
    cut = {"dirichlet_classes": {"alpha": 0.1, "n_aux": 4}, "dirichlet_clients": {"alpha": 0.3}}
    for name, values in {"iid": {}, **cut}.items():
        sizes = sizes_of(name, 10, **values)
        assert (sizes.max(1) - sizes.min(1) <= 1).all()
    sizes = sizes_of("dirichlet_classes", alpha=0.5, n_aux=3, recut=False)  # without the second cut
    for first, last in ((0, 3), (3, 6), (6, 8)):  # groups of 3, 3 and 2 of 8 clients
        of_group = sizes[:, first:last]
        assert (np.abs(of_group.sum(1) - len(LABELS) * (last - first) / 8) <= 1).all()
        assert (of_group.min(1) >= 0.5 * of_group.sum(1) / (last - first)).all()
    sizes = sizes_of("dirichlet_niid", 80, alpha=0.5)
    assert (sizes.max(1) - sizes.min(1) > 1).all()
    assert 10 <= sizes.min() < 40  # the bound of ten is what decides, not half of the fair share (80)


def test_single_class_gives_client_l_all_of_class_l() -> None:
    for label, rows in enumerate(deal("single_class", n_clients=N_CLASSES).rows):
        assert sorted(rows.tolist()) == np.flatnonzero(label == LABELS).tolist()


@pytest.mark.parametrize("name", DIRICHLETS)
def test_labels_get_more_alike_over_clients_as_alpha_grows(name: str) -> None:
    """The mean over classes of the variance over clients of a class's share; alpha -> infinity is IID."""

    def variance(name: str, **values: Any) -> float:
        counts = np.stack([np.asarray(deal(name, s, n_clients=8, **values).class_counts) for s in range(10)])
        return float((counts / counts.sum(2, keepdims=True)).var(1).mean())

    variances = [variance(name, alpha=alpha) for alpha in (0.2, 1.0, 10.0, 1000.0)]
    assert variances == sorted(variances, reverse=True)
    assert variances[0] > 10 * variances[-1]
    assert variances[-1] < 2 * variance("iid")


def test_the_fingerprint_is_of_who_holds_what() -> None:
    def fingerprint(*rows: Any, kind: Any = np.int64) -> str:
        return Partitioned([np.array(r, dtype=kind) for r in rows], np.zeros((2, 1))).fingerprint

    assert len({fingerprint([0, 1], [2]), fingerprint([0], [1, 2]), fingerprint([2], [0, 1])}) == 3
    assert fingerprint([0, 1], [2], kind=np.int32) == fingerprint([0, 1], [2])


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [("dirichlet_nid", {}, "dirichlet_niid"), ("shards", {"n_clients": 700}, "per_client = 2 needs 1400"),
     ("shards", {"labels": LABELS * 0}, "labels are missing, all equal or vectors"),
     ("single_class", {"n_clients": 11}, r"10 classes.*partition\.n_clients = 11"),
     ("dirichlet_classes", {"n_clients": 8, "n_aux": 9}, r"partition\.n_aux .*8, got 9"),
     ("dirichlet_niid", {"n_clients": 130}, "130 clients .*10 images .*1295"),
     ("labels_lognormal", {"n_clients": 5, "per_client": 5}, "per_client must be 6 to 10"),
     ("labels_lognormal", {"n_clients": 130}, "26 clients .*label 0 .*129")],
)  # fmt: skip
def test_what_cannot_be_met_is_refused(name: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        deal(name, **values)


def test_mcmahans_clients_hold_two_shards_of_a_label_each() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    for seed in range(20):
        result = deal("shards", seed, labels, n_clients=30)
        assert {len(rows) for rows in result.rows} == {20}
        assert all(set(counts[counts > 0]) <= {10, 20} for counts in np.asarray(result.class_counts))


def test_sizes_follow_their_law() -> None:
    sizes = [len(rows) for rows in deal("quantity", 0, np.zeros(29_300, int), 1, law="power", power=1.0).rows]
    assert sizes == pytest.approx([10_000 / (i + 1) for i in range(10)], rel=2e-3)
    k, n, alpha, seeds = 10, 10_000, 0.5, range(400)
    partitions = [deal("quantity", seed, np.zeros(n, int), 1, alpha=alpha).rows for seed in seeds]
    shares = np.array([[len(rows) / n for rows in clients] for clients in partitions])
    variance = (k - 1) / (k**2 * (k * alpha + 1))  # of Dir(alpha)
    assert shares.mean(0) == pytest.approx(np.full(k, 1 / k), abs=4 * (variance / 400) ** 0.5)
    assert shares.var(0).mean() == pytest.approx(variance, rel=0.1)


def test_fedprox_gives_client_i_the_labels_from_i_on_in_log_normal_amounts() -> None:
    def counts(**constants: Any) -> np.ndarray:
        return np.asarray(deal("labels_lognormal", 0, np.arange(60_000) % 10, n_clients=100, **constants).class_counts)

    steep = counts(spread=5.0, least=3)
    assert all(set(np.flatnonzero(client)) == {i % 10, (i + 1) % 10} for i, client in enumerate(steep))
    assert steep[steep > 0].min() == 3  # with a spread of 5 one client has nearly all others
    some = counts(spread=0.5, least=1)
    logarithms = np.log(some[some > 0] - 1.0)  # 200 draws, each label's 20 shifted by their sum
    assert abs(logarithms.std() * np.sqrt(200 / 199) - 0.5) < 4 * 0.5 / np.sqrt(2 * 200)
    equal = counts(spread=0.0)
    assert set(equal[equal > 0]) <= {299, 300, 301}  # cuts of a sum of floats


@NO_WARNING
@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_group_sizes_spend_every_class_exactly_and_respect_the_minimum_and_the_fair_share(alpha: float) -> None:
    class_sizes, met = np.array([7, 101, 0, 350, 42]), 0
    for seed in SEEDS:
        sizes = group_sizes(class_sizes, 3, alpha, 20, np.random.default_rng(seed))
        assert sizes.shape == (5, 3)
        assert sizes.min() >= 0
        assert np.array_equal(sizes.sum(1), class_sizes)
        assert sizes.sum(0).min() >= 20
        full = np.cumsum(sizes, 0)[:-1] >= class_sizes.sum() / 3
        assert (sizes[1:][full] == 0).all()
        met += full.sum()
    assert met >= (50 if alpha < 1 else 0)
    rng = np.random.default_rng(0)
    for _ in SEEDS:  # Gamma(0.001) is below the smallest float in half of the draws: shares by it are 0/0
        sizes = group_sizes(np.full(10, 100), 4, 0.001, 1, rng)
        assert sizes.min() >= 0
        assert (sizes.sum(1) == 100).all()


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_shares_follow_the_dirichlet_law(alpha: float) -> None:
    """E p = 1/K and Var p = (K-1)/(K^2 (K alpha + 1)); of ``group_sizes`` for the first class, which has no cap."""
    k, n, draws, rng = 4, 10_000, 2_000, np.random.default_rng(0)
    plain = plain_sizes(np.full(draws, n), k, alpha, rng) / n
    capped = np.array([group_sizes(np.array([n]), k, alpha, 0, rng)[0] for _ in range(draws)]) / n
    variance = (k - 1) / (k**2 * (k * alpha + 1))
    for share in (plain, capped):
        assert np.abs(share.mean(0) - 1 / k).max() < 4 * np.sqrt(variance / draws)
        assert share.var(0) == pytest.approx(np.full(k, variance), rel=0.15)


def test_what_hardly_any_draw_meets_is_refused_before_a_million_draws_where_that_is_sure() -> None:
    for class_sizes, n_clients, alpha, least, words in (
        ([129] * 10, 11, 1e-300, 10, "10 classes .*11 clients"), ([129] * 10, 40, 0.01, 10, "in 4,160 draws"),
        ([2], 2, 1e-9, 1, "in 1,000,000 draws"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            group_sizes(np.array(class_sizes), n_clients, alpha, least, np.random.default_rng(0))
    for n_clients, alpha, least in ((10, 1e-5, 1), (12, 1e-3, 1), (10, 0.1, 65), (30, 0.1, 10)):
        sizes = group_sizes(np.full(10, 129), n_clients, alpha, least, np.random.default_rng(1))
        assert sizes.sum(0).min() >= least


def test_default_groups_are_those_of_the_authors() -> None:
    """Authors' code: github.com/lyn1874/fedssyn at 4ceefff. Where it sets no group size, all clients are one group."""
    for n_clients, n_classes, alpha, n_aux in (
        (40, 10, 0.1, 20), (40, 10, 0.01, 10), (40, 100, 0.1, 20), (100, 10, 0.1, 10), (100, 10, 0.01, 10),
        (100, 100, 0.01, 20), (100, 100, 0.1, 100), (10, 10, 0.1, 10), (10, 10, 0.01, 10), (7, 10, 0.5, 7),
    ):  # fmt: skip
        assert default_n_aux(n_clients, n_classes, alpha) == n_aux
    by_default, explicit = (deal("dirichlet_classes", n_clients=40, alpha=0.1, **n) for n in ({}, {"n_aux": 20}))
    assert by_default.fingerprint == explicit.fingerprint
    labels = np.repeat(np.arange(10), 450)  # the paper's hardest recipes are possible: CIFAR10's 45,000 at a tenth
    assert {len(r) for r in deal("dirichlet_classes", labels=labels, n_clients=100, alpha=0.01).rows} == {45}


@NO_WARNING
@pytest.mark.parametrize("alpha", [1e-300, 0.01, 0.1, 1.0, 1e6])
def test_plain_sizes_spend_every_class_and_are_less_than_one_image_off_the_drawn_shares(alpha: float) -> None:
    class_sizes = np.array([30, 0, 1, 7, 500])
    for seed in SEEDS:
        sizes = plain_sizes(class_sizes, 10, alpha, np.random.default_rng(seed))
        assert np.array_equal(sizes.sum(1), class_sizes)
        logs = log_gamma(alpha, (5, 10), np.random.default_rng(seed))
        weights = np.exp(logs - logs.max(1, keepdims=True))
        below = weights / weights.sum(1, keepdims=True) * class_sizes[:, None] - sizes
        assert np.abs(below).max() < 1
        for row in below:  # a client that got one more was further below before than one that got none
            up, down = row[row < 0] + 1, row[row >= 0]
            assert not len(up) or not len(down) or up.min() >= down.max() - 1e-12


@NO_WARNING
def test_feddyns_clients_hold_few_classes_when_alpha_is_small_and_the_classes_unequal() -> None:
    class_sizes, means = np.array([0, 300, 30, 3, 1, 150, 75, 500, 40, 101]), []
    for seed in range(20):
        sizes = sizes_by_priors(class_sizes, 7, 0.0001, np.random.default_rng(seed))
        assert np.array_equal(sizes.sum(1), class_sizes)
        assert set(sizes.sum(0)) == {171, 172}  # 1,200 images to 7 clients
        means.append((sizes > 0).sum(0).mean())
    assert np.mean(means) < 4  # a client that fell back to a uniform draw where its prior underflows would hold 5.3


def redrawn(class_sizes: np.ndarray, totals: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Draw sizes as Acar et al. (2021) describe it: full clients and exhausted classes are redrawn."""
    priors = rng.dirichlet([alpha] * len(class_sizes), len(totals)).cumsum(1).tolist()
    remaining, room = class_sizes.copy(), totals.copy()
    sizes = np.zeros((len(remaining), len(room)), dtype=np.int64)
    while room.any():
        client = rng.integers(len(room))
        if room[client] == 0:
            continue
        c = bisect_left(priors[client], rng.random())
        while remaining[c] == 0:
            c = bisect_left(priors[client], rng.random())
        sizes[c, client] += 1
        remaining[c] -= 1
        room[client] -= 1
    return sizes


@pytest.mark.long
def test_feddyns_sizes_have_the_law_of_redrawing_one_image_at_a_time() -> None:
    class_sizes, draws, rng = np.array([7, 3, 1]), 1_500, np.random.default_rng(0)
    totals = np.array([3, 4, 4])  # unequal, as turns would be if chances followed the room that is left
    ours = Counter(sizes_by_priors(class_sizes, 3, 1.0, rng).tobytes() for _ in range(draws))
    theirs = Counter(redrawn(class_sizes, totals, 1.0, rng).tobytes() for _ in range(draws))
    tables = ours.keys() | theirs.keys()  # every way to deal
    freedom = len(tables) - 1
    chi_square = sum((ours[t] - theirs[t]) ** 2 / (ours[t] + theirs[t]) for t in tables)
    assert freedom > 20
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # mean and four standard deviations


@NO_WARNING
@pytest.mark.parametrize("alpha", [1e-300, 0.001, 0.5, 5.0, 1e6, 1e30])
@pytest.mark.parametrize("n_clients", [1, 7])
def test_fedcvaes_classes_are_spent_and_split_in_the_ratio_of_the_clients_priors(alpha: float, n_clients: int) -> None:
    """n_ic = floor(n_c p_ic / sum_j p_jc) and what rounding left; written out for an alpha that is not small."""
    class_sizes = np.array([30, 0, 1, 7, 500])
    for seed in SEEDS:
        sizes = sizes_by_all_priors(class_sizes, n_clients, alpha, np.random.default_rng(seed))
        assert np.array_equal(sizes.sum(1), class_sizes)
        if n_clients > 1 and 0.5 <= alpha <= 5:
            gamma = np.exp(log_gamma(alpha, (n_clients, 5), np.random.default_rng(seed)))
            p = gamma / gamma.sum(1, keepdims=True)
            least = [[int(n * row[c] / p[:, c].sum()) for row in p] for c, n in enumerate(class_sizes)]
            more = sizes - np.array(least)
            assert more.min() >= 0
            assert more.sum(1).max() < n_clients  # rounding down leaves less than an image a client


def test_priors_follow_the_dirichlet_law_of_classes_and_not_of_clients() -> None:
    """For alpha 1, u and v uniform, s = u/(u + v) has E s^2 = 1 - log 2; shares ~ Dir(1) over clients have 1/3."""
    rng, n, draws = np.random.default_rng(0), 100_000, 4_000
    s = np.array([sizes_by_all_priors(np.array([n, n]), 2, 1.0, rng)[:, 0] for _ in range(draws)]) / n
    for power, mean in ((1, 1 / 2), (2, 1 - np.log(2))):
        assert np.abs((s**power).mean(0) - mean).max() < 4 * (s**power).std() / np.sqrt(draws)
    assert np.cov(s, rowvar=False).tolist()[0][1] < -0.03  # of classes that are assigned one by one: 0


@pytest.mark.parametrize("name", ["dirichlet_plain", "dirichlet_clients_all"])
def test_clients_that_are_left_with_nothing_are_dropped_and_a_run_counts_the_others(name: str) -> None:
    values = {"partition.name": name, "partition.n_clients": 100, "partition.alpha": 0.01}
    ready = assemble(build(presets.experiment("smoke", "digits", values)))
    n = len(ready.spec.partition.rows)
    assert n == ready.plan.facts.n_clients == len(ready.shared.data.clients) == len(ready.plan.facts.sizes) < 100
    build(presets.experiment("smoke", "digits", {**values, "federation.participation": 1 / n}))
    with pytest.raises(UserError, match=rf"of {n} clients .*less than one"):
        build(presets.experiment("smoke", "digits", {**values, "federation.participation": 1 / 100}))
    rows = ready.spec.partition.rows
    assert min(map(len, rows)) > 0
    assert sum(map(len, rows)) == len(ready.spec.dataset.train)


GROUPS = np.random.default_rng(1).permutation(np.arange(len(LABELS)) % 40)
SMALL = {"alpha": 0.5, "per_client": 3, "join": N_CLASSES}

every_partition = pytest.mark.parametrize("name", registry.KINDS["partition"].components)


def deal_small(name: str, seed: int = 0, n_clients: int = N_CLASSES, **constants: Any) -> Partitioned:
    has = registry.constants("partition", name)
    values = {n: value for n, value in {**SMALL, **constants}.items() if n in has}
    fields = {f"partition.{n}": value for n, value in values.items()}
    recipe = choose({"partition.name": name, "partition.n_clients": n_clients, **fields}).partition
    options = {"groups": GROUPS, "factors": {"camera": GROUPS // 2}, "n_clients": recipe.n_clients}
    return load_data.partition_rows(recipe.name, recipe.constants, LABELS, N_CLASSES, seed, **options)


@every_partition
def test_every_row_belongs_to_one_client_and_no_client_is_empty_for_every_seed(name: str) -> None:
    for seed in range(40):
        result = deal_small(name, seed)
        assert len(result.rows) == N_CLASSES
        assert min(len(rows) for rows in result.rows) > 0
        assert np.array_equal(np.sort(np.concatenate(result.rows)), np.arange(len(LABELS)))
        assert result.class_counts is not None
        for rows, counts in zip(result.rows, result.class_counts, strict=True):
            assert rows.dtype == np.int64
            assert np.array_equal(np.bincount(LABELS[rows], minlength=N_CLASSES), counts)


@every_partition
def test_one_seed_gives_one_partition_and_another_seed_another(name: str) -> None:
    first = deal_small(name)
    np.random.seed(1)  # noqa: NPY002  (the legacy generator is what must not matter)
    again, other = deal_small(name), deal_small(name, 1)
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))
    assert first.fingerprint == again.fingerprint != other.fingerprint


@every_partition
def test_more_clients_than_rows_or_groups_are_refused(name: str) -> None:
    joins = "join" in registry.constants("partition", name)
    words = r"partition\.join .*at most" if joins else r"partition\.n_clients .*at most .*1295.*1296"
    with pytest.raises(UserError, match=words):
        deal_small(name, n_clients=1296, join=41)


def bright(x: np.ndarray, n_clients: int) -> list[np.ndarray]:
    assert not x.flags.writeable
    return np.array_split(x.reshape(len(x), -1).sum(1).argsort(kind="stable"), n_clients)


def test_a_partition_may_read_the_examples() -> None:
    """Also if validation examples were held out, so that the rows have other numbers than in the data set."""
    spec = build(presets.experiment("smoke", "digits", {"partition.name": f"{__file__}:bright"}))
    sums = [spec.train.x[rows].sum((1, 2, 3)) for rows in spec.partition.rows]
    assert all(a.max() <= b.min() for a, b in pairwise(sums))
    assert sums[0].max() < sums[-1].min()
