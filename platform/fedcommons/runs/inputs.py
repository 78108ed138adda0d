"""The data of an experiment: its data set, read and split, and dealt to clients by its partition."""

from functools import partial
from shlex import quote

import numpy as np

from fedcommons.config import parts
from fedcommons.config.fields import taken
from fedcommons.config.sections import Data, Partition
from fedcommons.data import datasets
from fedcommons.data import partition as partitions
from fedcommons.data.arrays import read_only
from fedcommons.data.examples import Dataset
from fedcommons.data.partition import Partitioned
from fedcommons.errors import somebodys
from fedcommons.seeds import numpy_generator, seed_for


def load(data: Data) -> Dataset:
    """The data set, split; see ``datasets.load``. The seed that it may ask for is keyed by its name.

    Raises:
        UserError: there is no such data set, or see there.
        ClientError: it failed.
    """
    part = parts.find("data", data.name)
    seed = seed_for("data set", data.name) % 2**32  # many libraries take no larger one
    offered = {"dir": datasets.data_folder(data.dir), "download": data.download, "seed": seed}
    with somebodys(parts.called("data", data.name)):
        make = partial(part, **{**taken(part, offered), **data.constants})
        return datasets.load(
            data.name, make, validation=data.validation, validation_from=data.validation_from, limit=data.limit,
            augment=data.augment,
        )  # fmt: skip


def dir_option(dir: str | None) -> list[str]:
    """The option that names this folder of data; none where it is the one that is looked in without it."""
    is_usual = dir is None or datasets.data_folder(dir).resolve() == datasets.data_folder(None).resolve()
    return [] if is_usual or dir is None else [f"--data.dir {quote(dir)}"]


def deal(recipe: Partition, labels: np.ndarray, n_classes: int, seed: int) -> Partitioned:
    """Deal the rows of ``labels`` (n,) to clients by ``recipe``; see ``data.partition.Partition``.

    Raises:
        UserError: there is no such partition, or see ``data.partition.partition``.
        ClientError: it failed.
    """
    name, part = recipe.name, parts.find("partition", recipe.name)
    offered = {
        "labels": read_only(labels), "n_clients": recipe.n_clients, "n_classes": n_classes,
        "rng": numpy_generator(seed, "partition", name), "seed": seed_for(seed, "partition", name),
    }  # fmt: skip
    with somebodys(parts.called("partition", name)):
        rows = partial(part, **taken(part, offered), **recipe.constants)
        return partitions.partition(name, rows, labels, recipe.n_clients, n_classes)
