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
    assert found, f"{page} has no table with the column {column}"
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


def runs_of(name: str, **fields: object) -> pd.DataFrame:
    """Return the runs of a CSV that have these values."""
    runs = pd.read_csv(RESULTS / f"{name}.csv")
    return runs.loc[(runs[list(fields)] == pd.Series(fields)).all(axis=1), :]


def assert_is_of(runs: pd.DataFrame, column: str, cell: str, scale: float = 1) -> None:
    """Check that ``cell`` is the mean of a column, with its standard deviation if there are several runs."""
    values = [scale * value for value in runs[column].tolist()]
    spread = [fmean(values)] if len(values) == 1 else [fmean(values), stdev(values)]
    assert numbers(cell) == pytest.approx(spread, abs=0.051), (column, cell)


SIDES = {"real data": "real", "with synthetic": "shuffled_synthetic"}
BEYOND_DIGITS = {"MNIST": "table1_mnist", "Fashion-MNIST": "table1_fmnist", "CIFAR-10": "table1_small_cifar10"}


def test_the_first_table_of_the_readme() -> None:
    *methods, pool_alone = lines_of("../../README", "algorithm")
    assert len(methods) == 5
    for line in methods:
        for head, setting in SIDES.items():
            runs = runs_of("table1_small_digits_rates", algorithm=line["algorithm"], setting=setting)
            assert len(runs) == 3
            assert_is_of(runs, "rounds_to_target", line[f"rounds, {head}"])
            assert_is_of(runs, "last_accuracy", line[f"last acc., {head}"], 100)
    runs = runs_of("pool_alone", dataset="digits")
    assert len(runs) == 3
    assert_is_of(runs, "last_accuracy", pool_alone["last acc., with synthetic"], 100)


def test_the_rates_that_validation_data_choose() -> None:
    *methods, pool_alone = lines_of("table1_small_digits", "MB to 80 %")
    assert len(methods) == 10
    for line in methods:
        runs = runs_of("table1_small_digits_rates", algorithm=line["algorithm"], setting=line["setting"])
        assert_is_of(runs, "rounds_to_target", line["rounds"])
        assert_is_of(runs, "last_accuracy", line["last acc."], 100)
        assert set(runs["learning_rate"]) == {float(line["lr"])}
        assert megabytes_to_target(runs) == pytest.approx(float(line["MB to 80 %"]), abs=0.051)
    assert_is_of(runs_of("pool_alone", dataset="digits"), "last_accuracy", pool_alone["last acc."], 100)


def test_the_second_table_of_the_readme() -> None:
    lines = lines_of("../../README", "last acc., pool alone")
    assert len(lines) == len(BEYOND_DIGITS)
    for line in lines:
        name = BEYOND_DIGITS[line["data"].partition("]")[0].strip("[")]
        for head, setting in SIDES.items():
            runs = runs_of(name, algorithm="fedavg", setting=setting)
            assert_is_of(runs, "rounds_to_target", line[f"rounds, {head}"])
            assert_is_of(runs, "last_accuracy", line[f"last acc., {head}"], 100)
        pool_alone = line["last acc., pool alone"]
        if name == "table1_fmnist":
            central = runs_of("figure3_fmnist", setting="central_synthetic", seed=0)
            assert_is_of(central, "last_accuracy", pool_alone, 100)
        elif name == "table1_small_cifar10":
            assert f"{pool_alone} %" in (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        else:
            assert_is_of(runs_of("pool_alone", dataset="mnist"), "last_accuracy", pool_alone, 100)


def test_the_bytes_that_the_readme_compares() -> None:
    text = (RESULTS / "../../README.md").read_text(encoding="utf-8")
    sentence = re.search(r"([\d.]+) \(MNIST\), ([\d.]+) \(Fashion-MNIST\) and ([\d.]+) \(CIFAR-10\) times", text)
    assert sentence
    for printed, name in zip(sentence.groups(), BEYOND_DIGITS.values(), strict=True):
        real, pool = (megabytes_to_target(runs_of(name, algorithm="fedavg", setting=s)) for s in SIDES.values())
        assert f"{pool / real:.{len(printed.partition('.')[2])}f}" == printed


def megabytes_to_target(runs: pd.DataFrame) -> float:
    """Return the mean over runs of the bytes that all clients send and receive up to the target."""
    a_round = (runs["bytes_down"] + runs["bytes_up"]) / runs["rounds"]
    return fmean((a_round * runs["rounds_to_target"] + runs["bytes_once"]).tolist()) / 1e6
