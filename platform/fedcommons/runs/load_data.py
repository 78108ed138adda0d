"""The data of an experiment: its data set, read and split, and dealt to clients by its partition."""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from shlex import quote
from types import MappingProxyType
from typing import Any

import numpy as np

from fedcommons.config import registry
from fedcommons.config.fields import parameters_of, taken
from fedcommons.config.schema import Data, Partition
from fedcommons.data import client_test_sets, datasets
from fedcommons.data import partition as partitions
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset, Examples, Origin
from fedcommons.data.partition import Partitioned
from fedcommons.data.transforms import shifted
from fedcommons.data.user_arrays import read_only
from fedcommons.errors import UserError, shown, somebodys
from fedcommons.seeding import numpy_generator, seed_for

NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


def load(data: Data) -> Dataset:
    """The data set, split; see ``datasets.load``. The seed that it may ask for is keyed by its name.

    Raises:
        UserError: there is no such data set, or see there.
        ClientError: it failed.
    """
    part = registry.find("data", data.name)
    seed = seed_for("data set", data.name) % 2**32  # many libraries take no larger one
    offered = {"dir": datasets.data_folder(data.dir), "download": data.download, "seed": seed}
    with somebodys(registry.called("data", data.name)):
        make = partial(part, **{**taken(part, offered), **data.constants})
        return datasets.load(
            data.name, make, validation=data.validation, validation_from=data.validation_from, limit=data.limit,
            augment=data.augment, standardise=data.standardise,
        )  # fmt: skip


def require_same(dataset: Dataset, digest: str | None) -> None:
    """Check that this host has the data set of the host that started the sweep.

    Args:
        digest: of the data set there; None if it is not known.

    Raises:
        UserError: it has other examples.
    """
    if digest not in (None, dataset.digest):
        raise UserError(
            f"host {socket.gethostname()} has other data: the examples of data.name {dataset.name} are not those of "
            "the host that started the sweep; copy the same files to all hosts, and let a data set of your own draw "
            "from `seed` alone."
        )


def dir_option(dir: str | None) -> list[str]:
    """The option that names this folder of data; none where it is the one that is looked in without it."""
    is_usual = dir is None or datasets.data_folder(dir).resolve() == datasets.data_folder(None).resolve()
    return [] if is_usual or dir is None else [f"--data.dir {quote(dir)}"]


def deal(
    recipe: Partition,
    labels: np.ndarray,
    n_classes: int | None,
    seed: int,
    *,
    groups: np.ndarray | None = None,
    factors: Mapping[str, np.ndarray] = NOTHING,
    origin: Origin | None = None,
) -> Partitioned:
    """Deal the rows of ``labels`` (n,) to clients by ``recipe``; see ``data.partition.Partition``.

    Raises:
        UserError: there is no such partition, it asks for what the data set has not, there are more clients than rows,
            or see ``data.partition.partition``.
        ClientError: it failed.
    """
    name, part, n = recipe.name, registry.find("partition", recipe.name), len(labels)
    constants = registry.with_floats("partition", name, recipe.constants)
    with somebodys(registry.called("partition", name)):
        asked = parameters_of(part).keys() - constants.keys()
    if "n_clients" in asked and recipe.n_clients > n:
        raise UserError(
            f"partition.n_clients must be at most the number of training images, {n}, got {recipe.n_clients}."
        )
    if "n_classes" in asked and n_classes is None:
        raise UserError(f"partition {name} deals classes, and the labels are none: use iid, quantity or by_group.")
    for what, how, has in (("groups", "(x, y, groups)", groups is not None), ("factors", _FACTORS, bool(factors))):
        if what in asked and not has:
            raise UserError(f"partition {name} needs {what}, and the data set has none: let it return {how}.")

    def rows(times: int = 1) -> Sequence[Any]:
        """As it deals the data, or as many times as many."""
        offered = {
            "labels": np.concatenate([labels] * times),
            "groups": None if groups is None else np.concatenate([groups] * times),
            "factors": {factor: np.concatenate([values] * times) for factor, values in factors.items()},
            "rows": np.arange(n) if origin is None else origin.rows,
            "n_clients": recipe.n_clients, "n_classes": n_classes,
            "rng": numpy_generator(seed, "partition", name), "seed": seed_for(seed, "partition", name),
        }  # fmt: skip
        return part(**{**taken(part, {what: _read_only(value) for what, value in offered.items()}), **constants})

    with somebodys(registry.called("partition", name)):
        dealt = partitions.partition(name, rows, labels, n_classes)
    if registry.is_own(name) and origin is not None and origin.moved and "rows" not in asked:
        _require_places(name, rows, n, origin.given)
    return dealt


_FACTORS = "{'x': x, 'y': y, 'factors': {'camera': ...}}"


def _require_places(name: str, rows: Callable[[int], Sequence[Any]], n: int, given: int) -> None:
    """Refuse a partition that deals rows of a file of its own, whose numbers are no longer those of the examples.

    It is asked to deal the examples so many times over that there are more than its data set ever had. One that deals
    what it is handed deals these too; one that looks up row i in a file fails, or never comes beyond the file's end.

    Raises:
        UserError: it does.
    """
    times = given // n + 1
    try:
        largest = max(int(np.asarray(r).max()) for r in islice(rows(times), times * n) if len(r))
    except Exception:  # whatever it raises
        largest = -1
    if largest < given:
        raise UserError(
            f"partition.name {shown(name)} deals the same rows however many there are, as if by a file of its own, and "
            f"of the {given:,} rows of that {n:,} are left to train on, with other numbers: let it ask for `rows`, "
            "where each stood, and look up column[rows]."
        )


def _read_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: read_only(values) for name, values in value.items()}
    return read_only(value) if isinstance(value, np.ndarray) else value


def as_held(
    dealt: Partitioned, dataset: Dataset, share: float, shift: str, size: float | None, seed: int
) -> tuple[Partitioned, Examples, Clients | None]:
    """What clients train on, as rows of training examples, and their own test examples; None: there are none.

    share: of each client's examples that is held out as its own tests; 0: these are the test examples of its groups, if
    there are any. shift, size: how what each client has is changed then; see ``data.shift``.

    Raises:
        UserError: a client has too few rows, or the examples cannot be shifted so.
    """
    train, tests = dataset.train, client_test_sets.of_groups(dealt, dataset) if not share else None
    if share:
        dealt, train, tests = client_test_sets.drawn(dealt, dataset, share, seed)
    if shift != "none":
        train = shifted(Clients(train, dealt.rows), shift, size, seed, "train")
        tests = None if tests is None else Clients(shifted(tests, shift, size, seed, "test"), tests.rows)
    return dealt, train, tests
