"""Softmax regression: a linear layer on the pixels or features."""

from math import prod

from torch import Tensor, nn


class Linear(nn.Module):
    """One linear layer on the flattened example, from pixels or features to logits."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(prod(shape), n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
