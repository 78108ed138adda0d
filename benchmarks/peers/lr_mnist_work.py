"""What all sides of LR_MNIST share: clients, the model, local SGD, the report. Needs torch and safetensors only.

Sides write a last line ``PEERBENCH {json}``, with times of the clock that all processes of a machine share.
"""

import json
import os
import time

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

LR, BATCH, ROUNDS, CLIENTS, JOINING = 0.03, 10, 100, 1000, 10

_file: dict[str, Tensor] = {}


def data() -> dict[str, Tensor]:
    """x, y of all clients in turn, ends (N,) of each; joining (R, clients a round); test_x, test_y; weight, bias."""
    if not _file:
        _file.update(load_file(os.environ["LR_MNIST"]))
    return _file


def client(i: int) -> tuple[Tensor, Tensor]:
    """Images and labels of client ``i``."""
    ends = data()["ends"]
    rows = slice(int(ends[i - 1]) if i else 0, int(ends[i]))
    return data()["x"][rows], data()["y"][rows]


def softmax_regression() -> nn.Module:
    """With the first weights of fedcommons' run."""
    model = nn.Linear(784, 10)
    model.load_state_dict({"weight": data()["weight"], "bias": data()["bias"]})
    return model


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """An epoch of plain SGD, in the order of the rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for i in range(0, len(x), BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i : i + BATCH]), y[i : i + BATCH]).backward()
        optimizer.step()


@torch.no_grad()
def report(system: str, began: float, ended: float, model: nn.Module) -> None:
    """Print when the first round began and the last ended, and the accuracy on test images."""
    right = model(data()["test_x"]).argmax(1) == data()["test_y"]
    line = {
        "system": system,
        "began": began,
        "ended": ended,
        "done": time.time(),
        "accuracy": right.float().mean().item(),
    }
    print("PEERBENCH " + json.dumps(line), flush=True)
