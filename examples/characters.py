r"""A character LSTM that learns to write docstrings: token data, one client per module of the standard library.

The task follows the character model of McMahan et al., "Communication-efficient learning of deep networks from
decentralized data", 2017, whose clients are the roles of Shakespeare's plays.

python examples/characters.py         trains the LSTM for two rounds
python sweeps/run.py --data examples/characters.py:docstrings --model examples/characters.py:CharLSTM --lr 0.5 \
    --partition.name by_group --data.client_test 0.2 --algorithm fedper --evaluate.clients true
"""

import argparse
import calendar
import csv
import random
import shutil
import string
import textwrap
from collections.abc import Iterator
from inspect import getdoc, getmembers
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedcommons import experiment, run

QUICK = {"federation.rounds": 2, "client.epochs": 1, "measure.every": 0, "wandb": "off", "data.limit": 600}
MODULES = (argparse, calendar, csv, random, shutil, string, textwrap)


def texts(module: ModuleType) -> Iterator[str]:
    """Yield the docstrings of the module and of its functions and classes."""
    for thing in (module, *(obj for _, obj in getmembers(module) if getattr(obj, "__module__", "") == module.__name__)):
        yield getdoc(thing) or ""


def docstrings(length: int = 20, stride: int = 9) -> dict[str, Any]:
    """Return pieces of docstrings as ASCII codes; the label is the next character, the group is the module.

    Args:
        length: number of characters in a piece
        stride: number of characters from the start of a piece to the start of the next piece
    """
    pieces, following, modules = [], [], []
    for module in MODULES:
        text = "\n".join(texts(module)).encode("ascii", "replace")
        for first in range(0, len(text) - length, stride):
            pieces.append(list(text[first : first + length]))
            following.append(text[first + length])
            modules.append(module.__name__)
    y = np.array(following)  # The classes are the character codes from 0 to the highest one.
    return {"x": np.array(pieces), "y": y, "groups": np.array(modules), "n_classes": y.max() + 1}


class CharLSTM(nn.Module):
    """An embedding of characters, an LSTM, and a linear layer on the LSTM's last output.

    Args:
        width: width of the embedding and of the LSTM's state
    """

    def __init__(self, n_classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(128, width), nn.LSTM(width, width, batch_first=True)
        self.last = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.embedding(x))[0][:, -1])


if __name__ == "__main__":
    chosen = {"data": f"{__file__}:docstrings", "model": f"{__file__}:CharLSTM", "partition": "by_group"}
    with TemporaryDirectory() as folder:
        result = run(experiment("smoke", values={**QUICK, **chosen, "client.lr": 0.5}), folder, say=lambda text: None)
        print("clients:", result.summary["n_clients"])
        print("loss of the next character by round:", *result.rounds["test/loss"].round(2))
