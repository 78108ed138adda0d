"""Partitions of the training data over clients: IID, label skew by Dirichlet distributions, and quantity skew.

alpha: concentration of the Dirichlet distribution; N: number of clients; n_aux: number of clients in a group. A
group of m clients divides the share m/N of the training data among its clients (Lin et al., NeurIPS 2020,
arXiv:2006.07242, as in Fedssyn's released code, github.com/lyn1874/fedssyn).
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Annotated, Any, Protocol

import numpy as np
import torch

from fedcommons.data import clients
from fedcommons.data.dirichlet import group_sizes, plain_sizes, sizes_by_all_priors, sizes_by_priors
from fedcommons.data.user_arrays import as_tensor, kind_of
from fedcommons.errors import UserError, quote

Rows = list[np.ndarray]
Alpha = Annotated[float, "[1e-300, 1e30]"]  # with a smaller alpha, logarithms of draws overflow float64


@dataclass(frozen=True)
class Partitioned:
    """The row numbers of each client's training examples, and the number of examples per client and class."""

    rows: Rows
    class_counts: np.ndarray | None  # (N, classes); None if labels are not classes

    @staticmethod
    def from_rows(rows: Rows, labels: np.ndarray, n_classes: int | None) -> "Partitioned":
        """Build the object from one vector of row numbers per client; class counts come from ``labels`` (n,)."""
        if n_classes is None:
            return Partitioned(rows, None)
        return Partitioned(rows, clients.Rows.from_lists(rows).counts(labels, n_classes))

    @property
    def fingerprint(self) -> str:
        """Return a hash of all clients' row numbers; runs with equal seeds are comparable only if hashes agree."""
        digest = hashlib.sha256()
        for rows in self.rows:
            digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


class Partition(Protocol):
    """A function that assigns the rows of the training data to clients, each row to at most one client.

    The function may have any of the parameters below, and constants with defaults as further parameters. It returns one
    sequence of row numbers in 0 ... n - 1 per client, so the number of clients N is the length of the result.

    x: (n, ...) examples. labels: (n,) or (n, k). groups: (n,) number of each example's source. factors: further
    attributes, (n,) by name. rows: (n,) position of each example in the set that the data set component returned,
    before rows were held out. n_clients: number of clients. n_classes: number of classes. rng: numpy generator, and
    seed: integer; both are derived from the run's seed.
    """

    def __call__(self, *args: Any, **constants: Any) -> Sequence[Any]: ...


def partition(name: str, deal: Callable[[], Sequence[Any]], labels: np.ndarray, n_classes: int | None) -> Partitioned:
    """Call ``deal``, which returns one sequence of row numbers per client, check the result and count the classes.

    name: name of the partition, for messages. labels: (n, ...). n_classes: None if the labels are not classes.

    Raises:
        UserError: a client has no rows, or a row does not exist or is assigned twice, or ``deal`` raised it.
    """
    rows = _whole_rows(name, deal(), len(labels))
    if empty := [i for i, r in enumerate(rows) if len(r) == 0]:
        raise UserError(
            f"the partition cannot be met: partition {name} gives client {empty[0]} no images; "
            "use fewer clients or more images."
        )
    return Partitioned.from_rows(rows, labels, n_classes)


def _whole_rows(name: str, clients: Sequence[Any], n: int) -> Rows:
    """Return each client's row numbers as int64, after a check that each is in 0 ... n - 1 and occurs only once."""
    requirement = f"partition.name {quote(name)} must return a list with each client's row numbers (integers)"
    if isinstance(clients, Mapping) or not isinstance(clients, Iterable):
        raise UserError(f"{requirement}, got {kind_of(clients)}.")
    rows: Rows = []
    # A user's function may return an endless iterator. More clients than rows are an error, so n + 1 clients suffice.
    for client, values in enumerate(islice(clients, n + 1)):
        t = as_tensor(f"partition.name {quote(name)}", f"rows of client {client}", values)
        if t.dim() != 1 or (len(t) and (t.is_floating_point() or t.dtype == torch.bool)):
            hint = "; np.flatnonzero gives a mask's rows" if t.dtype == torch.bool else ""
            raise UserError(f"{requirement}, got {tuple(t.shape)} {t.dtype} for client {client}{hint}.")
        rows.append(t.long().numpy())
    if not rows:
        raise UserError(f"{requirement}, got an empty list.")
    everything = np.concatenate(rows)
    if len(everything) and (everything.min() < 0 or everything.max() >= n):
        raise UserError(f"partition.name {quote(name)} returns rows outside of 0 ... {n - 1}.")
    if len(everything) and np.bincount(everything).max() > 1:
        raise UserError(f"partition.name {quote(name)} assigns a row twice.")
    return rows


def iid(labels: np.ndarray, n_clients: int, rng: np.random.Generator) -> Rows:
    """Shuffle the rows and cut them into N slices whose sizes differ by at most one row."""
    return _equal_slices(rng.permutation(len(labels)), n_clients)


def dirichlet_classes(
    labels: np.ndarray,
    n_clients: int,
    n_classes: int,
    rng: np.random.Generator,
    alpha: Alpha = 0.1,
    n_aux: Annotated[int | None, "[1, 1e9]"] = None,
    recut: bool = True,
) -> Rows:
    """Lin et al. (2020), as in Fedssyn: groups of n_aux clients; per class, shares ~ Dir(alpha) over a group's clients.

    The fair share is the group's number of rows divided by its number of clients. A client that holds its fair share
    gets no rows of further classes. A group's shares are redrawn until every client has at least half of its fair
    share. With ``recut`` the clients' lists of rows are joined and cut into N equal slices. So a slice may contain rows
    that were drawn for the neighbouring client.

    Args:
        alpha: concentration of the Dirichlet distribution; smaller is more heterogeneous
        n_aux: number of clients in a group; default: as in Fedssyn's released code, mostly all N
        recut: cut the joined lists into N equal slices, as the paper does
    """
    n_aux = n_aux or default_n_aux(n_clients, n_classes, alpha)
    if n_aux > n_clients:
        raise UserError(f"partition.n_aux must be at most the number of clients, {n_clients}, got {n_aux}.")
    clients: Rows = []
    shuffled = rng.permutation(len(labels))
    firsts = range(0, n_clients, n_aux)
    cuts = [len(labels) * first // n_clients for first in [*firsts, n_clients]]
    for first, start, stop in zip(firsts, cuts, cuts[1:], strict=False):
        group, size = shuffled[start:stop], min(n_aux, n_clients - first)
        half_of_fair_share = -(-len(group) // (2 * size))
        clients += _deal(group, labels, n_classes, size, alpha, rng, half_of_fair_share)
    return _equal_slices(np.concatenate(clients), n_clients) if recut else clients


def dirichlet_niid(
    labels: np.ndarray, n_clients: int, n_classes: int, rng: np.random.Generator, alpha: Alpha = 0.1
) -> Rows:
    """NIID-Bench (Li et al. 2022): per class, client shares ~ Dir(alpha); at least 10 images per client.

    The fair share is the number of images divided by the number of clients. A client that holds its fair share gets no
    images of further classes. The draw is repeated until every client has at least 10 images.

    Args:
        alpha: concentration of the Dirichlet distribution; smaller is more heterogeneous
    """
    return _deal(rng.permutation(len(labels)), labels, n_classes, n_clients, alpha, rng, 10)


def dirichlet_clients(
    labels: np.ndarray, n_clients: int, n_classes: int, rng: np.random.Generator, alpha: Alpha = 0.1
) -> Rows:
    """FedDyn (Acar et al. 2021): per client, class shares ~ Dir(alpha); all clients get equal numbers of images.

    Args:
        alpha: concentration of the Dirichlet distribution; smaller is more heterogeneous
    """
    sizes = sizes_by_priors(np.bincount(labels, minlength=n_classes), n_clients, alpha, rng)
    return _cut(rng.permutation(len(labels)), labels, sizes, rng)


def dirichlet_clients_all(
    labels: np.ndarray, n_clients: int, n_classes: int, rng: np.random.Generator, alpha: Alpha = 0.1
) -> Rows:
    """FedCVAE (Heinbaugh et al. 2023): per client p_i ~ Dir(alpha); client i gets the share p_ic/sum_j p_jc of class c.

    p_i is client i's distribution over classes, and the sum is over all clients j. Clients without images are dropped,
    so N may be smaller than n_clients. In this case the released code raises an error. No client is dropped if every
    class has at least (classes x n_clients) images, because the largest of a client's p_ic is at least 1/classes.

    Args:
        alpha: concentration of the Dirichlet distribution; smaller is more heterogeneous
    """
    sizes = sizes_by_all_priors(np.bincount(labels, minlength=n_classes), n_clients, alpha, rng)
    return [rows for rows in _cut(rng.permutation(len(labels)), labels, sizes, rng) if len(rows)]


def dirichlet_plain(
    labels: np.ndarray, n_clients: int, n_classes: int, rng: np.random.Generator, alpha: Alpha = 0.1
) -> Rows:
    """Makkonen et al. (2024): per class, client shares ~ Dir(alpha); clients without images are dropped.

    So N may be smaller than n_clients. A client's number of images per class is rounded down. The class's remaining
    images go to the clients that lost most by the rounding, one per client. No client has an upper limit of images.

    Args:
        alpha: concentration of the Dirichlet distribution; smaller is more heterogeneous
    """
    sizes = plain_sizes(np.bincount(labels, minlength=n_classes), n_clients, alpha, rng)
    return [rows for rows in _cut(rng.permutation(len(labels)), labels, sizes, rng) if len(rows)]


def single_class(labels: np.ndarray, n_clients: int, n_classes: int, rng: np.random.Generator) -> Rows:
    """Assign all images of class l to client l; the number of clients must be the number of classes."""
    if n_clients != n_classes:
        raise UserError(
            f"partition single_class needs one client for each of the {n_classes} classes, "
            f"got partition.n_clients = {n_clients}."
        )
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(n_classes)]


def shards(
    labels: np.ndarray, n_clients: int, rng: np.random.Generator, per_client: Annotated[int, "[1, 1e6]"] = 2
) -> Rows:
    """McMahan et al. (2017): rows are sorted by label and cut into equal shards; each client gets random shards.

    Args:
        per_client: number of shards per client
    """
    n = n_clients * per_client
    if labels.ndim > 1 or (labels == labels[0]).all():
        raise UserError(
            "partition shards sorts rows by their label, but the labels are missing, all equal or vectors; use another "
            "partition."
        )
    if n > len(labels):
        raise UserError(f"partition.per_client = {per_client} needs {n} shards of {len(labels)} images; use fewer.")
    pieces = _equal_slices(labels.argsort(kind="stable"), n)
    return [np.concatenate([pieces[i] for i in picks]) for picks in rng.permutation(n).reshape(n_clients, -1)]


def quantity(
    labels: np.ndarray,
    n_clients: int,
    rng: np.random.Generator,
    law: Annotated[str, "dirichlet | power"] = "dirichlet",
    alpha: Alpha = 0.5,
    power: Annotated[float, "[0, 10]"] = 1.0,
) -> Rows:
    """Quantity skew (NIID-Bench, Li et al. 2022): numbers of rows per client differ, and class shares do not.

    Departs from the paper: every client first gets one row, and the random shares divide the remaining rows.
    The paper draws the shares again until every client has ten rows.

    Args:
        law: clients' shares of the rows: dirichlet (drawn from Dir(alpha)) or power (proportional to 1, 2^-power, ...)
        alpha: concentration of the Dirichlet distribution; smaller is more unequal
        power: exponent of the power law; 0 gives all clients equal numbers of rows
    """
    by_power = np.arange(1, n_clients + 1) ** -power
    shares = by_power if law == "power" else rng.dirichlet(np.full(n_clients, alpha))
    ends = np.cumsum(shares / shares.sum())[:-1] * (len(labels) - n_clients)
    return np.split(rng.permutation(len(labels)), ends.astype(np.int64) + np.arange(1, n_clients))


def labels_lognormal(
    labels: np.ndarray,
    n_clients: int,
    n_classes: int,
    rng: np.random.Generator,
    per_client: Annotated[int, "[1, 1e6]"] = 2,
    spread: Annotated[float, "[0, 10]"] = 2.0,
    least: Annotated[int, "[1, 1e6]"] = 5,
) -> Rows:
    """FedProx's MNIST (Li et al. 2020) and FLUTE's LR_MNIST: few labels per client, in log-normal amounts.

    Client i holds the labels i, i + 1, ..., i + per_client - 1, modulo the number of classes. For each of its labels,
    the client gets ``least`` images, and a share of the label's remaining images. This share is proportional to
    exp(spread z) with z ~ N(0, 1).

    Departs from the paper's released code: all images are assigned. The released code leaves some images unassigned.

    Args:
        per_client: number of labels per client
        spread: standard deviation of the logarithm of the shares; 0 divides a label's images equally
        least: minimum number of images that a client has of each of its labels
    """
    if not n_classes - n_clients < per_client <= n_classes:
        raise UserError(
            f"partition labels_lognormal gives client i the labels i to i + partition.per_client - 1: with {n_clients} "
            f"clients per_client must be {max(1, n_classes - n_clients + 1)} to {n_classes}, got {per_client}."
        )
    first = np.arange(n_clients)
    clients: list[Rows] = [[] for _ in first]
    for c in range(n_classes):
        holders = np.flatnonzero((c - first) % n_classes < per_client)
        rows = rng.permutation(np.flatnonzero(labels == c))
        rest = len(rows) - least * len(holders)
        if rest < 0:
            raise UserError(
                f"the partition cannot be met: {len(holders)} clients with {least} images each of label {c} need more "
                f"than the {len(rows)} there are; use fewer clients or a smaller partition.least."
            )
        shares = np.exp(spread * rng.standard_normal(len(holders)))
        ends = (np.cumsum(shares / shares.sum())[:-1] * rest).astype(np.int64) + least * np.arange(1, len(holders))
        for i, piece in zip(holders, np.split(rows, ends), strict=True):
            clients[i].append(piece)
    return [rng.permutation(np.concatenate(piece)) for piece in clients]


def default_n_aux(n_clients: int, n_classes: int, alpha: float) -> int:
    """Return n_aux, the number of clients in a group, as Fedssyn's released code chooses it.

    In larger groups, almost every draw would leave some client with too few images and be rejected.
    """
    if n_clients == 40:
        return 20 if alpha >= 0.1 else 10
    if n_clients == 100 and n_classes <= 10:
        return 10
    if n_clients == 100 and alpha <= 0.01:
        return 20
    return n_clients


def _deal(
    rows: np.ndarray,
    labels: np.ndarray,
    n_classes: int,
    n_clients: int,
    alpha: float,
    rng: np.random.Generator,
    min_size: int,
) -> Rows:
    """Draw the numbers of images per class and client by ``group_sizes``; divide the shuffled ``rows`` accordingly."""
    class_sizes = np.bincount(labels[rows], minlength=n_classes)
    return _cut(rows, labels, group_sizes(class_sizes, n_clients, alpha, min_size, rng), rng)


def _cut(rows: np.ndarray, labels: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> Rows:
    """Return each client's rows, in a random order. Client i gets ``sizes[c, i]`` rows of class c."""
    pieces = [np.split(rows[labels[rows] == c], np.cumsum(of_class)[:-1]) for c, of_class in enumerate(sizes)]
    return [rng.permutation(np.concatenate(of_client)) for of_client in zip(*pieces, strict=True)]


def cut(rows: np.ndarray, sizes: np.ndarray) -> Rows:
    """Cut ``rows`` into slices of the lengths ``sizes``. ``np.split`` is ten times slower for 10^5 slices."""
    return [rows[a:b] for a, b in pairwise([0, *np.cumsum(sizes).tolist()])]


def _equal_slices(rows: np.ndarray, n: int) -> Rows:
    """Cut ``rows`` into n consecutive slices whose lengths differ by at most one."""
    cuts = [len(rows) * i // n for i in range(n + 1)]
    return [rows[a:b] for a, b in pairwise(cuts)]
