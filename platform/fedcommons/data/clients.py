"""The clients' training data as a lazy sequence: a million clients cost what the participants cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.datasets import Examples


@dataclass(frozen=True)
class ClientData:
    """What one client trains on.

    x: (n, ...), y: (n,); weight: (n,) weights of examples in the loss (AGC's 1/d_j) or None; ids: (n,) rows of the
    data set they came from; n_own: how many of the n count as the client's own in
    the rule of equal work; the others were added to them; commons: what all clients hold alike
    besides their own (FedMix's means: x (m, ...) float, y (m, classes) label frequencies) or None.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    ids: Tensor | None = None
    n_own: int | None = None
    commons: Examples | None = None

    def __len__(self) -> int:
        return len(self.y)


class Clients(Sequence[ClientData]):
    """Clients as index arrays into one store of examples; ``clients[i]`` gathers client i's rows when asked."""

    def __init__(
        self,
        store: Examples,
        rows: Sequence[np.ndarray],
        n_own: Sequence[int] | None = None,
        commons: Examples | None = None,
    ) -> None:
        self.store = store
        self.rows = rows
        self.n_own = [len(r) for r in rows] if n_own is None else n_own
        self.commons = commons

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...
    @overload
    def __getitem__(self, index: slice) -> "Clients": ...
    def __getitem__(self, index: int | slice) -> "ClientData | Clients":
        if isinstance(index, slice):
            return Clients(self.store, self.rows[index], self.n_own[index], self.commons)
        ids = torch.tensor(self.rows[index], device=self.store.x.device)  # a copy: rows from Ray are read-only
        return ClientData(self.store.x[ids], self.store.y[ids], ids=ids, n_own=self.n_own[index], commons=self.commons)

    @property
    def sizes(self) -> list[int]:
        """Number of training examples of each client."""
        return [len(r) for r in self.rows]

    def to(self, device: torch.device) -> "Clients":
        """The same clients with the store on ``device``."""
        commons = self.commons.to(device) if self.commons else None
        return Clients(self.store.to(device), self.rows, self.n_own, commons)

    def with_extra(self, extra: Examples, parts: Sequence[np.ndarray]) -> "Clients":
        """Client i gets the rows ``parts[i]`` of ``extra`` besides its own."""
        offset = len(self.store)
        store = Examples(torch.cat([self.store.x, extra.x]), torch.cat([self.store.y, extra.y]))
        rows = [np.concatenate([own, part + offset]) for own, part in zip(self.rows, parts, strict=True)]
        return Clients(store, rows, self.n_own, self.commons)

    def with_commons(self, commons: Examples) -> "Clients":
        """The same clients, who hold ``commons`` besides."""
        return Clients(self.store, self.rows, self.n_own, commons)
