"""A multilayer perceptron.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
arXiv:1602.05629: with 200 and 200 hidden units it is their 2NN for MNIST, with 199,210 weights.
"""

from itertools import pairwise
from math import prod
from typing import Annotated

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers on the flattened example, each but the last followed by ReLU.

    Args:
        hidden: widths of the hidden layers
    """

    def __init__(
        self, shape: tuple[int, ...], n_classes: int, hidden: Annotated[tuple[int, ...], "[1, 1e6]"] = (200, 200)
    ) -> None:
        super().__init__()
        widths = (prod(shape), *hidden)
        layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
        self.hidden = nn.Sequential(nn.Flatten(), *layers)
        self.last = nn.Linear(widths[-1], n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.hidden(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
