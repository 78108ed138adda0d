r"""Fine-tuning: a network whose frozen body starts from a file of weights, so that clients send only the head.

python examples/fine_tuning.py        trains the whole network on nearly IID clients, then the head on non-IID clients
python sweeps/run.py --model examples/fine_tuning.py:Body --alpha 10 --out runs/whole
python sweeps/run.py --model examples/fine_tuning.py:Body --body.frozen true \
    --model.weights runs/whole/model.safetensors --data.client_test 0.2 --algorithm ditto --evaluate.clients true
"""

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import Tensor, nn

from fedcommons import experiment, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "data.limit": 200, "measure.every": 0, "wandb": "off"}


class Body(nn.Module):
    """A hidden layer and a linear head.

    Args:
        frozen: whether the hidden layer keeps its initial weights
    """

    def __init__(self, shape: tuple[int, ...], n_classes: int, frozen: bool = False) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(prod(shape), 32), nn.Linear(32, n_classes)
        self.body.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x.flatten(1)).relu())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        values = {**QUICK, "model": f"{__file__}:Body", "alpha": 10.0}
        whole = run(experiment("smoke", values=values), Path(folder) / "whole", say=lambda text: None)
        start = Path(folder) / "start.safetensors"
        save_file(whole.model.state_dict(), start)  # A file of torch.save or of another pretrained network works too.
        values |= {"alpha": 0.1, "model.frozen": True, "model.weights": str(start)}
        head = run(experiment("smoke", values=values), Path(folder) / "head", say=lambda text: None)
        for name, result in (("whole network", whole), ("head only", head)):
            accuracy, sent = result.summary["last_accuracy"], result.rounds["comm/up_bytes"].iloc[-1]
            print(f"{name}: accuracy {accuracy:.2f}, {sent:,.0f} bytes up in a round")
