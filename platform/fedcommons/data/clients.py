"""A lazy sequence of the clients' training data: each access to a client copies the client's examples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fedcommons.data.examples import Examples
from fedcommons.deprecated import accepts_old_names
from fedcommons.errors import UserError


@accepts_old_names(beside="extra_columns")
@dataclass(frozen=True)
class ClientData:
    """The examples that one client trains on.

    x: (n, ...) inputs; y: (n,) labels.
    weight: (n,) float weights in the loss, scaled to mean 1 (w_j n / sum_j w_j); None if all weights are equal.
    ids: (n,) row numbers of the examples in the store of all examples.
    n_own: number of examples that count as the client's own in the rule of equal work (``LocalSGD.epochs_for``), which
        gives clients with shared examples fewer epochs; None: no fewer epochs.
    total: sum_j w_j of the unscaled weights, or None without weights; see ``size``.
    commons: examples that all clients hold, or None. In FedMix: m means of examples, x (m, ...) and y (m, classes).
    extra_columns: further columns (n, ...) that follow ``columns`` in a batch, only for a method that defines its loss.

    Client i's objective is  f_i(w) = sum_j w_j F(w, xi_j) / sum_j w_j,  with the loss F of model weights w on example
    xi_j and the example's weight w_j. Two copies of an example with weight 1/2 count as one example with weight 1.
    With w_j = 1/d_j for an example that d_j clients hold, the clients' sums add up to the number of different examples.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    _: KW_ONLY
    ids: Tensor | None = None
    n_own: float | None = None
    total: float | None = None
    commons: Examples | None = None
    extra_columns: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.y.shape[0]  # len() of a tensor is four times slower

    @property
    def size(self) -> float:
        """Return the client's weight in averages over clients: sum_j w_j, or n if the examples have no weights."""
        return float(len(self)) if self.total is None else self.total

    def subset(self, rows: Tensor) -> "ClientData":
        """Return the examples at the indices ``rows`` (m,) int64.

        ``n_own`` is multiplied by m/n, where n is the number of all examples. ``total`` becomes the sum of the chosen
        examples' weights. A caller's ``dataclasses.replace`` would keep the values of all n examples, so that training
        on the subset would take too many epochs.
        """
        n, m = len(self), len(rows)
        x, y, weight, total = self.x[rows], self.y[rows], self.weight, self.total
        if weight is not None:
            share = float(weight[rows].sum(dtype=torch.float64))
            total = self.size * share / n
            weight = weight[rows] * (m / share)
        ids = None if self.ids is None else self.ids[rows]
        n_own = None if self.n_own is None else self.n_own * m / n
        extra = tuple(column[rows] for column in self.extra_columns)
        return replace(self, x=x, y=y, weight=weight, ids=ids, n_own=n_own, total=total, extra_columns=extra)

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Return the columns of a batch for ``training_step``: (x, y), or (x, y, weight) if examples have weights."""
        return (self.x, self.y) if self.weight is None else (self.x, self.y, self.weight)


def contents(x: Tensor) -> Counter[bytes]:
    """Return how often each example occurs in x (n, ...), by the hash of the example's bytes (``digests``)."""
    return Counter(digests(x))


def digests(x: Tensor) -> list[bytes]:
    """Return one hash per example of x (n, ...), computed from the bytes of the example's values."""
    rows = x.detach().to("cpu").reshape(len(x), -1).contiguous().view(torch.uint8).numpy() if x.numel() else ()
    return [blake2b(row.data, digest_size=16).digest() for row in rows]


@dataclass(frozen=True)
class Rows(Sequence[np.ndarray]):
    """The row numbers of a store's examples per client: client i holds ``flat[starts[i] : starts[i] + sizes[i]]``.

    A few vectors are quick to build and to send for any number of clients N. Clients' slices of ``flat`` may overlap.

    flat: row numbers of all clients. starts, sizes: (N,) start and length of each client's slice.
    weight: float64 weight w_j of each entry of ``flat`` in the client's loss; None if all weights are 1.
    totals: (N,) sum of each client's weights, by which averages over clients are weighted; default: computed.

    Raises:
        ValueError: a client's weights are infinite, nan, negative or all zero.
    """

    flat: Tensor  # int64; a tensor, because torch must copy the read-only numpy arrays that Ray delivers
    starts: np.ndarray  # (N,) first index of each client's slice
    sizes: np.ndarray  # (N,) length of each client's slice
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
    def from_lists(rows: Sequence[np.ndarray], weights: Sequence[np.ndarray] | None = None) -> "Rows":
        """Build ``Rows`` from one vector of row numbers per client.

        weights: one vector per client with the weights of its rows in the loss; None: all weights are 1.

        Raises:
            ValueError: a client does not have one weight for each row.
        """
        sizes, weight = np.array([len(r) for r in rows]), None
        if weights is not None:
            if [len(w) for w in weights] != sizes.tolist():
                raise ValueError("every client needs one weight for each of its examples")
            weight = torch.from_numpy(np.concatenate(weights)).double()
        return Rows.in_order(torch.from_numpy(np.concatenate(rows)).long(), sizes, weight)

    @staticmethod
    def in_order(flat: Tensor, sizes: np.ndarray, weight: Tensor | None = None) -> "Rows":
        """Build ``Rows`` whose clients hold consecutive slices of ``flat``, of the lengths ``sizes`` (N,)."""
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
        """Return a client's row numbers (n,) as a view of ``flat``."""
        return self._slice(client, self.flat)

    def weights(self, client: int) -> Tensor | None:
        """Return the float32 weights (n,) of a client's rows, scaled to mean 1; None if all weights are 1."""
        if self.weight is None:
            return None
        return (self._slice(client, self.weight) * (self.sizes.item(client) / self.totals.item(client))).float()

    def counts(self, labels: np.ndarray, n_classes: int) -> np.ndarray:
        """Return the number of each client's rows per class, (N, classes) int64; labels: class of each row number."""
        owners, firsts = np.repeat(np.arange(len(self)), self.sizes), np.cumsum(self.sizes) - self.sizes
        places = np.arange(len(owners)) + np.repeat(self.starts - firsts, self.sizes)
        classes = labels[self.flat.numpy(force=True)[places]]
        cells = np.bincount(owners * n_classes + classes, minlength=len(self) * n_classes)
        return cells.reshape(len(self), n_classes)

    def to(self, device: torch.device) -> "Rows":
        """Return a copy with the tensors ``flat`` and ``weight`` on ``device``."""
        weight = None if self.weight is None else self.weight.to(device)
        return replace(self, flat=self.flat.to(device), weight=weight)

    def _slice(self, client: int, vector: Tensor) -> Tensor:
        return vector.narrow(0, self.starts.item(client), self.sizes.item(client))


class Clients(Sequence[ClientData]):
    """A sequence of the clients' data, as row numbers in one store of examples; ``clients[i]`` copies client i's rows.

    store: all examples. rows: row numbers per client. n_own: (N,) number of each client's examples that count
    as its own (see ``ClientData``); default: sum of the client's weights. commons: examples that all clients hold.
    """

    def __init__(
        self,
        store: Examples,
        rows: Sequence[np.ndarray],
        n_own: Sequence[int] | np.ndarray | None = None,
        commons: Examples | None = None,
    ) -> None:
        self.store = store
        self.rows = rows if isinstance(rows, Rows) else Rows.from_lists(rows)
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
        n_own, commons = self.n_own.item(index), self.commons
        return ClientData(x, y, self.rows.weights(index), ids=ids.clone(), n_own=n_own, total=total, commons=commons)

    @property
    def sizes(self) -> list[int]:
        """Return the number of training examples of each client, as a new list of length N."""
        return self.rows.sizes.tolist()

    def counts(self, n_classes: int | None) -> Tensor:
        """Return the number of each client's examples per class: (N, classes) int64.

        Raises:
            UserError: the labels are not classes, or they are soft labels.
        """
        if n_classes is None:
            raise UserError("class counts are requested, but the labels of this data set are not classes.")
        if self.store.y.is_floating_point():
            raise UserError("class counts are requested, but the shared examples have soft labels.")
        return torch.from_numpy(self.rows.counts(self.store.y.numpy(force=True), n_classes))

    def on(self, store: Examples) -> "Clients":
        """Return the same clients on another device; ``store``: copy of all examples on that device."""
        device = store.y.device
        commons = self.commons.to(device) if self.commons else None
        return Clients(store, self.rows.to(device), self.n_own, commons)

    def with_commons(self, commons: Examples) -> "Clients":
        """Return the same clients, each of which also holds the shared examples ``commons``."""
        return Clients(self.store, self.rows, self.n_own, commons)
