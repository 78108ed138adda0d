"""Rank correlations of metrics of heterogeneity with the rounds and the accuracy of federations: table and two CSVs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcommons.reports import tables
from fedcommons.seeding import numpy_generator
from fedcommons.storage.atomic_files import write_text
from fedcommons.tracking.run_folder import read_heterogeneity
from fedcommons.tune import grid, learning_rates
from fedcommons.tune.study import Report, Results

METRICS = ("hellinger", "hellinger_between", "ssdi", "size_imbalance", "zeta_sq_round_0", "zeta_sq_round_3")
OUTCOMES = {"rounds": "rounds to the target", "last_accuracy": "last accuracy"}
REFERENCE, DRAWS = "zeta_sq_round_3", 1000
"""The metric with which the others are compared; number of bootstrap samples."""


def report(results: Results) -> Report | None:
    from fedcommons.reports.frames import load_rounds

    reported = [entry for entry in results.finished if not entry.is_tuning]
    if len({entry["federation"] for entry in reported}) < 3:
        return None
    runs = results.runs.drop_duplicates("cell").set_index("cell")
    zeta = load_rounds(*runs["run"]).set_index(["run", "round"])["zeta_sq"]
    federations = []
    for entry in reported:
        run = runs.loc[entry.cell.name]
        reached = run["rounds_to_target"]
        federations.append({
            "federation": entry["federation"], "seed": run["seed"], "learning_rate": run["lr"],
            **read_heterogeneity(Path(run["run"])),
            **{f"zeta_sq_round_{round_}": zeta[run["run"], round_] for round_ in (0, 3)},
            "rounds": run["rounds"] if reached != reached or reached is None else reached,
            "is_missed": bool(reached != reached or reached is None), "last_accuracy": run["last_accuracy"],
        })  # fmt: skip
    lines = correlations(federations)
    head = [
        "metric",
        "outcome",
        "rank correlation [95 % interval]",
        "absolute correlation minus that of zeta^2 in round 3",
    ]
    cells = [[row["metric"], OUTCOMES[row["outcome"]], *(f"{row[n]:.2f} [{row[n + '_low']:.2f}, {row[n + '_high']:.2f}]"
             for n in ("correlation", "gain"))] for row in lines]  # fmt: skip
    notes = [
        f"{len(federations)} federations; {grid.work_note(results.configs)}",
        *learning_rates.notes(results.entries),
    ]
    files = {"heterogeneity_federations.csv": lambda path: write_text(path, tables.to_csv(federations))}
    return Report(tables.markdown(head, cells) + tables.numbered(notes), lines, None, files)


def correlations(federations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each outcome and metric Spearman's correlation and its gain over ``REFERENCE``, with intervals."""
    groups = [[i for i, f in enumerate(federations) if f["federation"] == name]
              for name in dict.fromkeys(f["federation"] for f in federations)]  # fmt: skip
    draws = numpy_generator(0, "bootstrap").integers(len(groups), size=(DRAWS, len(groups)))
    samples = [[i for group in draw for i in groups[group]] for draw in draws]
    lines = []
    for outcome in OUTCOMES:
        target = np.array([f[outcome] for f in federations], float)
        values = {name: np.array([f[name] for f in federations], float) for name in METRICS}
        rho = {
            name: np.array([spearman(x[s], target[s]) for s in [range(len(x)), *samples]]) for name, x in values.items()
        }
        for name, of_all in rho.items():
            gain = np.abs(of_all) - np.abs(rho[REFERENCE])
            line: dict[str, Any] = {"outcome": outcome, "metric": name, "federations": len(federations)}
            for key, numbers in (("correlation", of_all), ("gain", gain)):
                low, high = np.nanquantile(numbers[1:], [0.025, 0.975])
                line |= {key: numbers[0], f"{key}_low": low, f"{key}_high": high}
            lines.append(line)
    return lines


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation, with mean ranks for ties; nan if all values of x or y are equal."""
    from scipy.stats import rankdata

    a, b = (rankdata(v) - (len(v) + 1) / 2 for v in (x, y))
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm else float("nan")
