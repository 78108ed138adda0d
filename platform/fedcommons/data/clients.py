"""The clients' training data as a lazy sequence: the cost depends on a round's participants, not on all N clients."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.errors import UserError


@dataclass(frozen=True)
class ClientData:
    """What one client trains on.

    x: (n, ...), y: (n,).
    weight: (n,) float weights of the examples in the loss, of mean 1 (w_j n / sum w_j), or None if all are alike.
    ids: (n,) rows of the data set that the examples came from.
    n_own: how many of the n examples the rule of equal work counts as the client's own; by default ``size``.
    total: sum_j w_j, or None without weights; see ``size``.
    commons: examples that all clients hold (FedMix's means: x (m, ...) float, y (m, classes) frequencies), or None.
    beside: further columns (n, ...), which follow in the batches that a method's own loss gets.

    The client's objective, in training and in measurements, is  f_i = sum_j w_j F(x, xi_j) / sum_j w_j.  So an example
    that is held twice with weight 1/2 changes neither f_i nor the client's size sum_j w_j. With w_j = 1/d_j for an
    example that d_j clients hold, the sizes add up to the number of different examples.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    _: KW_ONLY
    ids: Tensor | None = None
    n_own: float | None = None
    total: float | None = None
    commons: Examples | None = None
    beside: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.y.shape[0]  # len() of a tensor takes four times as long

    @property
    def size(self) -> float:
        """The client's size in averages: sum_j w_j, the number of its examples if they have no weights."""
        return float(len(self)) if self.total is None else self.total

    def subset(self, rows: Tensor) -> "ClientData":
        """Some of the examples, by their numbers (m,) int64: their share of ``n_own`` and of the weights.

        ``dataclasses.replace`` keeps both as they were, so that a part would train as if more of it were its own.
        """
        n, m = len(self), len(rows)
        weight, ids, total = self.weight, None if self.ids is None else self.ids[rows], self.total
        if weight is not None:
            share = float(weight[rows].sum(dtype=torch.float64))
            total = self.size * share / n
            weight = weight[rows] * (m / share)
        n_own = None if self.n_own is None else self.n_own * m / n
        beside = tuple(column[rows] for column in self.beside)
        return ClientData(
            self.x[rows], self.y[rows], weight, ids=ids, n_own=n_own, total=total, commons=self.commons, beside=beside
        )

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """(x, y), with weights (x, y, weight): the columns of a batch that the module's ``training_step`` gets."""
        return (self.x, self.y) if self.weight is None else (self.x, self.y, self.weight)


def contents(x: Tensor) -> Counter[bytes]:
    """Return how often examples (n, ...) have the same bits, by a digest of these."""
    return Counter(digests(x))


def digests(x: Tensor) -> list[bytes]:
    """Return a digest of the bits of each of the examples (n, ...)."""
    rows = x.detach().to("cpu").reshape(len(x), -1).contiguous().view(torch.uint8).numpy() if x.numel() else ()
    return [blake2b(row.data, digest_size=16).digest() for row in rows]


@dataclass(frozen=True)
class Rows(Sequence[np.ndarray]):
    """Which rows of a store each client holds: client i's are ``flat[starts[i] : starts[i] + sizes[i]]``.

    These few vectors are quick to build and to send for any number of clients. Clients' parts of ``flat`` may overlap.
    ``weight``: float64 weight w_j, in its client's loss, of each entry of ``flat``; None if all are 1.
    ``totals``: (N,) sum of each client's weights, its size in averages; by default computed.

    Raises:
        ValueError: a client's weights are not finite, negative or all zero.
    """

    flat: Tensor  # int64; a tensor, as a numpy array that came through Ray is read-only and would have to be copied
    starts: np.ndarray  # (N,)
    sizes: np.ndarray  # (N,)
    weight: Tensor | None = None
    totals: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if len(self.totals) == len(self.sizes):
            return
        totals = self.sizes
        if self.weight is not None:
            if not bool(torch.isfinite(self.weight).all() and (self.weight >= 0).all()):
                raise ValueError("weights of examples must be finite and not negative")
            sums = np.concatenate([[0.0], np.cumsum(self.weight.numpy(force=True), dtype=np.float64)])
            totals = sums[self.starts + self.sizes] - sums[self.starts]
            if (totals <= 0).any():
                raise ValueError(f"the weights of client {int(np.argmin(totals))} are all zero")
        object.__setattr__(self, "totals", totals)

    @staticmethod
    def of(rows: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None) -> "Rows":
        """Built from the rows of each client and, if given, the ``weights`` of these rows in the client's loss.

        Raises:
            ValueError: a client does not have one weight for each row.
        """
        sizes = np.array([len(r) for r in rows])
        flat, weight = torch.from_numpy(np.concatenate(rows)).long(), None
        if weights is not None:
            if [len(w) for w in weights] != sizes.tolist():
                raise ValueError("every client needs one weight for each of its examples")
            weight = torch.from_numpy(np.concatenate(weights)).double()
        return Rows(flat, np.cumsum(sizes) - sizes, sizes, weight)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "np.ndarray | Rows":
        if isinstance(index, slice):
            return Rows(self.flat, self.starts[index], self.sizes[index], self.weight, self.totals[index])
        return self.ids(index).numpy(force=True)

    def ids(self, client: int) -> Tensor:
        """A client's rows as a view."""
        return self._of(client, self.flat)

    def weights(self, client: int) -> Tensor | None:
        """The weights of a client's rows, scaled to mean 1; None if all are 1."""
        if self.weight is None:
            return None
        return (self._of(client, self.weight) * (self.sizes.item(client) / self.totals.item(client))).float()

    def to(self, device: torch.device) -> "Rows":
        """The same rows on ``device``."""
        weight = None if self.weight is None else self.weight.to(device)
        return replace(self, flat=self.flat.to(device), weight=weight)

    def _of(self, client: int, vector: Tensor) -> Tensor:
        start = self.starts.item(client)
        return vector[start : start + self.sizes.item(client)]


class Clients(Sequence[ClientData]):
    """Clients as rows of one store of examples; ``clients[i]`` copies client i's examples when it is called."""

    def __init__(
        self,
        store: Examples,
        rows: Sequence[np.ndarray],
        n_own: Sequence[int] | np.ndarray | None = None,
        commons: Examples | None = None,
    ) -> None:
        self.store = store
        self.rows = rows if isinstance(rows, Rows) else Rows.of(rows)
        self.n_own = self.rows.totals if n_own is None else np.asarray(n_own)
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
        total = None if self.rows.weight is None else float(self.rows.totals.item(index))
        own, commons = self.n_own.item(index), self.commons
        return ClientData(x, y, self.rows.weights(index), ids=ids.clone(), n_own=own, total=total, commons=commons)

    @property
    def sizes(self) -> list[int]:
        """Number of training examples of each client, as a new list."""
        return self.rows.sizes.tolist()

    def counts(self, n_classes: int | None) -> Tensor:
        """(N, classes): how many examples of each class every client has.

        Raises:
            UserError: labels are no classes.
        """
        if n_classes is None:
            raise UserError("class counts are asked for, and the labels of this data set are no classes.")
        of_client, first = (
            np.repeat(np.arange(len(self)), self.rows.sizes),
            np.cumsum(self.rows.sizes) - self.rows.sizes,
        )
        at = np.arange(len(of_client)) + np.repeat(self.rows.starts - first, self.rows.sizes)
        labels = self.store.y[self.rows.flat[torch.from_numpy(at)]].numpy(force=True)
        cells = np.bincount(of_client * n_classes + labels, minlength=len(self) * n_classes)
        return torch.from_numpy(cells.reshape(len(self), n_classes))

    def on(self, store: Examples) -> "Clients":
        """The same clients, with ``store``, a copy of their store on another device."""
        device = store.y.device
        commons = self.commons.to(device) if self.commons else None
        return Clients(store, self.rows.to(device), self.n_own, commons)

    def with_commons(self, commons: Examples) -> "Clients":
        """The same clients, who also hold ``commons``."""
        return Clients(self.store, self.rows, self.n_own, commons)
