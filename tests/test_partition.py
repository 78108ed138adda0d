"""Partitions, by invariants over many seeds; no random generator is ever mocked."""

from bisect import bisect_left
from collections import Counter
from typing import Any

import numpy as np
import pytest

from fedcommons.config import parts
from fedcommons.config.flat import choose
from fedcommons.config.parts import KINDS
from fedcommons.config.sections import Partition
from fedcommons.data import dirichlet
from fedcommons.data.dirichlet import group_sizes, sizes_by_priors
from fedcommons.data.partition import Partitioned, default_n_aux
from fedcommons.errors import UserError
from fedcommons.runs import inputs

SEEDS = range(100)
N_CLASSES = 10
# 1,295 rows in classes of unequal size, as the digits have them; 1295 is no multiple of 8 clients
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(N_CLASSES), [*[129] * 5, *[130] * 5]))

PARTITIONS = KINDS["partition"].known


def recipe_of(name: str = "dirichlet_classes", **values: Any) -> Partition:
    """A partition with these fields and constants."""
    return choose(
        {"partition.name": name, **{f"partition.{field}": value for field, value in values.items()}}
    ).partition


RECIPES = {
    "iid": recipe_of(name="iid", n_clients=8),
    "dirichlet_classes": recipe_of(name="dirichlet_classes", n_clients=8, alpha=0.1, n_aux=4),
    "dirichlet_classes, groups of unequal size": recipe_of(
        name="dirichlet_classes", n_clients=8, alpha=0.5, n_aux=3, recut=False
    ),
    "dirichlet_classes, not cut again": recipe_of(name="dirichlet_classes", n_clients=8, alpha=0.1, recut=False),
    "dirichlet_niid": recipe_of(name="dirichlet_niid", n_clients=8, alpha=0.5),
    "dirichlet_clients": recipe_of(name="dirichlet_clients", n_clients=8, alpha=0.3),
    "dirichlet_clients_all": recipe_of(name="dirichlet_clients_all", n_clients=8, alpha=0.5),
    "dirichlet_plain": recipe_of(name="dirichlet_plain", n_clients=8, alpha=0.5),
    "single_class": recipe_of(name="single_class", n_clients=N_CLASSES),
    "shards": recipe_of(name="shards", n_clients=8),
    "quantity": recipe_of(name="quantity", n_clients=8),
    "quantity, by a power": recipe_of(name="quantity", n_clients=8, law="power", power=2.0),
    "labels_lognormal": recipe_of(name="labels_lognormal", n_clients=8, per_client=3),
    "by_group, joined": recipe_of(name="by_group", join=8),
    "by_factor, joined": recipe_of(name="by_factor", join=8),
}
GROUPS = np.random.default_rng(1).permutation(np.arange(len(LABELS)) % 40)


def deal(recipe: Partition, seed: int = 0, labels: np.ndarray = LABELS) -> Partitioned:
    """The partition of LABELS."""
    groups = GROUPS[: len(labels)]
    return inputs.deal(recipe, labels, N_CLASSES, seed, groups=groups, factors={"camera": groups // 2})


def label_variance(dealt: Partitioned) -> float:
    """Mean over classes of the variance over clients of the share of that class in a client's data."""
    assert dealt.class_counts is not None
    shares = dealt.class_counts / dealt.class_counts.sum(1, keepdims=True)
    return float(shares.var(0).mean())


def test_every_partitioner_is_tested_here_and_offered_by_the_config() -> None:
    assert {recipe.name for recipe in RECIPES.values()} == set(PARTITIONS)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_clients_are_disjoint_complete_and_never_empty_for_every_seed(recipe: Partition) -> None:
    for seed in SEEDS:
        dealt = deal(recipe, seed)
        assert len(dealt.rows) == (recipe.constants.get("join") or recipe.n_clients)
        assert dealt.class_counts is not None
        assert min(len(rows) for rows in dealt.rows) > 0
        assert np.array_equal(np.sort(np.concatenate(dealt.rows)), np.arange(len(LABELS)))
        for rows, counts in zip(dealt.rows, dealt.class_counts, strict=True):
            assert np.array_equal(np.bincount(LABELS[rows], minlength=N_CLASSES), counts)


@pytest.mark.parametrize("name", ["iid", "dirichlet_classes", "dirichlet_clients"])
def test_equal_cuts_differ_by_one_row_at_most(name: str) -> None:
    for seed in SEEDS:
        sizes = [len(rows) for rows in deal(RECIPES[name], seed).rows]
        assert max(sizes) - min(sizes) <= 1


def test_without_the_second_cut_every_client_has_half_of_its_groups_fair_share() -> None:
    unequal = 0
    for seed in SEEDS:
        sizes = [len(rows) for rows in deal(RECIPES["dirichlet_classes, not cut again"], seed).rows]
        assert min(sizes) >= 0.5 * len(LABELS) / 8
        unequal += max(sizes) - min(sizes) > 1
    assert unequal == len(SEEDS)


def test_groups_hold_their_clients_share_of_the_rows_also_where_the_last_is_smaller() -> None:
    for seed in SEEDS:
        sizes = np.array([len(rows) for rows in deal(RECIPES["dirichlet_classes, groups of unequal size"], seed).rows])
        for first, last in ((0, 3), (3, 6), (6, 8)):  # n_aux = 3 of 8 clients
            assert abs(sizes[first:last].sum() - len(LABELS) * (last - first) / 8) <= 1
            assert min(sizes[first:last]) >= 0.5 * sizes[first:last].sum() / (last - first)


def test_niid_bench_gives_every_client_ten_rows_and_keeps_sizes_unequal() -> None:
    smallest = []
    for seed in SEEDS:
        sizes = [len(rows) for rows in deal(RECIPES["dirichlet_niid"], seed).rows]
        smallest.append(min(sizes))
        assert max(sizes) - min(sizes) > 1
    assert min(smallest) >= 10
    assert min(smallest) < 40  # the bound of ten is what decides, not half of the fair share (80)


def test_single_class_gives_client_l_all_of_class_l() -> None:
    for seed in SEEDS:
        dealt = deal(RECIPES["single_class"], seed)
        for label, rows in enumerate(dealt.rows):
            assert (LABELS[rows] == label).all()
            assert len(rows) == np.bincount(LABELS)[label]


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name.startswith("dirichlet")])
def test_labels_get_more_alike_over_clients_as_alpha_grows(name: str) -> None:
    variances = [
        np.mean([label_variance(deal(recipe_of(name, n_clients=8, alpha=alpha), seed)) for seed in range(20)])
        for alpha in (0.2, 1.0, 10.0, 1000.0)
    ]
    assert variances == sorted(variances, reverse=True)
    assert variances[0] > 10 * variances[-1]
    iid = np.mean([label_variance(deal(RECIPES["iid"], seed)) for seed in range(20)])
    assert variances[-1] < 2 * iid  # alpha -> infinity is IID


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_seed_gives_one_partition_and_another_seed_another(recipe: Partition) -> None:
    first, again, other = deal(recipe, 0), deal(recipe, 0), deal(recipe, 1)
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint


def test_the_fingerprint_tells_who_holds_what() -> None:
    def fingerprint(*rows: list[int]) -> str:
        return Partitioned([np.array(r, dtype=np.int64) for r in rows], np.zeros((2, 1))).fingerprint

    assert fingerprint([0, 1], [2]) != fingerprint([0], [1, 2])  # cut elsewhere
    assert fingerprint([0, 1], [2]) != fingerprint([2], [0, 1])  # clients exchanged
    small = Partitioned([np.array([0, 1], dtype=np.int32), np.array([2])], np.zeros((2, 1)))
    assert small.fingerprint == fingerprint([0, 1], [2])  # whatever integers the rows are stored as


def test_a_partition_draws_nothing_from_the_process_wide_generator() -> None:
    np.random.seed(0)  # noqa: NPY002  (the legacy generator is what must not matter)
    first = deal(RECIPES["dirichlet_niid"]).fingerprint
    np.random.seed(1)  # noqa: NPY002
    assert deal(RECIPES["dirichlet_niid"]).fingerprint == first


@pytest.mark.parametrize("name", sorted(PARTITIONS.keys() - {"by_group", "by_factor"}))
def test_more_clients_than_rows_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"partition\.n_clients must be at most .* images, 1295, got 1296"):
        deal(recipe_of(name=name, n_clients=1296))


def test_an_unknown_partition_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'dirichlet_niid'"):
        deal(recipe_of(name="dirichlet_nid"))


@pytest.mark.parametrize("n_clients", [9, 11])
def test_single_class_needs_as_many_clients_as_classes(n_clients: int) -> None:
    with pytest.raises(UserError, match=f"each of the 10 classes, got partition.n_clients = {n_clients}"):
        deal(recipe_of(name="single_class", n_clients=n_clients))


def test_groups_of_more_clients_than_there_are_are_refused() -> None:
    with pytest.raises(UserError, match=r"partition\.n_aux must be at most the number of clients, 8, got 9"):
        deal(recipe_of(n_clients=8, n_aux=9))


def test_what_no_draw_can_meet_is_refused_at_once_with_the_condition() -> None:
    with pytest.raises(UserError, match="130 clients with at least 10 images each need more than the 1295 images"):
        deal(recipe_of(name="dirichlet_niid", n_clients=130))


def test_what_no_draw_has_met_is_refused_with_the_condition_and_how_often_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dirichlet, "MAX_DRAWS", 1_000)
    # 16 clients want half of a fair share each, but ten classes at alpha = 0.01 hardly reach so many
    with pytest.raises(UserError, match=r"in 1,000 draws with alpha = 0\.01 some of 16 clients.* fewer than 41 images"):
        deal(recipe_of(name="dirichlet_classes", n_clients=16, alpha=0.01, n_aux=16))


def test_the_default_groups_make_the_papers_hardest_recipes_possible() -> None:
    labels = np.repeat(np.arange(10), 450)  # CIFAR10's 45,000 at a tenth
    for n_clients, alpha in ((40, 0.1), (40, 0.01), (100, 0.1), (100, 0.01)):
        dealt = deal(recipe_of(n_clients=n_clients, alpha=alpha), labels=labels)
        assert {len(rows) for rows in dealt.rows} == {4500 // n_clients} | (
            {4500 // n_clients + 1} if 4500 % n_clients else set()
        )


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_concentration_whose_gamma_draws_underflow_still_deals_everything() -> None:
    # Gamma(0.001) is below the smallest float with probability one half: proportions computed from it are 0/0
    rng = np.random.default_rng(0)
    for _ in SEEDS:
        sizes = group_sizes(np.full(10, 100), 4, 0.001, 1, rng)
        assert sizes.min() >= 0
        assert (sizes.sum(1) == 100).all()
    for alpha in (0.001, 1e6):
        dealt = deal(recipe_of(name="dirichlet_niid", n_clients=4, alpha=alpha))
        assert np.asarray(dealt.class_counts).sum() == len(LABELS)


@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
def test_group_sizes_spend_every_class_exactly_and_respect_the_minimum(alpha: float) -> None:
    class_sizes = np.array([7, 101, 0, 350, 42])
    for seed in SEEDS:
        sizes = group_sizes(class_sizes, 3, alpha, 20, np.random.default_rng(seed))
        assert sizes.shape == (5, 3)
        assert sizes.min() >= 0
        assert np.array_equal(sizes.sum(1), class_sizes)
        assert sizes.sum(0).min() >= 20


def test_a_client_that_holds_its_fair_share_gets_no_more() -> None:
    class_sizes, met = np.full(10, 60), 0
    for seed in SEEDS:
        sizes = group_sizes(class_sizes, 3, 0.3, 1, np.random.default_rng(seed))
        full = np.cumsum(sizes, 0)[:-1] >= class_sizes.sum() / 3
        assert (sizes[1:][full] == 0).all()  # not even what rounding leaves over, which goes to the last client
        met += full.sum()
    assert met > len(SEEDS)


def test_proportions_follow_the_dirichlet_law() -> None:
    # first class, so nobody is capped yet: E p = 1/K and Var p = (K-1)/(K^2 (K alpha + 1)), 4 standard errors allowed
    k, n, draws = 4, 10_000, 2_000
    rng = np.random.default_rng(0)
    for alpha in (0.1, 1.0):
        share = dirichlet._draw(np.array([n]), k, alpha, draws, rng)[:, 0] / n
        variance = (k - 1) / (k**2 * (k * alpha + 1))
        assert np.abs(share.mean(0) - 1 / k).max() < 4 * np.sqrt(variance / draws)
        assert share.var(0) == pytest.approx(np.full(k, variance), rel=0.15)


@pytest.mark.parametrize(
    ("n_clients", "n_classes", "alpha", "n_aux"),
    [
        (40, 10, 0.1, 20),
        (40, 10, 0.01, 10),
        (40, 100, 0.1, 20),
        (100, 10, 0.1, 10),
        (100, 10, 0.01, 10),
        (100, 100, 0.01, 20),
        (100, 100, 0.1, 100),
        (10, 10, 0.1, 10),
        (10, 10, 0.01, 10),
        (7, 10, 0.5, 7),
    ],
)
def test_default_groups_are_those_of_the_authors(n_clients: int, n_classes: int, alpha: float, n_aux: int) -> None:
    # github.com/lyn1874/fedssyn at 4ceefff; where it sets nothing, all clients are one group
    assert default_n_aux(n_clients, n_classes, alpha) == n_aux
    if n_classes == 10 and n_clients <= len(LABELS) // 10:
        recipe = recipe_of(n_clients=n_clients, alpha=max(alpha, 0.1))
        spelt = recipe_of(
            n_clients=n_clients, alpha=recipe.alpha, n_aux=default_n_aux(n_clients, n_classes, recipe.alpha)
        )
        assert deal(recipe).fingerprint == deal(spelt).fingerprint


def test_feddyns_clients_have_about_the_global_class_frequencies_when_alpha_is_large() -> None:
    labels = np.repeat(np.arange(N_CLASSES), 2 ** np.arange(N_CLASSES))  # 1 to 512 images of a class
    frequencies = np.bincount(labels) / len(labels)

    def deviation(recipe: Partition) -> float:
        counts = np.stack([np.asarray(deal(recipe, seed, labels).class_counts) for seed in range(30)])
        return float(np.mean((counts / counts.sum(2, keepdims=True) - frequencies) ** 2))

    # for alpha = 1 it is 12 times that of IID
    assert deviation(recipe_of("dirichlet_clients", n_clients=8, alpha=1e6)) < 2 * deviation(RECIPES["iid"])


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("alpha", [0.01, 0.0001])
@pytest.mark.long
def test_feddyns_clients_hold_few_classes_when_alpha_is_small_and_the_classes_unequal(alpha: float) -> None:
    class_sizes = np.array([0, 300, 30, 3, 1, 150, 75, 500, 40, 101])
    held = []
    for seed in SEEDS:
        sizes = sizes_by_priors(class_sizes, 7, alpha, np.random.default_rng(seed))
        assert np.array_equal(sizes.sum(1), class_sizes)
        assert set(sizes.sum(0)) == {171, 172}  # 1,200 images to 7 clients
        held.append((sizes > 0).sum(0).mean())
    # 3.5 and 3.4; a client that fell back to a uniform draw where its prior underflows would hold 5.3 at alpha = 0.0001
    assert np.mean(held) < 4


def redrawn(class_sizes: np.ndarray, totals: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """What ``sizes_by_priors`` draws, as Acar et al. (2021) say it: full clients and exhausted classes are redrawn."""
    priors = rng.dirichlet([alpha] * len(class_sizes), len(totals)).cumsum(1).tolist()
    left, room = class_sizes.copy(), totals.copy()
    sizes = np.zeros((len(left), len(room)), dtype=np.int64)
    while room.any():
        client = rng.integers(len(room))
        if room[client] == 0:
            continue
        c = bisect_left(priors[client], rng.random())
        while left[c] == 0:
            c = bisect_left(priors[client], rng.random())
        sizes[c, client] += 1
        left[c] -= 1
        room[client] -= 1
    return sizes


@pytest.mark.long
def test_feddyns_sizes_have_the_law_of_redrawing_one_image_at_a_time() -> None:
    class_sizes, totals, draws = np.array([8, 3, 1]), np.array([4, 4, 4]), 5_000
    rng = np.random.default_rng(0)
    ours = Counter(sizes_by_priors(class_sizes, 3, 1.0, rng).tobytes() for _ in range(draws))
    theirs = Counter(redrawn(class_sizes, totals, 1.0, rng).tobytes() for _ in range(draws))
    tables = ours.keys() | theirs.keys()  # every way to deal
    freedom = len(tables) - 1
    chi_square = sum((ours[t] - theirs[t]) ** 2 / (ours[t] + theirs[t]) for t in tables)
    assert freedom > 20
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # mean and four standard deviations


def test_turns_go_to_clients_that_are_not_full_with_equal_chances() -> None:
    # client 0 wants one image of four: its turn is the k-th with chance 1/2, 1/4, 1/8, and 1/8 once client 1 is full;
    # chances in proportion to the room that is left would be 1/4 each
    draws, rng = 4_000, np.random.default_rng(0)
    turns = np.stack([dirichlet._turns(np.array([1, 3]), rng) for _ in range(draws)])
    assert (turns.sum(1) == 3).all()
    chance = np.array([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert (np.abs((turns == 0).mean(0) - chance) < 4 * np.sqrt(chance * (1 - chance) / draws)).all()


@pytest.mark.parametrize(
    ("n_clients", "alpha", "reason"),
    [(15, 1e-5, "10 classes are not enough for 15 clients"), (11, 1e-300, "10 classes are not enough for 11 clients"),
     (100, 0.01, "in 4,160 draws"), (100, 0.1, "in 4,160 draws"), (40, 0.01, "in 4,160 draws")],
)  # fmt: skip
def test_what_hardly_any_draw_meets_is_refused_before_a_million_draws(
    n_clients: int, alpha: float, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        group_sizes(np.full(10, 129), n_clients, alpha, 10, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("n_clients", "alpha", "least"), [(11, 1e-3, 1), (12, 1e-3, 1), (20, 0.1, 10), (10, 0.1, 65), (30, 0.1, 10)]
)
def test_what_is_refused_early_bounds_what_is_accepted(n_clients: int, alpha: float, least: int) -> None:
    """The two bounds of ``group_sizes`` against the share of draws that are accepted."""
    class_sizes = np.full(10, 129)
    held = dirichlet._draw(class_sizes, n_clients, alpha, 4096, np.random.default_rng(1)).sum(1)
    accepted = (held >= least).all(1).mean()
    noise = 4 * (accepted / 4096) ** 0.5
    assert 0 < accepted < (1 - (held < least).mean()) ** n_clients + noise
    assert (held >= 1).all(1).mean() < dirichlet._all_get_one(class_sizes, n_clients, alpha) + noise


@pytest.mark.parametrize("value", [0, 1, 2])
def test_a_whole_number_is_the_float_of_the_same_value(value: int) -> None:
    """For each constant of a partition that is a float, also where the value is refused."""

    def dealt(name: str, field: str, given: float) -> list[list[int]] | str:
        more = {"law": "power"} if field == "power" else {"n_aux": 2} if name == "dirichlet_classes" else {}
        try:
            recipe = recipe_of(name, n_clients=4, **{field: given}, **more)
            return [rows.tolist() for rows in inputs.deal(recipe, LABELS, N_CLASSES, 0).rows]
        except UserError as error:
            return str(error)

    floats = [(n, field) for n in PARTITIONS for field, its in parts.constants("partition", n).items()
              if its.kinds[0] is float]  # fmt: skip
    assert ("quantity", "power") in floats
    for name, field in floats:
        assert dealt(name, field, value) == dealt(name, field, float(value)), (name, field)
