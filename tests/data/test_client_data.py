"""Groups and factors of a data set; clients as lazy views of data, parts of theirs, their test rows and shifts."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons import LocalSGD, UserError
from fedcommons.config.dotted import choose
from fedcommons.data import client_test_sets, datasets
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.examples import Dataset, Examples, Origin
from fedcommons.data.partition import Partitioned
from fedcommons.data.transforms import shift_features
from fedcommons.runs import assemble, build, load_data, spec
from fedcommons.testing import digits

MARK = np.arange(240)  # example j holds j, so that whatever comes with it can be checked
NAMES = np.array([f"ward {j % 7}" for j in MARK])


def marked(n: int = 240) -> dict[str, Any]:
    factors = {"camera": MARK[:n] % 5, "year": [str(2000 + j % 3) for j in MARK[:n]]}
    return {"x": MARK[:n, None], "y": MARK[:n] % 4, "groups": NAMES[:n], "factors": factors}


def load(returned: Any, **fields: Any) -> Any:
    return datasets.load("marked", lambda: returned, **fields)


@pytest.mark.parametrize(
    "returned", [marked(), SimpleNamespace(train=marked(100), test=marked())], ids=["one set", "an object of two"]
)
def test_groups_factors_and_rows_stay_with_their_examples(returned: Any) -> None:
    for fields in ({}, {"validation": 0}, {"validation_from": "last"}, {"limit": 37}):
        result = load(returned, **fields)
        for part in (result.train, result.validation, result.test, result.train[torch.randperm(len(result.train))]):
            j = part.x[:, 0]
            assert part.groups.tolist() == (j % 7).tolist()
            assert part.factors["camera"].tolist() == (j % 5).tolist()
            assert part.factors["year"].tolist() == (j % 3).tolist()
            assert part.y.tolist() == (j % 4).tolist()
        assert result.origin.rows.tolist() == result.train.x[:, 0].tolist()


def test_numbers_of_groups_are_those_of_both_sets_together_and_decide_the_hash() -> None:
    x, y = MARK[:20, None], MARK[:20] % 2
    result = load(((x, y, [9] * 10 + [4] * 10), (x, y, [4] * 10 + [7] * 10)), validation=0)
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
        return load_data.partition_rows(
            recipe.name, recipe.constants, np.zeros(7, int), 1, seed, groups=groups, factors={"site": groups},
            n_clients=recipe.n_clients,
        ).rows  # fmt: skip

    assert [rows.tolist() for rows in deal()] == [[6], [1, 2, 5], [0, 4], [3]]
    for seed in range(20):
        joined = deal(seed, join=3)
        assert sorted(np.concatenate(joined).tolist()) == list(range(7))
        group_sets = [set(groups[rows]) for rows in joined]
        assert sum(map(len, group_sets)) == len(set(groups)) == 4  # no group is cut
        assert sorted(map(len, group_sets)) == [1, 1, 2]
    assert len({str(deal(seed, join=2)) for seed in range(20)}) > 1
    with pytest.raises(UserError, match=r"partition\.join .*4, got 5"):
        deal(join=5)
    if name == "by_factor":
        with pytest.raises(UserError, match="'site'"):
            deal(factor="sites")
    with pytest.raises(UserError, match=f"{name} needs (groups|factors)"):  # the digits have none
        build.build(choose({"partition.name": name}))


WARD = np.arange(240) % 7
X = (np.arange(240 * 64) % 255).reshape(240, 8, 8).astype(np.uint8)


class Marked:
    train, test = (X, WARD), (X[:20], WARD[:20])


def by_place(labels: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(WARD[: len(labels)] == k) for k in range(7)]


def by_rows(rows: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(WARD[rows] == k) for k in range(7)]


def by_chance(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    return np.split(rng.permutation(len(labels))[:30], 3)


@pytest.mark.long
def test_a_partition_by_the_rows_of_a_file_is_refused_where_rows_have_moved() -> None:
    def prepared(partition: str, **fields: Any) -> spec.RunSpec:
        base = {"data.name": f"{__file__}:Marked", "partition.name": f"{__file__}:{partition}", "model.name": "linear"}
        return build.build(choose({**base, **fields}))

    splits, limited, whole = {}, {"data.validation": 0.0, "data.limit": 210}, {"data.validation": 0.0}
    for moves in (splits, limited):
        with pytest.raises(UserError, match=r"240 rows .*`rows`"):
            prepared("by_place", **moves)
    for name, moves in (("by_place", whole), ("by_rows", splits)):
        result = prepared(name, **moves)
        assert all(len(set(result.train.y[rows].tolist())) == 1 for rows in result.partition.rows)
    assert prepared("by_chance", **limited).partition.rows


def test_half_of_the_data_trains_half_as_long() -> None:
    federation = digits().training(LocalSGD(epochs=6, batch_size=5))
    data = Clients(digits().data.clients.store, [np.arange(20)], [10])[0]
    for part, steps in ((data, 12), (data.subset(torch.arange(10)), 6), (data.subset(torch.arange(5)), 3)):
        work = federation.work()  # E' = 3 of 6 epochs, as half is own
        assert int(work.local(work.initial, part, 0).metrics["steps"]) == steps
    assert LocalSGD(epochs=6, batch_size=5).epochs_for(20, 21.0) == 6  # never longer than without sharing
    assert LocalSGD(epochs=6, batch_size=5).epochs_for(5, None, share=0.5) == 3


def test_parts_weigh_together_what_the_whole_weighs() -> None:
    store, weights = digits().data.clients.store, np.random.default_rng(0).uniform(0.1, 3, 20)
    data = Clients(store, Rows.from_lists([np.arange(20)], [weights]))[0]
    cut = torch.randperm(20, generator=torch.Generator().manual_seed(0)).split([4, 9, 7])
    parts = [data.subset(rows) for rows in cut]
    assert sum(part.size for part in parts) == pytest.approx(weights.sum())
    assert sum(part.n_own or 0 for part in parts) == pytest.approx(data.n_own)
    work = digits().work()
    gradients = [part.size * work.gradient(work.initial, part).buffer.double() for part in parts]
    whole = data.size * work.gradient(work.initial, data).buffer.double()
    assert torch.allclose(torch.stack(gradients).sum(0), whole, rtol=1e-4, atol=1e-6)
    for part, rows in zip(parts, cut, strict=True):
        assert part.size == pytest.approx(weights[rows.numpy()].sum())
        assert torch.equal(part.x, data.x[rows])


STORE = Examples(torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1), torch.arange(6) % 3)


def test_a_client_gets_copies_of_the_rows_that_are_its_own() -> None:
    clients = Clients(STORE, [np.array([4, 0]), np.array([1, 2, 5]), np.array([10**9])], n_own=[1, 3, 1])
    assert (len(clients), clients.sizes) == (3, [2, 3, 1])
    client = clients[1]
    assert (client.x.flatten().tolist(), client.y.tolist()) == ([1, 2, 5], [1, 2, 2])
    assert client.ids is not None
    assert client.ids.tolist() == [1, 2, 5]
    assert [c.n_own for c in clients[:2]] == [c.n_own for c in clients[:2].on(clients.store)] == [1, 3]
    with pytest.raises(IndexError):
        clients[2]
    client.x.zero_()
    assert clients.store.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    many = Clients(STORE, Rows(torch.arange(3), np.zeros(1_000_000, int), np.full(1_000_000, 2)))
    assert many[999_999].x.flatten().tolist() == [0, 1]
    assert many[500_000:500_003].store is many.store


def dataset(n: int = 100, groups: Any = None, test_groups: Any = None) -> Dataset:
    """Return a data set whose example j is the number j, and whose test example j is the number -j."""

    def part(values: torch.Tensor, group: Any) -> Examples:
        return Examples(values[:, None], values.abs() % 3, groups=None if group is None else torch.tensor(group))

    none, tests = part(torch.arange(0), None), 30 if test_groups is None else len(test_groups)
    origin = Origin(np.arange(n), n)
    return Dataset(
        name="marked", n_classes=3, mean=(0.0,), std=(1.0,), augment=False, train=part(torch.arange(n), groups),
        validation=none, test=part(-torch.arange(tests), test_groups), origin=origin,
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5])
def test_of_each_client_a_share_is_its_own_and_no_client_has_it_twice(share: float) -> None:
    data = dataset()
    for seed in range(30):
        order = np.random.default_rng(seed).permutation(100)
        partition = Partitioned.from_rows(
            [order[:2], order[2:30], order[30:33], order[40:]], data.train.y.numpy(), 3
        )  # 7 rows of no client
        remaining, train, tests = client_test_sets.hold_out(partition, data, share, seed)
        for client, rows in enumerate(partition.rows):
            train_rows, test_rows = train.x[remaining.rows[client], 0].tolist(), tests[client].x[:, 0].tolist()
            assert sorted(train_rows + test_rows) == sorted(rows.tolist())
            assert train_rows == [j for j in rows.tolist() if j not in test_rows]  # in the partition's order
            assert len(test_rows) == max(1, int(share * len(rows)))
            assert np.asarray(remaining.class_counts)[client].sum() == len(train_rows)
        assert len(train) == 100 - sum(tests.sizes)
        assert not set(train.x[:, 0].tolist()) & set(tests.store.x[:, 0].tolist())


def test_the_draw_is_keyed_by_the_seed_and_uniform_over_a_clients_rows() -> None:
    data, split = dataset(), Partitioned([np.arange(40), np.arange(40, 100)], None)
    sets = [client_test_sets.hold_out(split, data, 0.25, seed)[2][0].x[:, 0].tolist() for seed in (*range(400), 0)]
    assert sets[0] == sets[400]
    assert len({str(rows) for rows in sets}) == 400
    times = np.bincount(np.concatenate(sets[:400]), minlength=40) / 400
    assert np.abs(times - 0.25).max() < 4.5 * (0.25 * 0.75 / 400) ** 0.5
    data = dataset(groups=[0] * 50 + [1] * 49 + [7])
    split = Partitioned([np.arange(50), np.arange(50, 99), np.array([99])], None)
    with pytest.raises(UserError, match="client 2 has one; 1 of 3"):
        client_test_sets.hold_out(split, data, 0.1, 0)


def test_where_clients_are_groups_the_test_rows_of_their_groups_are_theirs() -> None:
    groups, test_groups = np.arange(100) % 4, np.arange(30) % 5
    data = dataset(groups=groups, test_groups=test_groups)
    partition = Partitioned([np.flatnonzero(np.isin(groups, some)) for some in ([0, 3], [1], [2])], None)
    tests = client_test_sets.of_groups(partition, data)
    assert tests is not None
    assert tests.store is data.test  # no example is held twice
    for client, some in enumerate(([0, 3], [1], [2])):
        assert tests[client].x[:, 0].neg().tolist() == np.flatnonzero(np.isin(test_groups, some)).tolist()
    cut = Partitioned([np.arange(10), np.arange(10, 100)], None)
    assert client_test_sets.of_groups(cut, data) is None  # a group is two clients'
    assert client_test_sets.of_groups(partition, dataset(groups=groups)) is None


def assembled(**fields: Any) -> assemble.Assembled:
    values = {"data.limit": 200, "partition.name": "iid", "partition.n_clients": 5, "data.client_test": 0.2}
    return assemble.assemble(build.build(choose({**values, **fields})))


@pytest.mark.parametrize("stage", [{"sharing.setting": "shuffled_real", "sharing.p": 0.5},
                                   {"sharing.setting": "raw_copies", "sharing.c": 0.5}], ids=str)  # fmt: skip
def test_no_test_row_is_trained_on_shared_or_counted(stage: dict[str, Any]) -> None:
    ready = assembled(**stage)
    data, tests = ready.data, ready.data.tests
    assert tests is not None
    assert tests.sizes == [8] * 5
    again = Counter(x.numpy().tobytes() for x in ready.spec.dataset.train.x)
    once = {image for image in (x.numpy().tobytes() for x in tests.store.x) if again[image] == 1}
    assert len(once) >= 39  # no two digits are alike
    for clients in (data.clients, data.real, *([data.pool] if data.pool else [])):
        assert not once & {x.numpy().tobytes() for x in clients.store.x}
        assert len(clients.store) == 160
    assert ready.spec.client_data.n_total == 160
    assert assembled(**stage, **{"data.client_test": 0.0}).data.tests is None


def test_noise_turns_and_colours_are_those_of_their_clients() -> None:
    def floats(n: int) -> Clients:
        x = torch.arange(12.0).view(1, 3, 2, 2).repeat(n, 1, 1, 1)
        return Clients(Examples(x, torch.zeros(n, dtype=torch.int64)), list(np.arange(n).reshape(4, -1)))

    clients = floats(40_000)
    noise = shift_features(clients, "noise", 0.2, 0, "train").x - clients.store.x
    variances = [noise[rows].var().item() for rows in clients.rows]
    assert variances == pytest.approx([0.05, 0.1, 0.15, 0.2], rel=0.03)
    assert not torch.equal(noise, shift_features(clients, "noise", 0.2, 0, "test").x - clients.store.x)
    clients = floats(8)
    turned = shift_features(clients, "rotation", 360.0, 0, "train").x
    for client in range(4):
        expected = torch.rot90(clients.store.x[0], client + 1, (1, 2))
        assert turned[2 * client] == pytest.approx(expected, abs=1e-4)
    first, other = (shift_features(clients, "colour", 0.5, 0, part).x for part in ("train", "test"))
    assert torch.equal(first, other)
    factors = (first / clients.store.x)[:, :, 1, 1]
    assert torch.allclose(factors[::2], factors[1::2])
    assert ((factors - 1).abs().amax(1) <= torch.tensor([0.125, 0.25, 0.375, 0.5]).repeat_interleave(2)).all()
    assert len({tuple(row.tolist()) for row in factors}) == 4


def test_pixels_stay_pixels_and_a_run_holds_shifted_ones() -> None:
    ready = assembled(**{"partition.shift": "noise", "partition.shift_size": 0.3})
    plain = assembled()
    assert ready.data.real.store.x.dtype == torch.uint8
    for name in ("real", "tests"):
        shifted, other = getattr(ready.data, name), getattr(plain.data, name)
        apart = [(a.x.float() - b.x.float()).abs().mean().item() for a, b in zip(shifted, other, strict=True)]
        assert apart == sorted(apart)
        assert apart[0] > 10
    with pytest.raises(UserError, match=r"partition\.shift rotation .*\(C, H, W\)"):
        shift_features(Clients(dataset().train, [np.arange(100)]), "rotation", None, 0, "train")
    with pytest.raises(UserError, match=r"partition\.shift_size needs a partition\.shift"):
        assembled(**{"partition.shift_size": 0.3})
