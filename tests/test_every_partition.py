"""What every partition of the package promises: run on each in ``config/parts.py``, without a name in it."""

from typing import Any

import numpy as np
import pytest

from fedcommons.config import parts
from fedcommons.config.flat import choose
from fedcommons.data.partition import Partitioned
from fedcommons.errors import UserError
from fedcommons.runs import inputs

N = N_CLASSES = 10
# 1,295 rows in classes of unequal size, as the digits have them; 1,295 is no multiple of ten clients
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(N_CLASSES), [*[129] * 5, *[130] * 5]))
GROUPS = np.random.default_rng(1).permutation(np.arange(len(LABELS)) % 40)
SMALL = {"alpha": 0.5, "per_client": 3, "join": N}

pytestmark = pytest.mark.parametrize("name", parts.KINDS["partition"].known)


def deal(name: str, seed: int = 0, n_clients: int = N, **constants: Any) -> Partitioned:
    has = parts.constants("partition", name)
    values = {n: value for n, value in {**SMALL, **constants}.items() if n in has}
    fields = {f"partition.{n}": value for n, value in values.items()}
    recipe = choose({"partition.name": name, "partition.n_clients": n_clients, **fields}).partition
    return inputs.deal(recipe, LABELS, N_CLASSES, seed, groups=GROUPS, factors={"camera": GROUPS // 2})


def test_every_row_belongs_to_one_client_and_no_client_is_empty_for_every_seed(name: str) -> None:
    for seed in range(40):
        result = deal(name, seed)
        assert len(result.rows) == N
        assert min(len(rows) for rows in result.rows) > 0
        assert np.array_equal(np.sort(np.concatenate(result.rows)), np.arange(len(LABELS)))
        assert result.class_counts is not None
        for rows, counts in zip(result.rows, result.class_counts, strict=True):
            assert rows.dtype == np.int64
            assert np.array_equal(np.bincount(LABELS[rows], minlength=N_CLASSES), counts)


def test_one_seed_gives_one_partition_and_another_seed_another(name: str) -> None:
    np.random.seed(0)  # noqa: NPY002  (the legacy generator is what must not matter)
    first = deal(name)
    np.random.seed(1)  # noqa: NPY002
    again, other = deal(name), deal(name, 1)
    assert all(np.array_equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_more_clients_than_rows_or_groups_are_refused(name: str) -> None:
    joins = "join" in parts.constants("partition", name)
    words = r"partition\.join .*at most" if joins else r"partition\.n_clients .*at most .*1295.*1296"
    with pytest.raises(UserError, match=words):
        deal(name, n_clients=1296, join=41)


OUTSIDE = {"alpha": [0.0, 1e31], "per_client": [0], "least": [0], "spread": [-0.1, 10.1], "power": [-0.1, 10.1],
           "n_aux": [0], "law": ["pareto"], "join": [0]}  # fmt: skip


def test_constants_out_of_range_are_refused_by_name(name: str) -> None:
    fields = parts.constants("partition", name)
    for constant in fields.keys() & OUTSIDE.keys():
        for value in OUTSIDE[constant]:
            with pytest.raises(UserError, match=rf"partition\.{constant}\b"):
                deal(name, **{constant: value})
    for n_clients in (0, -1):
        with pytest.raises(UserError, match=r"partition\.n_clients"):
            deal(name, n_clients=n_clients)
