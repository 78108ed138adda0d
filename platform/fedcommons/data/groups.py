"""Partitions by the source of each example: by group (a writer, a hospital) or by a factor (a camera, a year)."""

from collections.abc import Mapping
from typing import Annotated

import numpy as np

from fedcommons.data.partition import Rows, cut
from fedcommons.errors import UserError, unknown

Join = Annotated[int | None, "[1, 1e9]"]


def by_group(groups: np.ndarray, rng: np.random.Generator, join: Join = None) -> Rows:
    """Create one client for each group (source of examples) that has training rows, in the order of the group names.

    The number of clients N is the number of groups with training rows, or ``join``.

    Args:
        join: number of clients among which the groups are divided equally at random; default: one client per group
    """
    return _joined(_pieces(groups), join, rng)


def by_factor(
    factors: Mapping[str, np.ndarray], rng: np.random.Generator, factor: str | None = None, join: Join = None
) -> Rows:
    """Create one client for each value of a factor (attribute of examples) that has training rows.

    The number of clients N is the number of values with training rows, or ``join``.

    Args:
        factor: name of the factor; default: the only one that the data set has
        join: number of clients among which the values are divided equally at random; default: one client per value
    """
    name = next(iter(factors)) if factor is None and len(factors) == 1 else factor or ""
    if name not in factors:
        raise unknown("partition.factor", name, list(factors))
    return _joined(_pieces(factors[name]), join, rng)


def _pieces(values: np.ndarray) -> Rows:
    """Return one vector of row numbers per value that occurs in ``values`` (n,), in ascending order of the values."""
    counts = np.bincount(values)
    return cut(values.argsort(kind="stable"), counts[counts > 0])


def _joined(pieces: Rows, join: int | None, rng: np.random.Generator) -> Rows:
    if join is None:
        return pieces
    if join > len(pieces):
        raise UserError(f"partition.join must be at most the number of groups with rows, {len(pieces)}, got {join}.")
    return [np.concatenate([pieces[i] for i in some]) for some in np.array_split(rng.permutation(len(pieces)), join)]
