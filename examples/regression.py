r"""A regression: float labels are targets instead of classes, and a plain network is trained with mean squared error.

python examples/regression.py         trains a linear model for three rounds
python sweeps/run.py --data examples/regression.py:diabetes --model linear --lr 0.01 \
    --partition.name by_group --data.client_test 0.2 --algorithm ditto --evaluate.clients true
"""

from typing import Any

from sklearn.datasets import load_diabetes

from fedcommons import experiment, run

QUICK = {"federation.rounds": 3, "client.epochs": 1, "measure.every": 0, "wandb": "off", "data.limit": None}


def diabetes() -> tuple[Any, Any, Any]:
    """Return ten measurements of 442 patients, their disease progression after a year, and their sex as group."""
    data: Any = load_diabetes()
    x, y = data.data, data.target
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std(), x[:, 1] > 0


if __name__ == "__main__":
    result = run(experiment("smoke", values=QUICK, data=diabetes(), partition="by_group", model="linear", lr=0.01))
    print("squared error by round:", *result.rounds["test/loss"].round(2))
