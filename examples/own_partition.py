"""A user-defined partition: the clients' numbers of examples decay as a power of the client's index.

python examples/own_partition.py      partitions the digits over four clients, and trains for two rounds
python sweeps/run.py --partition examples/own_partition.py:power_law --partition.power 2
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np

from fedcommons import experiment, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 0, "wandb": "off"}


def power_law(
    labels: np.ndarray, n_clients: int, rng: np.random.Generator, power: Annotated[float, "[0, 10]"] = 1.0
) -> list[np.ndarray]:
    """Return the row indices of each client: for client i at least one, about in proportion to (i + 1)^-power.

    Args:
        power: exponent by which the clients' numbers of examples decay; with 0 the numbers are equal
    """
    shares = np.arange(1, n_clients + 1) ** -power
    ends = np.cumsum(shares / shares.sum())[:-1] * (len(labels) - n_clients)
    return np.split(rng.permutation(len(labels)), ends.astype(int) + np.arange(1, n_clients))


if __name__ == "__main__":
    chosen = {"partition": f"{__file__}:power_law", "partition.power": 2.0, "partition.n_clients": 4}
    with TemporaryDirectory() as folder:
        result = run(experiment("smoke", values={**QUICK, **chosen}), folder, say=lambda text: None)
        sizes = json.loads((Path(folder) / "partition.json").read_text(encoding="utf-8"))["sizes"]
        print("images of each client:", *sizes)
        print("last accuracy:", round(result.summary["last_accuracy"], 2))
