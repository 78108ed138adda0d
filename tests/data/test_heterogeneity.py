"""Heterogeneity metrics of class counts: closed forms, slow loops, invariances, and the record in partition.json."""

import json
from itertools import permutations
from math import hypot, sqrt
from pathlib import Path

import numpy as np
import pytest

from fedcommons.data.heterogeneity import describe, hellinger, hellinger_between, size_imbalance, ssdi
from fedcommons.data.partition import Partitioned
from fedcommons.runs.load_data import write_partition


def random_counts(seed: int) -> np.ndarray:
    """Return (6, 4) counts with zeros, without an empty client or class."""
    draws = np.random.default_rng(seed)
    counts = draws.integers(0, 30, (6, 4)) * (draws.random((6, 4)) < 0.6)
    counts[np.arange(6), np.arange(6) % 4] += 1
    return counts


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_their_definitions_in_slow_loops(seed: int) -> None:
    counts = random_counts(seed)
    (n_clients, n_classes), n = counts.shape, counts.sum()
    p, q = counts / counts.sum(1, keepdims=True), counts.sum(0) / n

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        return sqrt(sum((sqrt(x) - sqrt(y)) ** 2 for x, y in zip(a, b, strict=True)) / 2)

    assert hellinger(counts) == pytest.approx(np.mean([distance(row, q) for row in p]))
    squares = [distance(a, b) ** 2 for a, b in permutations(p, 2)]
    assert hellinger_between(counts) == pytest.approx(sqrt(np.mean(squares)))
    parts = {True: 0.0, False: 0.0}
    for i in range(n_clients):
        for c in range(n_classes):
            of_client, of_class = counts[i].sum(), counts[:, c].sum()
            gap = counts[i, c] / n - of_client * of_class / n**2
            parts[bool(counts[i, c] == 0)] += (n / of_client + n / of_class) * gap**2
    most = 2 * (1 - 1 / min(n_clients, n_classes))
    assert ssdi(counts) == pytest.approx((sqrt(parts[True] / most), sqrt(parts[False] / most)))


@pytest.mark.parametrize("sizes", [[7] * 5, [1, 2, 3, 4, 40]])
def test_one_class_per_client_has_the_largest_distances(sizes: list[int]) -> None:
    metrics, shares = describe(sizes, np.diag(sizes)), np.array(sizes) / sum(sizes)
    assert metrics["hellinger_between"] == 1
    assert metrics["hellinger"] == pytest.approx(np.sqrt(1 - np.sqrt(shares)).mean())
    assert metrics["ssdi"] == pytest.approx(sqrt((1 - shares @ shares) / (1 - 1 / 5)))  # 1 for equal sizes
    assert metrics["ssdi"] == pytest.approx(hypot(metrics["lcd"], metrics["lds"]), abs=2e-6)


def test_equal_distributions_of_labels_have_no_skew_whatever_the_sizes() -> None:
    sizes = np.array([1, 5, 50])
    metrics = describe(10 * sizes, sizes[:, None] * np.array([1, 2, 7]))
    variation = sizes.std() / sizes.mean()
    assert metrics.pop("size_imbalance") == pytest.approx(variation**2 / (1 + variation**2), abs=1e-6)
    assert all(abs(value) < 1e-7 for value in metrics.values())
    assert size_imbalance([3] * 4) == pytest.approx(0, abs=1e-15)


def test_order_of_clients_size_of_data_and_absent_classes_change_nothing() -> None:
    counts = random_counts(0)
    other = 3 * np.insert(counts, 2, 0, axis=1)[::-1]
    assert describe(other.sum(1), other) == pytest.approx(describe(counts.sum(1), counts), abs=1e-6)


def test_a_single_client_or_class_has_no_label_skew() -> None:
    for counts in (np.array([[3, 4]]), np.array([[3], [9]])):
        assert describe(counts.sum(1), counts)["ssdi"] == describe(counts.sum(1), counts)["hellinger_between"] == 0


def test_partition_json_has_the_metrics_and_without_classes_only_that_of_sizes(tmp_path: Path) -> None:
    rows, labels = [np.arange(4), np.arange(4, 10)], np.arange(10) % 2
    for n_classes, names in ((2, "hellinger hellinger_between lcd lds size_imbalance ssdi"), (None, "size_imbalance")):
        write_partition(tmp_path, Partitioned.from_rows(rows, labels, n_classes), None, "", b"")
        facts = json.loads((tmp_path / "partition.json").read_text(encoding="utf-8"))
        assert sorted(facts["heterogeneity"]) == names.split()
        assert facts["heterogeneity"]["size_imbalance"] == pytest.approx(1 - 100 / (2 * 52), abs=1e-6)
