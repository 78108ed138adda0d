"""FedCVAE's partition: every client has a prior over classes, and a class is split in the ratio of its priors."""

from typing import Any

import numpy as np
import pytest

from fedcommons.config import presets
from fedcommons.data import dirichlet
from fedcommons.data.dirichlet import sizes_by_all_priors
from fedcommons.data.partition import dirichlet_clients_all
from fedcommons.errors import UserError
from fedcommons.runs.build import assemble, prepare
from fedcommons.runs.inputs import deal

SEEDS = range(100)
N_CLASSES = 10
# 1,295 rows in classes of unequal size, as the digits have them
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(N_CLASSES), [*[129] * 5, *[130] * 5]))


def priors(n_clients: int, n_classes: int, alpha: float, seed: int) -> np.ndarray:
    """(clients, classes), as plain numbers; for an alpha that is not small."""
    gamma = np.exp(dirichlet._log_gamma(alpha, (n_clients, n_classes), np.random.default_rng(seed)))
    return gamma / gamma.sum(1, keepdims=True)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("alpha", [1e-300, 0.001, 0.01, 0.1, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("n_clients", [1, 7])
def test_every_class_is_spent_however_small_or_large_alpha_is(alpha: float, n_clients: int) -> None:
    class_sizes = np.array([30, 0, 1, 7, 500])
    for seed in SEEDS:
        sizes = sizes_by_all_priors(class_sizes, n_clients, alpha, np.random.default_rng(seed))
        assert sizes.shape == (5, n_clients)
        assert sizes.min() >= 0
        assert np.array_equal(sizes.sum(1), class_sizes)


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_a_class_is_split_in_the_ratio_of_the_clients_priors(alpha: float) -> None:
    """n_ic = floor(n_c p_ic / sum_j p_jc) and what rounding left, written out client by client."""
    class_sizes = np.array([30, 0, 1, 7, 500])
    for seed in SEEDS:
        p = priors(7, 5, alpha, seed)
        least = np.array([[int(n * p[i, c] / sum(p[:, c])) for i in range(7)] for c, n in enumerate(class_sizes)])
        sizes = sizes_by_all_priors(class_sizes, 7, alpha, np.random.default_rng(seed))
        more = sizes - least
        assert more.min() >= 0
        assert np.array_equal(more.sum(1), class_sizes - least.sum(1))
        assert more.sum(1).max() < 7  # rounding down leaves less than an image a client


def test_what_rounding_leaves_goes_to_any_client_with_equal_chances() -> None:
    """Of classes of one image each, split in shares below one, every client gets as many, whatever its prior is."""
    classes, n = 20_000, 4
    sizes = sizes_by_all_priors(np.ones(classes, dtype=np.int64), n, 50.0, np.random.default_rng(0))
    assert sizes.max() == 1
    assert np.abs(sizes.mean(0) - 1 / n).max() < 4 * np.sqrt((1 - 1 / n) / n / classes)


def test_priors_follow_the_dirichlet_law_of_classes_and_not_of_clients() -> None:
    """Of two clients, two classes and alpha 1: p_0 = (u, 1 - u), p_1 = (v, 1 - v), with u and v uniform.

    The share s = u/(u + v) has E s = 1/2 and E s^2 = 1 - log 2; shares ~ Dir(1) over clients would have 1/3. Client 0's
    shares of both classes go against each other. Four standard errors are allowed.
    """
    rng, n, draws = np.random.default_rng(0), 100_000, 4_000
    s = np.array([sizes_by_all_priors(np.array([n, n]), 2, 1.0, rng)[:, 0] for _ in range(draws)]) / n
    for power, mean in ((1, 1 / 2), (2, 1 - np.log(2))):
        assert np.abs((s**power).mean(0) - mean).max() < 4 * (s**power).std() / np.sqrt(draws)
    assert np.cov(s, rowvar=False).tolist()[0][1] < -0.03  # of classes that were dealt one by one: 0


def test_a_small_alpha_gives_a_class_to_those_whose_prior_is_on_it() -> None:
    """Each prior is then on one class; clients of one class share it equally, and others have none of it.

    A class on which no prior is goes to one client, the one whose prior of it is least small.
    """
    unwanted = 0
    for seed in SEEDS:
        log_gamma = dirichlet._log_gamma(1e-9, (10, N_CLASSES), np.random.default_rng(seed))
        wants = log_gamma.argmax(1)
        sizes = sizes_by_all_priors(np.full(N_CLASSES, 2520), 10, 1e-9, np.random.default_rng(seed))  # 2520: by 1 to 10
        for c in range(N_CLASSES):
            who = np.flatnonzero(wants == c)
            if len(who):
                assert np.array_equal(np.flatnonzero(sizes[c]), who)
                assert set(sizes[c][who]) == {2520 // len(who)}
            else:
                gap = log_gamma[:, c] - log_gamma.max(1)
                assert sizes[c, gap.argmax()] == 2520
                unwanted += 1
    assert unwanted > len(SEEDS)


@pytest.mark.parametrize("alpha", [1e6, 1e30])
def test_a_large_alpha_splits_every_class_equally(alpha: float) -> None:
    for seed in SEEDS:
        sizes = sizes_by_all_priors(np.array([1000, 3005, 70]), 10, alpha, np.random.default_rng(seed))
        assert np.abs(sizes - np.array([[100], [300.5], [7]])).max() <= 10  # rounding leaves at most so many to one
        assert np.abs(sizes[1] / 300.5 - 1).max() < 0.05


def test_nobody_is_left_with_nothing_where_classes_have_classes_times_clients_images() -> None:
    for alpha, seed in ((alpha, seed) for alpha in (0.001, 0.05, 1.0) for seed in SEEDS):
        dealt = dirichlet_clients_all(LABELS, 12, N_CLASSES, np.random.default_rng(seed), alpha)
        assert len(dealt) == 12  # 10 x 12 < 129


def test_clients_that_are_left_with_nothing_are_dropped_and_nobody_elses_images_change() -> None:
    fields = {"partition.name": "dirichlet_clients_all", "partition.n_clients": 1000, "partition.alpha": 1.0}
    recipe, dropped = presets.experiment("smoke", "digits", fields).partition, 0
    for seed in range(5):
        dealt = deal(recipe, LABELS, N_CLASSES, seed)
        sizes = sizes_by_all_priors(np.bincount(LABELS), 1000, 1.0, np.random.default_rng(seed))
        rows = dirichlet_clients_all(LABELS, 1000, N_CLASSES, np.random.default_rng(seed), 1.0)
        assert [len(r) for r in rows] == [n for n in sizes.sum(0) if n]
        for r, counts in zip(rows, sizes.T[sizes.sum(0) > 0], strict=True):
            assert np.array_equal(np.bincount(LABELS[r], minlength=N_CLASSES), counts)
        assert len(dealt.rows) == len(np.asarray(dealt.class_counts)) <= 1000
        assert np.array_equal(np.sort(np.concatenate(dealt.rows)), np.arange(len(LABELS)))
        dropped += 1000 - len(dealt.rows)
    assert dropped > 20


def test_a_run_counts_the_clients_that_there_are() -> None:
    values: dict[str, Any] = {"partition.name": "dirichlet_clients_all", "partition.n_clients": 100,
                              "partition.alpha": 0.01}  # fmt: skip
    ready = assemble(prepare(presets.experiment("smoke", "digits", values)))
    n = len(ready.prepared.partition.rows)
    assert n == ready.plan.facts.n_clients == len(ready.shared.data.clients) < 100
    with pytest.raises(UserError, match=rf"of {n} clients is less than one client"):
        prepare(presets.experiment("smoke", "digits", {**values, "federation.participation": 1 / 100}))
