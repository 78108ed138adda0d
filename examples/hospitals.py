r"""A data set from a CSV file with one client per hospital (partition `by_group`) and local test sets of clients.

The measurements are scikit-learn's breast cancer data. The hospitals are invented, with tumours of different size.

python examples/hospitals.py              writes such a CSV file into a temporary folder, and trains for two rounds
python examples/hospitals.py patients.csv writes the CSV file only
python sweeps/run.py --data examples/hospitals.py:Patients --model linear \
    --partition.name by_group --algorithm ditto --evaluate.clients true
"""

import csv
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

from fedcommons import experiment, numpy_generator, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "wandb": "off", "data.limit": None}
CITIES = ("Bern", "Graz", "Lyon", "Porto", "Turin")


def write(path: Path) -> None:
    """Write a CSV line per patient (569): hospital, year, four measurements, and whether the tumour is malignant."""
    data: Any = load_breast_cancer()
    draws = numpy_generator("hospitals")
    near = np.argsort(np.argsort(data.data[:, 0] + 2 * draws.standard_normal(len(data.target))))
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["hospital", "year", *data.feature_names[:4], "malignant"])
        for row, label, rank in zip(data.data, data.target, near, strict=True):
            city = CITIES[rank * len(CITIES) // len(near)]  # Hospitals differ: later ones tend to get larger tumours.
            lines.writerow([city, draws.integers(2015, 2020), *row[:4], 1 - label])


class Patients:
    """The CSV file as a data set, with measurements scaled to mean 0 and standard deviation 1.

    Args:
        path: path of the CSV file; default: a temporary file that this example writes
    """

    normalised = True

    def __init__(self, path: str = "") -> None:
        with TemporaryDirectory() as folder:
            table = Path(path or f"{folder}/patients.csv")
            if not path:
                write(table)
            lines = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
        columns = [name for name in lines[0] if name not in ("hospital", "year", "malignant")]
        x = np.array([[float(line[name]) for name in columns] for line in lines])
        x, y = (x - x.mean(0)) / x.std(0), np.array([int(line["malignant"]) for line in lines])
        hospitals, years = (np.array([line[name] for line in lines]) for name in ("hospital", "year"))
        is_test = numpy_generator("patients to test on").random(len(y)) < 0.2
        self.train, self.test = (
            {"x": x[some], "y": y[some], "groups": hospitals[some], "factors": {"year": years[some]}}
            for some in (~is_test, is_test)
        )


if __name__ == "__main__":
    if sys.argv[1:]:
        write(Path(sys.argv[1]))
        sys.exit()
    with TemporaryDirectory() as folder:
        write(Path(folder) / "patients.csv")
        chosen = {"data": f"{__file__}:Patients", "data.path": str(Path(folder) / "patients.csv"), "model": "linear"}
        described = experiment("smoke", values={**QUICK, **chosen, "partition": "by_group"})
        result = run(described, Path(folder) / "run", say=lambda text: None)
        partition = json.loads((Path(folder) / "run" / "partition.json").read_text(encoding="utf-8"))
        print("patients of each hospital:", *partition["sizes"], "and to test on:", *partition["test_sizes"])
        print("last accuracy:", round(result.summary["last_accuracy"], 2))
