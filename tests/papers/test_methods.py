"""The comparison of methods: learning rates chosen on other seeds and validation data, intervals, pairs of seeds."""

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import report_runs
from rich.console import Console
from sweep_runs import complete, rows_of

from fedcommons.cli.display import Display
from fedcommons.tune import learning_rates

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


@pytest.mark.long
def test_a_partition_without_alpha_and_one_rate_for_all(methods: ModuleType, tmp_path: Path) -> None:
    argv = ["--preset=smoke", "--algorithms=fedavg,fedprox", "--seeds=0", "--partition.name=iid", "--data.limit=80",
            "--federation.rounds=1", "--wandb=off", f"--out={tmp_path}"]  # fmt: skip
    entries = methods.entries(methods.arguments(argv))
    text = complete(methods.methods, argv, [e.cell for e in entries], tmp_path)
    assert [line[:4] for line in rows_of(text)[2:]] == [["-", name, "0.1", "1"] for name in ("fedavg", "fedprox")]
