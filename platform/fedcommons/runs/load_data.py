"""The data of an experiment: load and split its data set, and partition it among the clients."""

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcommons.config import registry
from fedcommons.config.fields import parameters_of, select_arguments
from fedcommons.config.schema import Data
from fedcommons.core.attacks import Attack, attack_of
from fedcommons.data import client_test_sets, datasets
from fedcommons.data import partition as partitions
from fedcommons.data.clients import Clients
from fedcommons.data.examples import STANDARDISATION, Dataset, Examples, Origin, channel_statistics
from fedcommons.data.heterogeneity import describe
from fedcommons.data.new_clients import NewClients, hold_out
from fedcommons.data.partition import Partitioned, default_n_aux
from fedcommons.data.transforms import SIZES, shift_features
from fedcommons.data.user_arrays import read_only
from fedcommons.errors import UserError, user_code_context
from fedcommons.errors import quote as quote_value
from fedcommons.privacy import salts
from fedcommons.seeding import numpy_generator, seed_for
from fedcommons.storage.atomic_files import write_json, write_text

NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


def load(data: Data, split_seed: int | None = None) -> Dataset:
    """Load the data set and split it into training, validation and test examples.

    A loader with a parameter ``seed`` gets a seed that depends on the data set's name only, and a loader with a
    parameter ``split_seed`` gets the argument of this name.

    Raises:
        UserError: there is no such data set, or ``datasets.load`` raises this error.
        ClientError: the loader of the data set failed.
    """
    loader = registry.find("data", data.name)
    seed = seed_for("data set", data.name) % 2**32  # many libraries accept no larger seed
    offered = {"dir": datasets.data_folder(data.dir), "download": data.download, "seed": seed, "split_seed": split_seed}
    with user_code_context(registry.component_label("data", data.name)):
        return datasets.load(
            data.name, partial(loader, **{**select_arguments(loader, offered), **data.constants}),
            validation=data.validation, validation_from=data.validation_from, public=data.public, limit=data.limit,
            augment=data.augment, standardise=data.standardise, split_seed=split_seed,
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


def takes_n_clients(name: str) -> bool:
    """Return whether the partition ``name`` uses the number of clients; else the data decide it."""
    return "n_clients" in parameters_of(registry.find("partition", name))


def partition_rows(
    name: str,
    constants: Mapping[str, Any],
    labels: np.ndarray,
    n_classes: int | None,
    seed: int,
    *,
    n_clients: int = 10,
    groups: np.ndarray | None = None,
    factors: Mapping[str, np.ndarray] = NOTHING,
    origin: Origin | None = None,
    x: Tensor | None = None,
) -> Partitioned:
    """Partition the n training examples among clients by the component ``name`` with these constants.

    labels, groups: label and group number of each example, (n,). factors: further values of each example, (n,) by name.
    origin: the examples' positions in the data set before it was split. x: (n, ...) the examples; None: not known.

    Raises:
        UserError: there is no such partition, the data set lacks an argument of the partition, there are more clients
            than examples, or ``data.partition.partition`` raises this error.
        ClientError: the partition failed.
    """
    part, n = registry.find("partition", name), len(labels)
    constants = registry.with_floats("partition", name, constants)
    with user_code_context(registry.component_label("partition", name)):
        requested = parameters_of(part).keys() - constants.keys()
    if "n_clients" in requested and n_clients > n:
        raise UserError(f"partition.n_clients must be at most the number of training images, {n}, got {n_clients}.")
    if "n_classes" in requested and n_classes is None:
        raise UserError(f"partition {name} divides classes, and labels are not classes: use iid, quantity or by_group.")
    for what, how, has in (("groups", "(x, y, groups)", groups is not None), ("factors", _FACTORS, bool(factors))):
        if what in requested and not has:
            raise UserError(f"partition {name} needs {what}, and the data set has none: let the data set return {how}.")

    def rows(times: int = 1) -> Sequence[Any]:
        """Call the partition on the examples repeated ``times`` times; return the rows of each client."""
        offered = {
            "labels": read_only(np.concatenate([labels] * times)),
            "groups": None if groups is None else read_only(np.concatenate([groups] * times)),
            "factors": {name: read_only(np.concatenate([v] * times)) for name, v in factors.items()},
            "rows": read_only(np.arange(n) if origin is None else origin.rows),
            "x": read_only(torch.cat([x] * times).numpy()) if x is not None and "x" in requested else None,
            "n_clients": n_clients, "n_classes": n_classes,
            "rng": numpy_generator(seed, "partition", name), "seed": seed_for(seed, "partition", name),
        }  # fmt: skip
        return part(**{**select_arguments(part, offered), **constants})

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


def partition_examples(
    dataset: Dataset, name: str, constants: Mapping[str, Any], n_clients: int, share: float, shift: str,
    size: float | None, new_share: float, seed: int,
) -> tuple[Dataset, Partitioned, Examples, Clients | None, NewClients | None, dict[str, Any]]:  # fmt: skip
    """Partition the training examples among clients, hold out the clients' test examples and shift the features.

    Return the data set, the clients' rows, the training examples, the clients' test examples (None if no client has
    any), the new clients, and the values that a rule computed for null constants.

    share: the share of each client's examples that is held out as test examples. With 0, a client gets the data set's
    test examples of the client's groups, if the data set has groups. shift, size: kind and size of the feature shift
    between clients; see ``data.transforms``. new_share: the share of the clients that is held out from training, as
    new clients; statistics of the data set are then computed without the new clients' examples.

    Raises:
        UserError: a client has too few examples, or the shift cannot be applied to them.
    """
    train = dataset.train
    partition = partition_rows(
        name, constants, train.y.numpy(), dataset.n_classes, seed, n_clients=n_clients,
        groups=None if train.groups is None else train.groups.numpy(),
        factors={name: values.numpy() for name, values in train.factors.items()}, origin=dataset.origin,
        x=train.x,
    )  # fmt: skip
    n, computed = len(partition.rows), dict[str, Any]()
    if constants.get("n_aux", 0) is None:
        computed["n_aux"] = default_n_aux(n, dataset.n_classes or 0, constants["alpha"])
    if shift != "none" and size is None:
        computed["shift_size"] = SIZES[shift]
    if constants.get("factor", "") is None:
        computed["factor"] = next(iter(train.factors))
    if constants.get("join", 0) is None:
        computed["join"] = n
    if share:
        partition, train, tests = client_test_sets.hold_out(partition, dataset, share, seed)
    else:
        tests = client_test_sets.of_groups(partition, dataset)
    rows, unshifted = partition.rows, train.x
    if shift != "none":
        train = shift_features(Clients(train, partition.rows), shift, size, seed, "train")
        tests = None if tests is None else Clients(shift_features(tests, shift, size, seed, "test"), tests.rows)
    new = None
    if new_share:
        partition, train, tests, new = hold_out(partition, train, tests, new_share, seed)
        if STANDARDISATION in dataset.computed:
            is_left = np.ones(len(unshifted), bool)
            is_left[np.concatenate([rows[i] for i in new.numbers])] = False
            mean, std = channel_statistics(unshifted[torch.from_numpy(is_left)])
            dataset = replace(dataset, mean=mean, std=std)
    return dataset, partition, train, tests, new, computed


def attacked(
    dataset: Dataset, train: Examples, rows: Sequence[np.ndarray], fields: tuple[str, float, float, int], seed: int
) -> tuple[Attack | None, Examples]:
    """Return the attack of Byzantine clients (None: no attack), and the training examples after it.

    rows: row numbers per client. fields: name, share, scale and target of the attack.
    """
    if fields[0] == "none":
        return None, train
    attack = attack_of(*fields, len(rows), dataset, seed)
    return attack, attack.poisoned(train, rows, dataset.n_classes or 0, seed)


def write_partition(
    folder: Path, partition: Partitioned, tests: Clients | None, data: str, salt: bytes, new: NewClients | None = None,
    attack: Attack | None = None,
) -> None:  # fmt: skip
    """Write ``partition.json``; data: hash of the data set; salt: the run's salt, of which only the hash is written.

    new: the clients that are held out from training, whose numbers in the partition of all clients are listed. attack:
    the attack, whose Byzantine clients are listed.
    """
    held_out = new and {"numbers": new.numbers, "sizes": new.clients.sizes, "test_sizes": new.tests.sizes}
    facts = {
        "data": data,
        "fingerprint": partition.fingerprint,
        "heterogeneity": describe(sizes := [len(rows) for rows in partition.rows], partition.class_counts),
        "sizes": sizes,
        **({} if partition.class_counts is None else {"class_counts": partition.class_counts.tolist()}),
        **({} if tests is None else {"test_sizes": tests.sizes}),
        **({"new_clients": held_out} if held_out else {}),
        **({} if attack is None else {"byzantine": sorted(attack.clients)}),
        **({"noise": salts.name_of(salt)} if salt else {}),
    }
    if len(partition.rows) <= 10_000:
        write_json(folder / "partition.json", facts)
    else:  # indented JSON takes seconds for 10^5 clients
        write_text(folder / "partition.json", json.dumps(facts))
