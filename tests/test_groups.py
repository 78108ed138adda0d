"""Groups, factors and rows: carried through every split and partitioned by; the laws of partitions by label or size."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.config.flat import choose
from fedcommons.data import datasets
from fedcommons.data.examples import Dataset
from fedcommons.data.partition import Partitioned
from fedcommons.errors import UserError
from fedcommons.runs import build, inputs

N = 240
MARK = np.arange(N)  # example j holds j, so that whatever comes with it can be told
NAMES = np.array([f"ward {j % 7}" for j in MARK])


def marked(n: int = N) -> dict[str, Any]:
    """Token j is j; its group follows from j, and so does its factor and its label."""
    factors = {"camera": MARK[:n] % 5, "year": [str(2000 + j % 3) for j in MARK[:n]]}
    return {"x": MARK[:n, None], "y": MARK[:n] % 4, "groups": NAMES[:n], "factors": factors}


def load(returned: Any, **fields: Any) -> Dataset:
    return datasets.load("marked", lambda: returned, **fields)


@pytest.mark.parametrize(
    "returned",
    [marked(), {"train": marked(200), "test": marked()}, SimpleNamespace(train=marked(100), test=marked())],
    ids=["one set", "a dict of two", "an object of two"],
)
@pytest.mark.parametrize("fields", [{}, {"validation": 0}, {"validation_from": "last"}, {"limit": 37}], ids=str)
def test_groups_factors_and_rows_stay_with_their_examples(returned: Any, fields: dict[str, Any]) -> None:
    outcome = load(returned, **fields)
    for part in (outcome.train, outcome.validation, outcome.test, outcome.train[torch.randperm(len(outcome.train))]):
        j = part.x[:, 0]
        assert part.groups is not None
        assert part.groups.tolist() == (j % 7).tolist()
        assert part.factors["camera"].tolist() == (j % 5).tolist()
        assert part.factors["year"].tolist() == (j % 3).tolist()
        assert part.y.tolist() == (j % 4).tolist()
        moved = part.to(torch.device("meta"))
        assert moved.groups is not None
        assert moved.factors["year"].device.type == moved.groups.device.type == "meta"
    assert outcome.origin is not None
    assert outcome.origin.rows.tolist() == outcome.train.x[:, 0].tolist()
    assert outcome.origin.group_names is not None
    assert outcome.origin.group_names.tolist() == sorted(set(NAMES))


def test_numbers_of_groups_are_those_of_both_sets_together() -> None:
    x, y = MARK[:20, None], MARK[:20] % 2
    outcome = load(((x, y, [9] * 10 + [4] * 10), (x, y, [4] * 10 + [7] * 10)), validation=0)
    assert outcome.train.groups is not None
    assert outcome.test.groups is not None
    assert outcome.train.groups.tolist() == [2] * 10 + [0] * 10
    assert outcome.test.groups.tolist() == [0] * 10 + [1] * 10


def test_the_digest_tells_groups_and_factors() -> None:
    x, y = MARK[:20, None], MARK[:20] % 2
    sets = [
        {},
        {"groups": y},
        {"groups": 1 - y},
        {"factors": {"a": y}},
        {"factors": {"b": y}},
        {"factors": {"groups": y}},
    ]
    assert len({load({"x": x, "y": y, **more}).digest for more in sets}) == len(sets)


def deal(name: str, groups: Any, seed: int = 0, **constants: Any) -> list[np.ndarray]:
    values = {f"partition.{name}": value for name, value in constants.items()}
    recipe = choose({"partition.name": name, **values}).partition
    groups = np.asarray(groups)
    return inputs.deal(recipe, np.zeros(len(groups), int), 1, seed, groups=groups, factors={"site": groups}).rows


@pytest.mark.parametrize("name", ["by_group", "by_factor"])
def test_a_client_is_a_group_that_has_rows_or_several(name: str) -> None:
    groups = np.array([5, 2, 2, 9, 5, 2, 0])
    assert [rows.tolist() for rows in deal(name, groups)] == [[6], [1, 2, 5], [0, 4], [3]]
    for seed in range(20):
        joined = deal(name, groups, seed, join=3)
        assert sorted(np.concatenate(joined).tolist()) == list(range(7))
        held = [set(groups[rows]) for rows in joined]
        assert sum(map(len, held)) == len(set(groups)) == 4  # no group is cut
        assert sorted(map(len, held)) == [1, 1, 2]
    assert len({str(deal(name, groups, seed, join=2)) for seed in range(20)}) > 1
    with pytest.raises(UserError, match=r"partition\.join .*4, got 5"):
        deal(name, groups, join=5)


def partitioned(name: str, labels: Any, n_classes: int = 10, seed: int = 0, **constants: Any) -> Partitioned:
    recipe = choose({"partition.name": name, **{f"partition.{n}": value for n, value in constants.items()}}).partition
    return inputs.deal(recipe, np.asarray(labels), n_classes, seed)


def test_mcmahans_clients_hold_two_shards_of_a_label_each() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    for seed in range(20):
        result = partitioned("shards", labels, seed=seed, n_clients=30)
        assert {len(rows) for rows in result.rows} == {20}
        assert all(set(counts[counts > 0]) <= {10, 20} for counts in np.asarray(result.class_counts))
    with pytest.raises(UserError, match="labels are none, alike or vectors"):
        partitioned("shards", labels * 0, n_clients=30)


def test_sizes_follow_their_law() -> None:
    sizes = [len(rows) for rows in partitioned("quantity", np.zeros(29_300, int), 1, law="power", power=1.0).rows]
    assert sizes == pytest.approx([10_000 / (i + 1) for i in range(10)], rel=2e-3)
    k, n, alpha = 10, 10_000, 0.5
    drawn = [partitioned("quantity", np.zeros(n, int), 1, seed, alpha=alpha).rows for seed in range(400)]
    shares = np.array([[len(rows) / n for rows in one] for one in drawn])
    variance = (k - 1) / (k**2 * (k * alpha + 1))  # of Dir(alpha)
    assert shares.mean(0) == pytest.approx(np.full(k, 1 / k), abs=4 * (variance / 400) ** 0.5)
    assert shares.var(0).mean() == pytest.approx(variance, rel=0.1)


def test_fedprox_gives_client_i_the_labels_from_i_on_in_log_normal_amounts() -> None:
    """100 clients with 6,000 images of each class."""

    def counts(**constants: Any) -> np.ndarray:
        result = partitioned("labels_lognormal", np.arange(60_000) % 10, n_clients=100, **constants)
        return np.asarray(result.class_counts)

    steep = counts(spread=5.0, least=3)
    for i, client in enumerate(steep):
        assert set(np.flatnonzero(client)) == {i % 10, (i + 1) % 10}
    assert steep[steep > 0].min() == 3  # with a spread of 5 one client has nearly all others
    some = counts(spread=0.5, least=1)
    logarithms = np.log(some[some > 0] - 1.0)  # 200 draws, each label's 20 shifted by their sum
    assert abs(logarithms.std() * np.sqrt(200 / 199) - 0.5) < 4 * 0.5 / np.sqrt(2 * 200)
    equal = counts(spread=0.0)
    assert set(equal[equal > 0]) <= {299, 300, 301}  # cuts of a sum of floats


@pytest.mark.parametrize(
    ("name", "words"), [("by_group", "by_group needs groups"), ("by_factor", "by_factor needs factors")]
)
def test_what_the_data_set_lacks_is_named(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build.prepare(choose({"partition.name": name}))
    recipe = choose({"partition.name": "by_factor", "partition.factor": "sites"}).partition
    with pytest.raises(UserError, match="'site'"):
        inputs.deal(recipe, np.zeros(4, int), 1, 0, factors={"site": np.arange(4)})


OWN = """
import numpy as np

WARD = np.arange(240) % 7


class Marked:
    def __init__(self):
        x, y = np.arange(240)[:, None], np.arange(240) % 4
        self.train, self.test = (x, y), (x[:20], y[:20])


def by_place(labels):
    return [[i for i in range(len(labels)) if WARD[i] == k] for k in range(7)]


def by_mask(n_clients):
    return [np.flatnonzero(WARD[:200] == k) for k in range(7)]


def at_random(labels, rng):
    order = rng.permutation(7)
    return [rng.permutation([i for i in range(len(labels)) if WARD[i] == k]) for k in order]


def by_rows(rows):
    return [np.flatnonzero(WARD[rows] == k) for k in range(7)]


def some(labels, rng):
    return np.split(rng.permutation(len(labels))[:30], 3)


def by_label(labels, n_classes):
    return [np.flatnonzero(labels == c) for c in range(n_classes)]
"""


NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.last = nn.Linear(1, n_classes)

    def forward(self, x):
        return self.last(x / 240)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lab.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(partition: str, **fields: Any) -> build.Prepared:
    values = {"data.name": "lab.py:Marked", "partition.name": f"lab.py:{partition}", "model.name": "net.py:Net"}
    Path("net.py").write_text(NET, encoding="utf-8")
    return build.prepare(choose({**values, **fields}))


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("name", ["by_place", "by_mask", "at_random"])
@pytest.mark.parametrize("moves", [{}, {"data.validation": 0.0, "data.limit": 210}], ids=str)
def test_a_partition_by_the_rows_of_a_file_is_refused_where_rows_have_moved(name: str, moves: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"240 rows .*`rows`"):
        prepared(name, **moves)


@pytest.mark.long
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("name", ["by_place", "by_mask", "at_random", "by_rows"])
def test_it_is_right_where_no_row_has_moved_and_by_rows_always(name: str) -> None:
    for moves in [{"data.validation": 0.0}, *([{}, {"data.limit": 100}] if name == "by_rows" else [])]:
        outcome = prepared(name, **moves)
        for rows in outcome.partition.rows:
            assert len(set((outcome.train.x[rows, 0] % 7).tolist())) == 1


@pytest.mark.long
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("name", ["some", "by_label"])
def test_what_deals_the_examples_that_it_is_handed_is_taken(name: str) -> None:
    for moves in ({}, {"data.limit": 40}):
        assert prepared(name, **moves).partition.rows
