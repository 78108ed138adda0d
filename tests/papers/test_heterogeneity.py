"""Rank correlations of metrics of heterogeneity with outcomes: against scipy, and on federations with known ranks."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from papers.heterogeneity_report import METRICS, correlations, spearman


def federations(**columns: Any) -> list[dict[str, Any]]:
    """Return six partitions with two seeds each; metrics without a column are noise."""
    noise = np.random.default_rng(0).normal(size=(len(METRICS), 12))
    values = {
        **dict(zip(METRICS, noise, strict=True)),
        "rounds": np.arange(12),
        "last_accuracy": np.arange(12),
        **columns,
    }
    return [{"federation": i // 2, **{name: column[i] for name, column in values.items()}} for i in range(12)]


def test_spearman_equals_that_of_scipy_with_ties() -> None:
    x, y = np.random.default_rng(0).integers(0, 6, (2, 40))
    assert spearman(x, y) == pytest.approx(spearmanr(x, y)[0])  # pyright: ignore
    assert np.isnan(spearman(x, np.ones(40)))


def test_a_metric_with_the_order_of_the_rounds_has_correlation_1_and_gains_over_a_useless_reference() -> None:
    of_order = np.exp(np.arange(12.0))
    lines = correlations(federations(ssdi=of_order, hellinger=-of_order, last_accuracy=-np.arange(12)))
    by_pair = {(line["outcome"], line["metric"]): line for line in lines}
    assert len(by_pair) == 2 * len(METRICS)
    for outcome, sign in (("rounds", 1), ("last_accuracy", -1)):
        for metric, value in (("ssdi", sign), ("hellinger", -sign)):
            line = by_pair[outcome, metric]
            ends = line["correlation"], line["correlation_low"], line["correlation_high"]
            assert ends == pytest.approx((value,) * 3)
        reference = by_pair[outcome, "zeta_sq_round_3"]
        assert by_pair[outcome, "ssdi"]["gain"] == pytest.approx(1 - abs(reference["correlation"]))
        assert reference["gain_low"] == reference["gain_high"] == 0
        assert reference["correlation_low"] < reference["correlation"] < reference["correlation_high"]


def test_seeds_of_a_partition_are_drawn_together() -> None:
    doubled = federations(ssdi=np.repeat(np.random.default_rng(1).normal(size=6), 2), rounds=np.repeat(np.arange(6), 2))
    single = [one for i, one in enumerate(doubled) if i % 2 == 0]
    ends = [
        next(
            (line["correlation_low"], line["correlation_high"])
            for line in correlations(every)
            if line["metric"] == "ssdi"
        )
        for every in (doubled, single)
    ]
    assert ends[0] == pytest.approx(ends[1])
