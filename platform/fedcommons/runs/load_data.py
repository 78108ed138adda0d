"""The data of an experiment: load and split its data set, and partition it among the clients."""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from shlex import quote
from types import MappingProxyType
from typing import Any

import numpy as np

from fedcommons.config import registry
from fedcommons.config.fields import parameters_of, select_arguments
from fedcommons.config.schema import Data, Partition
from fedcommons.data import client_test_sets, datasets
from fedcommons.data import partition as partitions
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset, Examples, Origin
from fedcommons.data.partition import Partitioned
from fedcommons.data.transforms import shift_features
from fedcommons.data.user_arrays import read_only
from fedcommons.errors import UserError, user_code_context
from fedcommons.errors import quote as quote_value
from fedcommons.seeding import numpy_generator, seed_for

NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


def load(data: Data) -> Dataset:
    """Load the data set and split it into training, validation and test examples; see ``datasets.load``.

    A loader with a parameter ``seed`` gets a seed that depends on the data set's name only.

    Raises:
        UserError: there is no such data set, or ``datasets.load`` raises this error.
        ClientError: the loader of the data set failed.
    """
    loader = registry.find("data", data.name)
    seed = seed_for("data set", data.name) % 2**32  # many libraries accept no larger seed
    offered = {"dir": datasets.data_folder(data.dir), "download": data.download, "seed": seed}
    with user_code_context(registry.component_label("data", data.name)):
        build = partial(loader, **{**select_arguments(loader, offered), **data.constants})
        return datasets.load(
            data.name, build, validation=data.validation, validation_from=data.validation_from, limit=data.limit,
            augment=data.augment, standardise=data.standardise,
        )  # fmt: skip


def require_same(dataset: Dataset, digest: str | None) -> None:
    """Check that this host has the same examples as the host that started the sweep.

    Args:
        digest: the hash of the data set on the host that started the sweep; None if it is unknown.

    Raises:
        UserError: this host has different examples.
    """
    if digest not in (None, dataset.digest):
        raise UserError(
            f"host {socket.gethostname()} has other data: the examples of data.name {dataset.name} are not those of "
            "the host that started the sweep; copy the same files to all hosts, and let a user-defined data set draw "
            "random numbers from `seed` only."
        )


def dir_option(dir: str | None) -> list[str]:
    """Return the command-line option for the data folder ``dir``; empty for the default folder."""
    is_usual = dir is None or datasets.data_folder(dir).resolve() == datasets.data_folder(None).resolve()
    return [] if is_usual or dir is None else [f"--data.dir {quote(dir)}"]


def partition_rows(
    recipe: Partition,
    labels: np.ndarray,
    n_classes: int | None,
    seed: int,
    *,
    groups: np.ndarray | None = None,
    factors: Mapping[str, np.ndarray] = NOTHING,
    origin: Origin | None = None,
) -> Partitioned:
    """Partition the n training examples among clients by the component that ``recipe`` names.

    labels, groups: label and group number of each example, (n,). factors: further values of each example, (n,) by name.
    origin: the examples' positions in the data set before it was split.

    Raises:
        UserError: there is no such partition, the data set lacks an argument of the partition, there are more clients
            than examples, or ``data.partition.partition`` raises this error.
        ClientError: the partition failed.
    """
    name, part, n = recipe.name, registry.find("partition", recipe.name), len(labels)
    constants = registry.with_floats("partition", name, recipe.constants)
    with user_code_context(registry.component_label("partition", name)):
        requested = parameters_of(part).keys() - constants.keys()
    if "n_clients" in requested and recipe.n_clients > n:
        raise UserError(
            f"partition.n_clients must be at most the number of training images, {n}, got {recipe.n_clients}."
        )
    if "n_classes" in requested and n_classes is None:
        raise UserError(f"partition {name} divides classes, and labels are not classes: use iid, quantity or by_group.")
    for what, how, has in (("groups", "(x, y, groups)", groups is not None), ("factors", _FACTORS, bool(factors))):
        if what in requested and not has:
            raise UserError(f"partition {name} needs {what}, and the data set has none: let the data set return {how}.")

    def rows(times: int = 1) -> Sequence[Any]:
        """Call the partition on the examples repeated ``times`` times; return the rows of each client."""
        offered = {
            "labels": np.concatenate([labels] * times),
            "groups": None if groups is None else np.concatenate([groups] * times),
            "factors": {factor: np.concatenate([values] * times) for factor, values in factors.items()},
            "rows": np.arange(n) if origin is None else origin.rows,
            "n_clients": recipe.n_clients, "n_classes": n_classes,
            "rng": numpy_generator(seed, "partition", name), "seed": seed_for(seed, "partition", name),
        }  # fmt: skip
        return part(
            **{**select_arguments(part, {what: _read_only(value) for what, value in offered.items()}), **constants}
        )

    with user_code_context(registry.component_label("partition", name)):
        partitioned = partitions.partition(name, rows, labels, n_classes)
    if registry.is_user_defined(name) and origin is not None and origin.moved and "rows" not in requested:
        _require_places(name, rows, n, origin.n_given)
    return partitioned


_FACTORS = "{'x': x, 'y': y, 'factors': {'camera': ...}}"


def _require_places(name: str, rows: Callable[[int], Sequence[Any]], n: int, n_before: int) -> None:
    """Refuse a partition that reads row numbers from a file, as the split into data sets renumbers the rows.

    The partition is called with the n examples repeated until there are more than ``n_before``, the number of examples
    before the split. A partition that only uses its arguments then returns a row number of at least ``n_before``. A
    partition that reads row numbers from a file fails, or returns only row numbers below ``n_before``.

    Raises:
        UserError: the partition reads row numbers from a file.
    """
    times = n_before // n + 1
    try:
        largest = max(int(np.asarray(r).max()) for r in islice(rows(times), times * n) if len(r))
    except Exception:  # user code may raise any error
        largest = -1
    if largest < n_before:
        raise UserError(
            f"partition.name {quote_value(name)} assigns the same rows for any number of examples, as if it read them "
            "from a file, but "
            f"of the {n_before:,} rows in the data set {n:,} remain for training, with other numbers: give it a "
            "parameter `rows`, the original row of each example, and look up column[rows]."
        )


def _read_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: read_only(values) for name, values in value.items()}
    return read_only(value) if isinstance(value, np.ndarray) else value


def as_held(
    client_data: Partitioned, dataset: Dataset, share: float, shift: str, size: float | None, seed: int
) -> tuple[Partitioned, Examples, Clients | None]:
    """Split off the clients' test examples and shift the features; return (rows of clients, training, test examples).

    The test examples are None if no client has any.

    share: the share of each client's examples that is held out as test examples. With 0 a client's test examples are
    those of its groups, if the data set has groups. shift, size: kind and size of the feature shift between clients;
    see ``data.transforms``.

    Raises:
        UserError: a client has too few examples, or the shift cannot be applied to them.
    """
    train, tests = dataset.train, client_test_sets.of_groups(client_data, dataset) if not share else None
    if share:
        client_data, train, tests = client_test_sets.hold_out(client_data, dataset, share, seed)
    if shift != "none":
        train = shift_features(Clients(train, client_data.rows), shift, size, seed, "train")
        tests = None if tests is None else Clients(shift_features(tests, shift, size, seed, "test"), tests.rows)
    return client_data, train, tests
