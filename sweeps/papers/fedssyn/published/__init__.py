"""Numbers printed in the Fedssyn paper, shown next to ours if data set and settings are the paper's."""

import csv
from pathlib import Path

HERE = Path(__file__).parent


def fedssyn_table1() -> dict[tuple, tuple[float, str]]:
    """Return Table 1 of Fedssyn: (target accuracy in [0, 1], rounds as text) by the values of ``columns.key``.

    The key is (data set, clients, participation, alpha, algorithm, sharing strategy); ``>100`` was not reached.
    """
    results: dict[tuple, tuple[float, str]] = {}
    with (HERE / "fedssyn_table1_rounds.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            federation = int(row["n_clients"]), float(row["participation_rate"]), float(row["alpha"])
            target = float(row["target_accuracy_percent"]) / 100
            for setting, column in (("real", "rounds_vanilla"), ("shuffled_synthetic", "rounds_fedssyn")):
                results[row["dataset"], *federation, row["algorithm"], setting] = target, row[column]
    return results


def fedssyn_table_a2() -> dict[tuple, str]:
    """Return Table A.2 of Fedssyn: saved communication in percent, as text; ``>`` is a lower bound.

    The key is (data set, clients, participation, alpha, algorithm).
    """
    with (HERE / "fedssyn_tableA2_saved_communication_percent.csv").open(encoding="utf-8") as file:
        return {
            (r["dataset"], int(r["n_clients"]), float(r["participation_rate"]), float(r["alpha"]), "fedavg"):
            r["saved_percent"] for r in csv.DictReader(file)
        }  # fmt: skip


def fedssyn_table2() -> dict[tuple[str, float, str], tuple[str, str, str]]:
    """Return Table 2 of Fedssyn: (top-1 in %, rounds, M_Fedssyn / M_FedGEN in %) by (data set, alpha, method).

    M: bytes to the target accuracy. A text is empty if the table does not print the number. Only rows of fedgen have
    the ratio, as it divides by FedGEN's bytes.
    """
    with (HERE / "fedssyn_table2_synthetic_baselines.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ratio = "memory_ratio_fedssyn_over_fedgen_percent"
    ratios = {(r["dataset"], r["alpha"]): r[ratio] for r in rows if r[ratio]}
    return {
        (r["dataset"], float(r["alpha"]), r["method"]):
        (r["top1_percent"], r["rounds_to_target"], ratios[r["dataset"], r["alpha"]] if r["method"] == "fedgen" else "")
        for r in rows
    }  # fmt: skip
