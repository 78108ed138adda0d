"""Partitions of the training data over clients, each with its fingerprint and class counts (methods.md section 1).

alpha: Dirichlet concentration; N: clients; n_aux: clients dealt to together (Lin et al. 2020, as used by Fedssyn).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedcommons.config import experiment as config
from fedcommons.data.dirichlet import group_sizes, sizes_by_priors
from fedcommons.errors import UserError, unknown
from fedcommons.seeds import numpy_generator


@dataclass(frozen=True)
class Partitioned:
    """Rows of the training data per client, the recipe they came from, and what tells two partitions apart."""

    recipe: config.Partition
    rows: list[np.ndarray]
    class_counts: np.ndarray  # (N, classes)

    @property
    def fingerprint(self) -> str:
        """Hash of who holds what; compared cells of one seed must share it."""
        digest = hashlib.sha256()
        for rows in self.rows:
            digest.update(len(rows).to_bytes(8, "little") + rows.astype("<i8").tobytes())
        return digest.hexdigest()[:16]


def partition(recipe: config.Partition, labels: np.ndarray, n_classes: int, seed: int) -> Partitioned:
    """Deal the rows of ``labels`` (n,) to clients by ``recipe``.

    Raises:
        UserError: more clients than rows, or a condition of the recipe that cannot be met.
    """
    if recipe.name not in PARTITIONERS:
        raise unknown("partition", recipe.name, PARTITIONERS)
    if recipe.n_clients > len(labels):
        raise UserError(
            f"partition.n_clients must be at most the number of training images, {len(labels)}, got {recipe.n_clients}."
        )
    rows = PARTITIONERS[recipe.name](recipe, labels, n_classes, numpy_generator(seed, "partition", recipe.name))
    if empty := [i for i, r in enumerate(rows) if len(r) == 0]:
        raise UserError(
            f"the partition cannot be met: {recipe.name} leaves client {empty[0]} without images; "
            "use fewer clients or more images."
        )
    counts = np.stack([np.bincount(labels[r], minlength=n_classes) for r in rows])
    return Partitioned(recipe, rows, counts)


def iid(recipe: config.Partition, labels: np.ndarray, n_classes: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle and cut equally."""
    return _equal_slices(rng.permutation(len(labels)), recipe.n_clients)


def dirichlet_classes(
    recipe: config.Partition, labels: np.ndarray, n_classes: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Lin et al. (2020), as Fedssyn follows it: groups of n_aux clients, per class Dir(alpha) over a group's clients.

    A client that holds its fair share gets no more; a group is redrawn until every client has half of it. With
    ``recut`` the lists are joined and cut into N equal slices, so a slice spills into its neighbour's classes.
    """
    n, n_aux = recipe.n_clients, recipe.n_aux or default_n_aux(recipe.n_clients, n_classes, recipe.alpha)
    if n_aux > n:
        raise UserError(f"partition.n_aux must be at most the number of clients, {n}, got {n_aux}.")
    clients: list[np.ndarray] = []
    shuffled = rng.permutation(len(labels))
    firsts = range(0, n, n_aux)
    cuts = [len(labels) * first // n for first in [*firsts, n]]
    for first, start, stop in zip(firsts, cuts, cuts[1:], strict=False):
        group, size = shuffled[start:stop], min(n_aux, n - first)
        half_of_fair_share = -(-len(group) // (2 * size))
        clients += _deal(group, labels, n_classes, size, recipe, rng, half_of_fair_share)
    return _equal_slices(np.concatenate(clients), n) if recipe.recut else clients


def dirichlet_niid(
    recipe: config.Partition, labels: np.ndarray, n_classes: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """NIID-Bench (Li et al. 2022): the same draw in one group, unequal sizes kept, at least 10 images a client."""
    return _deal(rng.permutation(len(labels)), labels, n_classes, recipe.n_clients, recipe, rng, 10)


def dirichlet_clients(
    recipe: config.Partition, labels: np.ndarray, n_classes: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """FedDyn (Acar et al. 2021): per client Dir(alpha) over classes, images dealt one by one into equal sizes."""
    sizes = sizes_by_priors(np.bincount(labels, minlength=n_classes), recipe.n_clients, recipe.alpha, rng)
    return _cut(rng.permutation(len(labels)), labels, sizes, rng)


def single_class(
    recipe: config.Partition, labels: np.ndarray, n_classes: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Client l holds the images of class l."""
    if recipe.n_clients != n_classes:
        raise UserError(
            f"partition single_class needs one client for each of the {n_classes} classes, "
            f"got partition.n_clients = {recipe.n_clients}."
        )
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(n_classes)]


Partitioner = Callable[[config.Partition, np.ndarray, int, np.random.Generator], list[np.ndarray]]
PARTITIONERS: dict[str, Partitioner] = {
    "iid": iid,
    "dirichlet_classes": dirichlet_classes,
    "dirichlet_niid": dirichlet_niid,
    "dirichlet_clients": dirichlet_clients,
    "single_class": single_class,
}


def default_n_aux(n_clients: int, n_classes: int, alpha: float) -> int:
    """Group size of the authors' runs; without it most draws for many clients can never be accepted."""
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
    recipe: config.Partition,
    rng: np.random.Generator,
    min_size: int,
) -> list[np.ndarray]:
    """Deal ``rows`` to ``n_clients`` in the sizes that ``group_sizes`` draws."""
    class_sizes = np.bincount(labels[rows], minlength=n_classes)
    return _cut(rows, labels, group_sizes(class_sizes, n_clients, recipe.alpha, min_size, rng), rng)


def _cut(rows: np.ndarray, labels: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Cut each class of the shuffled ``rows`` into consecutive pieces of ``sizes`` (classes, clients)."""
    pieces = [np.split(rows[labels[rows] == c], np.cumsum(of_class)[:-1]) for c, of_class in enumerate(sizes)]
    return [rng.permutation(np.concatenate(of_client)) for of_client in zip(*pieces, strict=True)]


def _equal_slices(rows: np.ndarray, n: int) -> list[np.ndarray]:
    """n consecutive slices whose sizes differ by at most one."""
    cuts = [len(rows) * i // n for i in range(n + 1)]
    return [rows[a:b] for a, b in pairwise(cuts)]
