"""A projection head between a network and its last layer, as in MOON."""

from torch import Tensor, nn


class Projected(nn.Module):
    """A network, a projection head (Linear d-d, ReLU, Linear d-``dim``) and a new last layer; d: embedding length."""

    def __init__(self, network: nn.Module, dim: int) -> None:
        super().__init__()
        old = network.last
        assert isinstance(old, nn.Linear)
        d, n_classes = old.in_features, old.out_features
        network.last = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, dim))
        self.body = network
        self.last = nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed(x))
