r"""The 2NN of McMahan et al. (2017), with two hidden layers of 200 units, trained with FedAvg and with FedAdam.

python examples/two_nn.py             compares FedAvg and FedAdam for five rounds
python sweeps/run.py --model examples/two_nn.py:TwoNN --algorithm fedadam --fedadam.server_lr 0.03
python sweeps/run.py --model examples/two_nn.py:TwoNN --algorithm ditto \
    --data.client_test 0.2 --evaluate.clients true
"""

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from fedcommons import experiment, run

QUICK = {"federation.rounds": 5, "client.epochs": 1, "data.limit": 400, "measure.every": 0, "wandb": "off"}
SERVERS = {"fedavg": {}, "fedadam": {"fedadam.server_lr": 0.03}}


class TwoNN(nn.Module):
    """A network with two hidden layers of rectified linear units.

    Args:
        width: number of units in each hidden layer
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, width: int = 200) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(prod(shape), width), nn.Linear(width, width)
        self.last = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x.flatten(1)).relu()).relu())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for server, constants in SERVERS.items():
            values = {**QUICK, **constants, "algorithm": server, "model": f"{__file__}:TwoNN"}
            result = run(experiment("smoke", values=values), Path(folder) / server, say=lambda text: None)
            print(f"{server}, accuracy by round:", *result.rounds["test/accuracy"].round(2))
