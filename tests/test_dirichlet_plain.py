"""The plain Dirichlet partition: sizes, their law, and clients that are left with nothing."""

import numpy as np
import pytest

from fedcommons.config import presets
from fedcommons.config.flat import choose
from fedcommons.data import dirichlet
from fedcommons.data.dirichlet import plain_sizes
from fedcommons.data.partition import dirichlet_plain
from fedcommons.errors import UserError
from fedcommons.runs.build import assemble, prepare
from fedcommons.runs.inputs import deal

SEEDS = range(100)
N_CLASSES = 10
# 1,295 rows in classes of unequal size, as the digits have them
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(N_CLASSES), [*[129] * 5, *[130] * 5]))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("alpha", [1e-300, 0.01, 0.1, 1.0, 1e6])
def test_plain_sizes_spend_every_class_and_are_less_than_one_image_off_the_drawn_shares(alpha: float) -> None:
    class_sizes = np.array([30, 0, 1, 7, 500])
    for seed in SEEDS:
        sizes = plain_sizes(class_sizes, 10, alpha, np.random.default_rng(seed))
        assert np.array_equal(sizes.sum(1), class_sizes)
        log_gamma = dirichlet._log_gamma(alpha, (5, 10), np.random.default_rng(seed))
        weights = np.exp(log_gamma - log_gamma.max(1, keepdims=True))
        below = weights / weights.sum(1, keepdims=True) * class_sizes[:, None] - sizes
        assert np.abs(below).max() < 1
        for row in below:  # whoever got one more was further below before than who got none
            up, down = row[row < 0] + 1, row[row >= 0]
            assert not len(up) or not len(down) or up.min() >= down.max() - 1e-12


def test_plain_shares_follow_the_dirichlet_law_without_a_cap() -> None:
    # E p = 1/K and Var p = (K-1)/(K^2 (K alpha + 1)) for every class alike, 4 standard errors allowed
    k, n, classes = 4, 10_000, 2_000
    for alpha in (0.1, 1.0):
        share = plain_sizes(np.full(classes, n), k, alpha, np.random.default_rng(0)) / n
        variance = (k - 1) / (k**2 * (k * alpha + 1))
        assert np.abs(share.mean(0) - 1 / k).max() < 4 * np.sqrt(variance / classes)
        assert share.var(0) == pytest.approx(np.full(k, variance), rel=0.15)


def test_clients_that_are_left_with_nothing_are_dropped_and_nobody_elses_images_change() -> None:
    fields = {"partition.name": "dirichlet_plain", "partition.n_clients": 30, "partition.alpha": 0.05}
    recipe, dropped = choose(fields).partition, 0
    for seed in SEEDS:
        dealt = deal(recipe, LABELS, N_CLASSES, seed)
        rng = np.random.default_rng(seed)
        sizes = plain_sizes(np.bincount(LABELS), 30, 0.05, rng)
        rows = dirichlet_plain(LABELS, 30, N_CLASSES, np.random.default_rng(seed), 0.05)
        assert [len(r) for r in rows] == [n for n in sizes.sum(0) if n]
        assert len(dealt.rows) == len(np.asarray(dealt.class_counts)) <= 30
        assert min(len(r) for r in dealt.rows) > 0
        assert np.array_equal(np.sort(np.concatenate(dealt.rows)), np.arange(len(LABELS)))
        dropped += 30 - len(dealt.rows)
    assert dropped > len(SEEDS)


def test_a_run_counts_the_clients_that_there_are_and_a_share_of_them_that_is_nobody_is_refused() -> None:
    values = {"partition.name": "dirichlet_plain", "partition.n_clients": 20, "partition.alpha": 0.01}
    config = presets.experiment("smoke", "digits", values)
    ready = assemble(prepare(config))
    n = len(ready.prepared.partition.rows)
    assert n == ready.plan.facts.n_clients == len(ready.shared.data.clients) == len(ready.plan.facts.sizes) < 20
    least = presets.experiment("smoke", "digits", {**values, "federation.participation": 1 / n})
    assert prepare(least).partition.fingerprint == ready.prepared.partition.fingerprint
    less = presets.experiment("smoke", "digits", {**values, "federation.participation": 1 / 20})
    with pytest.raises(UserError, match=rf"C = 0\.05 of {n} clients is less than one client; it must be at least"):
        prepare(less)
