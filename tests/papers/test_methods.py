"""The comparison of methods with rates chosen on other seeds; rank correlations of metrics of heterogeneity."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import report_runs
from rich.console import Console
from scipy.stats import spearmanr
from sweep_runs import rows_of

from fedcommons.cli.display import Display
from fedcommons.tune import learning_rates
from papers.heterogeneity_report import METRICS, correlations, spearman

methods = report_runs.script("methods")


def test_rates_are_chosen_on_the_tuning_seeds_and_the_table_has_the_others(
    methods: ModuleType, recorded: Callable[..., None], tmp_path: Path
) -> None:
    """On the tuning seeds FedAvg's validation prefers 0.1 and SCAFFOLD's 0.2; test data prefer the other rates."""
    options = methods.arguments(
        ["--algorithms=fedavg,scaffold", "--seeds=0,1,2", "--lrs=0.05,0.1,0.2,0.4", "--tuning-seeds=8,9"]
    )
    entries = methods.entries(options)
    assert len(entries) == 2 * (4 * 2 + 3)
    rates = dict.fromkeys(e["rates"] for e in entries if e.is_tuning)
    reported = [learning_rates.with_rates(e, of_rates) for e in entries if not e.is_tuning for of_rates in rates]
    for e in (*reported, *(e for e in entries if e.is_tuning)):
        best, last = {"fedavg": (0.1, 0.50), "scaffold": (0.2, 0.60)}[e["method"]]
        is_best = e.cell.config.client.lr == best
        validated = 0.8 if is_best == e.is_tuning else 0.7
        accuracy = (last if is_best else 0.95) + 0.01 * e.cell.config.seed * (e["method"] == "scaffold")
        metrics = {"test/accuracy": accuracy, "validation/accuracy": validated, "comm/total_bytes": 3e6}
        recorded(tmp_path / e.cell.name, e.cell.config, None, metrics, n_clients=7)  # as by_group, which ignores N
    methods.methods.report(entries, options, tmp_path, Display(Console(quiet=True)))
    text = (tmp_path / "methods.md").read_text()
    assert ", 7 clients (" in text
    assert "at an edge" not in text
    head, _, *lines = rows_of(text)
    assert head[5] == "minus fedavg, points"
    assert lines == [
        ["0.1", "fedavg", "0.1", "3", "50.0 [50.0, 50.0]", "", ">30 (missed by 3 of 3)", "3.00"],
        ["0.1", "scaffold", "0.2", "3", "61.0 [58.5, 63.5]", "+11.0 [+8.5, +13.5]", ">30 (missed by 3 of 3)", "3.00"],
    ]
    with (tmp_path / "methods.csv").open() as file:
        assert {line["seed"] for line in csv.DictReader(file)} == {"0", "1", "2"}
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")


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
    single = [federation for i, federation in enumerate(doubled) if i % 2 == 0]
    ends = [
        next(
            (line["correlation_low"], line["correlation_high"])
            for line in correlations(every)
            if line["metric"] == "ssdi"
        )
        for every in (doubled, single)
    ]
    assert ends[0] == pytest.approx(ends[1])
