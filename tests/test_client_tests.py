"""Each client's own test rows: how many, whose, and that nothing else has them."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from fedcommons.config.flat import choose
from fedcommons.data import client_tests
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Dataset, Examples, Origin
from fedcommons.data.partition import Partitioned
from fedcommons.data.shift import shifted
from fedcommons.errors import UserError
from fedcommons.runs import build


def dataset(n: int = 100, groups: Any = None, test_groups: Any = None) -> Dataset:
    """Example j is the number j; a test example is the number -j."""

    def part(values: torch.Tensor, of: Any) -> Examples:
        return Examples(values[:, None], values.abs() % 3, groups=None if of is None else torch.tensor(of))

    none, tests = part(torch.arange(0), None), 30 if test_groups is None else len(test_groups)
    origin = Origin(np.arange(n), n, None if groups is None else np.array([f"ward {k}" for k in range(9)]))
    return Dataset(
        name="marked", n_classes=3, mean=(0.0,), std=(1.0,), augment=False, train=part(torch.arange(n), groups),
        validation=none, test=part(-torch.arange(tests), test_groups), origin=origin,
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5])
def test_of_each_client_a_share_is_its_own_and_no_client_has_it_twice(share: float) -> None:
    data = dataset()
    for seed in range(30):
        order = np.random.default_rng(seed).permutation(100)
        dealt = Partitioned.of(
            [order[:2], order[2:30], order[30:33], order[40:]], data.train.y.numpy(), 3
        )  # 7 rows of no client
        left, train, tests = client_tests.drawn(dealt, data, share, seed)
        for client, rows in enumerate(dealt.rows):
            kept, own = train.x[left.rows[client], 0].tolist(), tests[client].x[:, 0].tolist()
            assert sorted(kept + own) == sorted(rows.tolist())
            assert kept == [j for j in rows.tolist() if j not in own]  # in the partition's order
            assert len(own) == max(1, int(share * len(rows)))
            assert np.asarray(left.class_counts)[client].sum() == len(kept)
        assert len(train) == 100 - sum(tests.sizes)
        assert not set(train.x[:, 0].tolist()) & set(tests.store.x[:, 0].tolist())


def test_the_draw_is_keyed_by_the_seed_and_uniform_over_a_clients_rows() -> None:
    data, dealt = dataset(), Partitioned([np.arange(40), np.arange(40, 100)], None)
    own = [client_tests.drawn(dealt, data, 0.25, seed)[2][0].x[:, 0].tolist() for seed in (*range(400), 0)]
    assert own[0] == own[400]
    assert len({str(rows) for rows in own}) == 400
    times = np.bincount(np.concatenate(own[:400]), minlength=40) / 400
    assert np.abs(times - 0.25).max() < 4.5 * (0.25 * 0.75 / 400) ** 0.5
    data = dataset(groups=[0] * 50 + [1] * 49 + [7])
    dealt = Partitioned([np.arange(50), np.arange(50, 99), np.array([99])], None)
    with pytest.raises(UserError, match=r"client 2 \(group 'ward 7'\) has one; 1 of 3"):
        client_tests.drawn(dealt, data, 0.1, 0)


def test_where_clients_are_groups_the_test_rows_of_their_groups_are_theirs() -> None:
    groups, test_groups = np.arange(100) % 4, np.arange(30) % 5
    data = dataset(groups=groups, test_groups=test_groups)
    dealt = Partitioned([np.flatnonzero(np.isin(groups, some)) for some in ([0, 3], [1], [2])], None)
    tests = client_tests.of_groups(dealt, data)
    assert tests is not None
    assert tests.store is data.test  # no example is held twice
    for client, some in enumerate(([0, 3], [1], [2])):
        assert tests[client].x[:, 0].neg().tolist() == np.flatnonzero(np.isin(test_groups, some)).tolist()
    cut = Partitioned([np.arange(10), np.arange(10, 100)], None)
    assert client_tests.of_groups(cut, data) is None  # a group is two clients'
    assert client_tests.of_groups(dealt, dataset(groups=groups)) is None
    lacking = client_tests.of_groups(dealt, dataset(groups=groups, test_groups=[1, 1, 8]))
    assert lacking is not None
    assert lacking.sizes == [0, 2, 0]


def assembled(**fields: Any) -> build.Assembled:
    values = {"data.limit": 200, "partition.name": "iid", "partition.n_clients": 5, "data.client_test": 0.2}
    return build.assemble(build.prepare(choose({**values, **fields})))


@pytest.mark.parametrize("stage", [{"sharing.setting": "shuffled_real", "sharing.p": 0.5},
                                   {"sharing.setting": "raw_copies", "sharing.c": 0.5}], ids=str)  # fmt: skip
def test_no_test_row_is_trained_on_shared_or_counted(stage: dict[str, Any]) -> None:
    ready = assembled(**stage)
    data, tests = ready.data, ready.data.tests
    assert tests is not None
    assert tests.sizes == [8] * 5
    assert data.own.sizes == [32] * 5
    again = Counter(x.numpy().tobytes() for x in ready.prepared.dataset.train.x)
    once = {image for image in (x.numpy().tobytes() for x in tests.store.x) if again[image] == 1}
    assert len(once) >= 39  # no two digits are alike
    for clients in (data.clients, data.own, *([data.pool] if data.pool else [])):
        assert not once & {x.numpy().tobytes() for x in clients.store.x}
        assert len(clients.store) == 160
    counts = ready.plan.facts.counts
    assert counts is not None
    assert int(counts().sum()) == int(data.clients.counts(10).sum())
    assert ready.prepared.dealt.n_total == 160
    moved = data.to(torch.device("meta")).tests
    assert moved is not None
    assert (moved.store.x.device.type, moved.sizes) == ("meta", [8] * 5)
    assert assembled(**stage, **{"data.client_test": 0.0}).data.tests is None


def test_noise_turns_and_colours_are_those_of_their_clients() -> None:
    def floats(n: int) -> Clients:
        x = torch.arange(12.0).view(1, 3, 2, 2).repeat(n, 1, 1, 1)
        return Clients(Examples(x, torch.zeros(n, dtype=torch.int64)), list(np.arange(n).reshape(4, -1)))

    clients = floats(40_000)
    noise = shifted(clients, "noise", 0.2, 0, "train").x - clients.store.x
    variances = [noise[rows].var().item() for rows in clients.rows]
    assert variances == pytest.approx([0.05, 0.1, 0.15, 0.2], rel=0.03)
    assert not torch.equal(noise, shifted(clients, "noise", 0.2, 0, "test").x - clients.store.x)
    clients = floats(8)
    turned = shifted(clients, "rotation", 360.0, 0, "train").x
    for client in range(4):
        expected = torch.rot90(clients.store.x[0], client + 1, (1, 2))
        assert turned[2 * client] == pytest.approx(expected, abs=1e-4)
    one, other = (shifted(clients, "colour", 0.5, 0, part).x for part in ("train", "test"))
    assert torch.equal(one, other)
    factors = (one / clients.store.x)[:, :, 1, 1]
    assert torch.allclose(factors[::2], factors[1::2])
    assert ((factors - 1).abs().amax(1) <= torch.tensor([0.125, 0.25, 0.375, 0.5]).repeat_interleave(2)).all()
    assert len({tuple(row.tolist()) for row in factors}) == 4


def test_pixels_stay_pixels_and_a_run_holds_shifted_ones() -> None:
    ready = assembled(**{"partition.shift": "noise", "partition.shift_size": 0.3})
    plain = assembled()
    assert ready.data.own.store.x.dtype == torch.uint8
    for mine, other in ((ready.data.own, plain.data.own), (ready.data.tests, plain.data.tests)):
        assert mine is not None
        assert other is not None
        apart = [(a.x.float() - b.x.float()).abs().mean().item() for a, b in zip(mine, other, strict=True)]
        assert apart == sorted(apart)
        assert apart[0] > 10
    assert torch.equal(ready.data.sets["test"].x, plain.data.sets["test"].x)
    with pytest.raises(UserError, match=r"partition\.shift rotation .*\(C, H, W\)"):
        shifted(Clients(dataset().train, [np.arange(100)]), "rotation", None, 0, "train")
    with pytest.raises(UserError, match=r"partition\.shift_size needs a partition\.shift"):
        assembled(**{"partition.shift_size": 0.3})
