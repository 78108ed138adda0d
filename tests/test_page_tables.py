"""Short tables of result pages, against the CSVs beside them that have all runs."""

import re
from pathlib import Path
from statistics import fmean, median, stdev

import pandas as pd
import pytest

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def lines_of(page: str, column: str) -> list[dict[str, str]]:
    """The lines of all of a page's tables that have this column."""
    found = []
    for block in (RESULTS / f"{page}.md").read_text().split("\n\n"):
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in block.splitlines() if row.startswith("|")]
        if rows and column in rows[0]:
            found += [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert found, f"{page} has no table with {column}"
    return found


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


@pytest.mark.parametrize("dataset", ["digits", "mnist"])
def test_softmax_regression(dataset: str) -> None:
    runs = pd.read_csv(RESULTS / f"mnist_softmax_{dataset}.csv")
    kinds = {"iid clients": "iid", "one class per client": "single_class"}
    for line in lines_of(f"mnist_softmax_{dataset}", "zeta^2 at the start"):
        of = {"partition": kinds[line["clients"]], "epochs": int(line["E"]), "noise": float(line["noise s"])}
        of["p"] = float(line["p"])
        mine = runs.loc[(runs[list(of)] == pd.Series(of)).all(axis=1), :]
        assert len(mine) == 3
        for head, column in (("last test loss", "last_loss"), ("rounds to target", "rounds_to_target")):
            values = mine[column].tolist()
            spread = [median(values), min(values), max(values)]
            found = numbers(line[head])
            assert found == pytest.approx(spread[: len(found)], abs=6e-5), line


def test_figure_3() -> None:
    runs = pd.read_csv(RESULTS / "figure3_small_digits.csv")
    for line in lines_of("figure3_small_digits", "last acc."):
        mine = runs.loc[runs["setting"] == line["setting"], :]
        if line["alpha"] != "-":
            mine = mine.loc[mine["alpha"] == float(line["alpha"]), :]
        last = [100 * value for value in mine["last_accuracy"].tolist()]
        assert numbers(line["last acc."]) == pytest.approx([fmean(last), stdev(last)], abs=0.051)
        assert len(last) == 3


def test_convergence_parameters() -> None:
    runs = pd.read_csv(RESULTS / "convergence_parameters_digits.csv")
    columns = ("accuracy", "zeta_hat_sq", "zeta_hat_sq / Lemma 1", "sigma_hat_sq", "sigma_pool_sq", "delta_sq")
    for line in lines_of("convergence_parameters_digits", "round"):
        mine = runs.loc[(runs["curve"] == line["curve"]) & (runs["round"] == int(line["round"])), :]
        for name in (name for name in columns if line[name]):
            values = mine[name].tolist()
            found = numbers(line[name])
            assert found == pytest.approx([fmean(values), min(values), max(values)][: len(found)], rel=6e-3), line
