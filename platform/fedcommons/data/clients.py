"""The clients' training data as a lazy sequence: a million clients cost what the participants cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples


@dataclass(frozen=True)
class ClientData:
    """What one client trains on.

    x: (n, ...), y: (n,); weight: (n,) float weights w_j of the examples in the loss (AGC's 1/d_j) or None, all 1; ids:
    (n,) rows of the data set they came from, to be read only; n_own: how many of the n count as the client's own in
    the rule of equal work; the others were added to them; commons: what all clients hold alike
    besides their own (FedMix's means: x (m, ...) float, y (m, classes) label frequencies) or None.

    The client's objective is  f_i = (1/n_i) sum_j w_j F(x, xi_j),  for training and for all that is measured of it: the
    sum is divided by the number of examples, never by the sum of the weights.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    ids: Tensor | None = None
    n_own: int | None = None
    commons: Examples | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """(x, y), with weights (x, y, weight): the columns of a batch that the module's ``training_step`` gets."""
        return (self.x, self.y) if self.weight is None else (self.x, self.y, self.weight)


@dataclass(frozen=True)
class Rows(Sequence[np.ndarray]):
    """Which rows of a store each client holds: client i's are ``flat[starts[i] : starts[i] + sizes[i]]``.

    A few vectors, however many clients there are: quick to build and to send. Clients' parts of ``flat`` may overlap.
    ``weight``: of each of ``flat`` in its client's loss, float; None where all are 1.
    """

    flat: Tensor  # int64; a tensor, because a vector that came through Ray as numpy's could not be one without a copy
    starts: np.ndarray  # (N,)
    sizes: np.ndarray  # (N,)
    weight: Tensor | None = None

    @staticmethod
    def of(rows: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None) -> "Rows":
        """The rows of each client, copied together; ``weights``: of its rows in its loss, one for each.

        Raises:
            ValueError: a client has another number of weights than of rows.
        """
        sizes = np.array([len(r) for r in rows])
        flat, weight = torch.from_numpy(np.concatenate(rows)).long(), None
        if weights is not None:
            if [len(w) for w in weights] != sizes.tolist():
                raise ValueError("every client needs one weight for each of its examples")
            weight = torch.from_numpy(np.concatenate(weights)).float()
        return Rows(flat, np.cumsum(sizes) - sizes, sizes, weight)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "np.ndarray | Rows":
        if isinstance(index, slice):
            return Rows(self.flat, self.starts[index], self.sizes[index], self.weight)
        return self.ids(index).numpy(force=True)

    def ids(self, client: int) -> Tensor:
        """A client's rows as a view."""
        return self._of(client, self.flat)

    def weights(self, client: int) -> Tensor | None:
        """The weights of a client's rows as a view; None where all are 1."""
        return None if self.weight is None else self._of(client, self.weight)

    def to(self, device: torch.device) -> "Rows":
        """The same rows on ``device``."""
        weight = None if self.weight is None else self.weight.to(device)
        return replace(self, flat=self.flat.to(device), weight=weight)

    def _of(self, client: int, vector: Tensor) -> Tensor:
        start = self.starts.item(client)
        return vector[start : start + self.sizes.item(client)]


class Clients(Sequence[ClientData]):
    """Clients as rows of one store of examples; ``clients[i]`` gathers client i's when asked."""

    def __init__(
        self,
        store: Examples,
        rows: Sequence[np.ndarray],
        n_own: Sequence[int] | np.ndarray | None = None,
        commons: Examples | None = None,
    ) -> None:
        self.store = store
        self.rows = rows if isinstance(rows, Rows) else Rows.of(rows)
        self.n_own = self.rows.sizes if n_own is None else np.asarray(n_own)
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
        ids, store = self.rows.ids(index), self.store
        x, y = store.x.index_select(0, ids), store.y.index_select(0, ids)  # twice as fast as x[ids]
        return ClientData(x, y, self.rows.weights(index), ids, self.n_own.item(index), self.commons)

    @property
    def sizes(self) -> list[int]:
        """Number of training examples of each client, as a new list."""
        return self.rows.sizes.tolist()

    def on(self, store: Examples) -> "Clients":
        """The same clients on the device of ``store``, a copy of theirs."""
        device = store.y.device
        commons = self.commons.to(device) if self.commons else None
        return Clients(store, self.rows.to(device), self.n_own, commons)

    def with_commons(self, commons: Examples) -> "Clients":
        """The same clients, who hold ``commons`` besides."""
        return Clients(self.store, self.rows, self.n_own, commons)
