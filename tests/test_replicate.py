"""``sweeps/replicate.py``: its rows are experiments, its verdicts follow from the prediction interval."""

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

import pytest
import report_runs
from scipy.stats import t
from sweep_runs import rows_of

from papers.replications import report
from papers.replications.report import Compared
from papers.replications.rows import ROWS, Published, Quantity

DATA = Path(os.environ.get("FEDCOMMONS_DATA") or Path(__file__).parents[2] / "shared" / "data")


script = report_runs.script("replicate")


def verdict(values: Sequence[float | None], published: float, note: str = "") -> str:
    quantity = Quantity("one", None, ())
    return Compared("R1", quantity, Published(published, "a paper", note), dict(enumerate(values))).verdict


def test_the_interval_is_the_one_for_a_run_more() -> None:
    values = [40.0, 44.0, 43.0, 45.0, 41.0]
    one = Compared("R1", Quantity("one", None, ()), Published(1, "a paper"), dict(enumerate(values)))
    half = t.ppf(0.975, 4) * stdev(values) * sqrt(1 + 1 / 5)
    assert one.predicted == pytest.approx((fmean(values) - half, fmean(values) + half))
    five = replace(one, published=Published(1, "a paper", runs=5), quantity=Quantity("one", 3, ()))
    half *= sqrt(2 / 5) / sqrt(6 / 5)
    assert five.predicted == pytest.approx((fmean(values) - half, fmean(values) + half))
    wide = replace(five, values={0: 96.0, 1: 92.0, 2: 99.0}).predicted
    assert wide is not None
    assert wide[1] == 100.0  # no accuracy lies above


def test_verdicts() -> None:
    for values, published, note, expected in (
        ([99.0, 100.0, 101.0], 104, "", "inside"), ([1.0, 2.0, 3.0], 2, "", "inside, wide"),
        ([1.0, 2.0, 3.0], 12, "", "outside"), ([1.0, 2.0, None], 2, "", "cannot tell"),
        ([99.0, 100.0, 101.0], 110, "read off to ± 6", "outside"),  # a note moves no verdict
        ([1.0, 2.0], 2, "", "cannot tell"), ([2.0, 2.0, 2.0], 2, "", "inside"), ([2.0, 2.0, 2.0], 3, "", "outside"),
    ):  # fmt: skip
        assert verdict(values, published, note) == expected


def test_the_committed_numbers_have_their_verdicts() -> None:
    file = Path(__file__).parents[1] / "docs" / "results" / "replications.csv"
    lines = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    runs: dict[tuple[str, str], dict[int, dict[str, float | None]]] = {}
    for line in lines:
        of_seed = runs.setdefault((line["row"], line["variant"]), {}).setdefault(int(line["seed"]), {})
        of_seed[line["quantity"]] = float(line["ours"]) if line["ours"] else None
    verdicts = [str(one["verdict"]) for one in report.records(report.compared(runs))]
    assert verdicts == [line["verdict"] for line in lines]


def test_every_row_has_its_experiments_and_every_quantity_a_variant(script: ModuleType) -> None:
    options = script.arguments(["--rows", ",".join(ROWS), "--seeds", "3"])
    result = script.entries(options)
    assert {(entry.row, entry.variant) for entry in result} == {(n, v) for n, row in ROWS.items() for v in row.variants}
    for name, row in ROWS.items():
        assert {q.variant for q in row.quantities} == {*row.variants}, name
        for quantity in row.quantities:
            config = next(e.cell.config for e in result if (e.row, e.variant) == (name, quantity.variant))
            assert (quantity.round or 1) <= config.federation.rounds
            assert (quantity.round is None) == (config.federation.stop == "target")


@pytest.mark.long
@pytest.mark.skipif(not (DATA / "MNIST").is_dir(), reason="no MNIST (FEDCOMMONS_DATA names another folder)")
def test_a_rows_page_is_made_from_its_runs(script: ModuleType, recorded: Callable[..., None], tmp_path: Path) -> None:
    argv = ["--rows=R6", "--seeds=0,1", f"--data-dir={DATA}", f"--out={tmp_path}"]
    for entry, accuracy in zip(script.entries(script.arguments(argv)), (0.8, 0.9), strict=True):
        recorded(tmp_path / entry.cell.name, entry.cell.config, None, {"test/accuracy": accuracy})
    assert script.replicate([*argv, "--resume"]) == 0
    (line,) = rows_of((tmp_path / "replicate.md").read_text(), "| R6")
    assert line[:4] == ["R6", "FedAvg", "accuracy after round 100, %", "81 (FLUTE, about)"]
    assert line[4:] == ["2", "80.00, 90.00", "cannot tell"]
