"""Groups, factors and rows of a data set: carried through every split and partitioned by."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.config.flat import choose
from fedcommons.data import datasets
from fedcommons.data.examples import Dataset
from fedcommons.errors import UserError
from fedcommons.runs import build, inputs

N = 240
MARK = np.arange(N)  # example j holds j, so that whatever comes with it can be checked
NAMES = np.array([f"ward {j % 7}" for j in MARK])


def marked(n: int = N) -> dict[str, Any]:
    factors = {"camera": MARK[:n] % 5, "year": [str(2000 + j % 3) for j in MARK[:n]]}
    return {"x": MARK[:n, None], "y": MARK[:n] % 4, "groups": NAMES[:n], "factors": factors}


def load(returned: Any, **fields: Any) -> Dataset:
    return datasets.load("marked", lambda: returned, **fields)


@pytest.mark.parametrize(
    "returned",
    [marked(), {"train": marked(200), "test": marked()}, SimpleNamespace(train=marked(100), test=marked())],
    ids=["one set", "a dict of two", "an object of two"],
)
def test_groups_factors_and_rows_stay_with_their_examples(returned: Any) -> None:
    for fields in ({}, {"validation": 0}, {"validation_from": "last"}, {"limit": 37}):
        result = load(returned, **fields)
        for part in (result.train, result.validation, result.test, result.train[torch.randperm(len(result.train))]):
            j = part.x[:, 0]
            assert part.groups is not None
            assert part.groups.tolist() == (j % 7).tolist()
            assert part.factors["camera"].tolist() == (j % 5).tolist()
            assert part.factors["year"].tolist() == (j % 3).tolist()
            assert part.y.tolist() == (j % 4).tolist()
            moved = part.to(torch.device("meta"))
            assert moved.groups is not None
            assert moved.factors["year"].device.type == moved.groups.device.type == "meta"
        assert result.origin is not None
        assert result.origin.rows.tolist() == result.train.x[:, 0].tolist()
        assert result.origin.group_names is not None
        assert result.origin.group_names.tolist() == sorted(set(NAMES))


def test_numbers_of_groups_are_those_of_both_sets_together_and_decide_the_hash() -> None:
    x, y = MARK[:20, None], MARK[:20] % 2
    result = load(((x, y, [9] * 10 + [4] * 10), (x, y, [4] * 10 + [7] * 10)), validation=0)
    assert result.train.groups is not None
    assert result.test.groups is not None
    assert result.train.groups.tolist() == [2] * 10 + [0] * 10
    assert result.test.groups.tolist() == [0] * 10 + [1] * 10
    factors = [{"factors": {name: y}} for name in ("a", "b", "groups")]
    sets: list[dict[str, Any]] = [{}, {"groups": y}, {"groups": 1 - y}, *factors]
    assert len({load({"x": x, "y": y, **more}).digest for more in sets}) == len(sets)


@pytest.mark.parametrize("name", ["by_group", "by_factor"])
def test_a_client_is_a_group_that_has_rows_or_several(name: str) -> None:
    groups = np.array([5, 2, 2, 9, 5, 2, 0])

    def deal(seed: int = 0, factor: str = "site", **constants: Any) -> list[np.ndarray]:
        of_name = {"factor": factor} if name == "by_factor" else {}
        fields = {f"partition.{n}": value for n, value in {**constants, **of_name}.items()}
        recipe = choose({"partition.name": name, **fields}).partition
        return inputs.deal(recipe, np.zeros(7, int), 1, seed, groups=groups, factors={"site": groups}).rows

    assert [rows.tolist() for rows in deal()] == [[6], [1, 2, 5], [0, 4], [3]]
    for seed in range(20):
        joined = deal(seed, join=3)
        assert sorted(np.concatenate(joined).tolist()) == list(range(7))
        held = [set(groups[rows]) for rows in joined]
        assert sum(map(len, held)) == len(set(groups)) == 4  # no group is cut
        assert sorted(map(len, held)) == [1, 1, 2]
    assert len({str(deal(seed, join=2)) for seed in range(20)}) > 1
    with pytest.raises(UserError, match=r"partition\.join .*4, got 5"):
        deal(join=5)
    if name == "by_factor":
        with pytest.raises(UserError, match="'site'"):
            deal(factor="sites")
    with pytest.raises(UserError, match=f"{name} needs (groups|factors)"):  # the digits have none
        build.prepare(choose({"partition.name": name}))


OWN = """
import numpy as np
from torch import nn

WARD = np.arange(240) % 7


class Marked:
    def __init__(self):
        x, y = np.arange(240)[:, None], np.arange(240) % 4
        self.train, self.test = (x, y), (x[:20], y[:20])


class Net(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.last = nn.Linear(1, n_classes)

    def forward(self, x):
        return self.last(x / 240)


def by_place(labels):
    return [[i for i in range(len(labels)) if WARD[i] == k] for k in range(7)]


def at_random(labels, rng):
    order = rng.permutation(7)
    return [rng.permutation([i for i in range(len(labels)) if WARD[i] == k]) for k in order]


def by_rows(rows):
    return [np.flatnonzero(WARD[rows] == k) for k in range(7)]


def some(labels, rng):
    return np.split(rng.permutation(len(labels))[:30], 3)
"""


@pytest.mark.long
def test_a_partition_by_the_rows_of_a_file_is_refused_where_rows_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none has moved it is right, and by ``rows`` always; one that depends on labels alone is taken."""
    (tmp_path / "lab.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def prepared(partition: str, **fields: Any) -> build.Prepared:
        values = {"data.name": "lab.py:Marked", "partition.name": f"lab.py:{partition}", "model.name": "lab.py:Net"}
        return build.prepare(choose({**values, **fields}))

    splits, limited, whole = {}, {"data.validation": 0.0, "data.limit": 210}, {"data.validation": 0.0}
    for name in ("by_place", "at_random"):
        for moves in (splits, limited):
            with pytest.raises(UserError, match=r"240 rows .*`rows`"):
                prepared(name, **moves)
    for name, moves in (("by_place", whole), ("at_random", whole), ("by_rows", splits),
                        ("by_rows", {"data.limit": 100})):  # fmt: skip
        result = prepared(name, **moves)
        for rows in result.partition.rows:
            assert len(set((result.train.x[rows, 0] % 7).tolist())) == 1
    for name, moves in (("some", splits), ("some", {"data.limit": 40})):
        assert prepared(name, **moves).partition.rows
