"""A user-defined model: a plain network, which clients train with cross entropy.

A LightningModule with ``training_step`` and ``configure_optimizers`` is also accepted as a model.

python examples/own_model.py          trains the network for two rounds
python sweeps/run.py --model examples/own_model.py:Perceptron --perceptron.width 32
"""

from math import prod
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from fedcommons import experiment, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 0, "wandb": "off"}


class Perceptron(nn.Module):
    """A perceptron with one hidden layer on the pixels.

    Args:
        width: number of units in the hidden layer
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(prod(shape), width), nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.flatten(1)).relu())


if __name__ == "__main__":
    described = experiment("smoke", values={**QUICK, "model": f"{__file__}:Perceptron", "model.width": 32})
    with TemporaryDirectory() as folder:
        result = run(described, folder, say=lambda text: None)
        print("accuracy by round:", *result.rounds["test/accuracy"].round(2))
