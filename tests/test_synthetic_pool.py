"""Fedssyn's pool: what is needed, what is made once, kept and read."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.artifacts import Store, key_of
from fedcommons.config import experiment as config
from fedcommons.config.experiment import Experiment, override
from fedcommons.data import datasets
from fedcommons.data.datasets import Examples
from fedcommons.data.partition import Partitioned, partition
from fedcommons.errors import UserError
from fedcommons.generators.generator import Weights
from fedcommons.sharing import synthetic_pool
from fedcommons.sharing.settings import Shared, share
from fedcommons.sharing.synthetic_pool import (
    GENERATORS,
    Job,
    Need,
    contribution,
    keep,
    largest_remainder,
    make,
    missing,
    needs,
    read,
)

DATASET = datasets.load(config.Data())
N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
FIVE = {"partition.name": "iid", "partition.n_clients": 5}


def experiment(**values: object) -> Experiment:
    """A config with these fields, dots written as double underscores."""
    return override(Experiment(), {name.replace("__", "."): value for name, value in values.items()})


def dealt(c: Experiment) -> Partitioned:
    """The partition of the digits."""
    return partition(c.partition, DATASET.train.y.numpy(), DATASET.n_classes, c.seed)


def needed(c: Experiment) -> list[Need]:
    """What must be made for the digits."""
    return needs(c, DATASET, dealt(c))


def images(x: Tensor) -> Counter[bytes]:
    """Images as a multiset."""
    return Counter(image.numpy().tobytes() for image in x)


# --- apportionment


def test_largest_remainder_gives_the_total_and_each_its_exact_share_to_within_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        weights = rng.integers(0, rng.integers(2, 1000), rng.integers(1, 30))
        weights[rng.integers(len(weights))] += 1
        total = int(rng.integers(0, 3000))
        counts = largest_remainder(weights, total)
        exact = weights * total / weights.sum()
        assert counts.sum() == total
        assert np.abs(counts - exact).max() < 1 + 1e-9
        assert (counts[weights == 0] == 0).all()
        up = counts > np.floor(exact + 1e-9)
        if up.any() and not up.all():  # whoever was rounded up had the larger remainder
            remainder = exact - np.floor(exact + 1e-9)
            assert remainder[up].min() >= remainder[~up].max() - 1e-9


def test_largest_remainder_is_exact_where_the_shares_are_whole() -> None:
    assert largest_remainder(np.array([3, 0, 6, 1]), 20).tolist() == [6, 0, 12, 2]
    assert largest_remainder(np.array([49, 51]), 100).tolist() == [49, 51]


def test_ties_go_to_the_lower_index() -> None:
    assert largest_remainder(np.array([1, 1, 1, 1]), 6).tolist() == [2, 2, 1, 1]


# --- how many images


def test_a_client_receives_the_papers_number_of_images() -> None:
    # n_total / N: 50000 / 10, 50000 / 40 in Fedssyn
    assert contribution(experiment(partition__n_clients=10), 50_000, 4_321) == 5_000
    assert contribution(experiment(partition__n_clients=40), 50_000, 17) == 1_250
    assert contribution(experiment(partition__n_clients=40), 3, 1) == 1  # never none


@pytest.mark.parametrize("p", [0.0, 0.06, 0.2, 0.5, 0.57, 0.9, 0.99])
def test_p_is_met_to_within_one_image(p: float) -> None:
    c = experiment(sharing__p=p)
    for n_own in (1, 7, 100, 4_500):
        exact = p * n_own / (1 - p)
        assert abs(contribution(c, 50_000, n_own) - exact) <= 0.5 + 1e-9


# --- what must be made


def test_the_generator_sees_rho_of_its_clients_images_and_no_others() -> None:
    c = experiment(**FIVE, generator__rho=0.75)
    for need, rows in zip(needed(c), dealt(c).rows, strict=True):
        assert len(need.examples) == int(0.75 * 259) == 194
        assert images(need.examples.x) <= images(DATASET.train.x[rows])
        assert need.n_classes == 10


def test_what_a_smaller_rho_sees_is_part_of_what_a_larger_one_sees() -> None:
    sets = [needed(experiment(**FIVE, generator__rho=rho)) for rho in (0.1, 0.5, 1.0)]
    for client in range(5):
        small, middle, whole = (images(of_rho[client].examples.x) for of_rho in sets)
        assert small < middle < whole
    rows = dealt(experiment(**FIVE)).rows[0]
    assert images(sets[2][0].examples.x) == images(DATASET.train.x[rows])


def test_labels_follow_the_class_frequencies_of_what_the_generator_saw() -> None:
    c = experiment(partition__name="dirichlet_niid", partition__n_clients=5, partition__alpha=0.3)
    for need in needed(c):
        seen = np.bincount(need.examples.y.numpy(), minlength=10)
        asked = np.bincount(need.labels.numpy(), minlength=10)
        assert asked.sum() == 259  # n_total / N, however many the client owns
        assert np.abs(asked - seen * 259 / seen.sum()).max() < 1
        assert (asked[seen == 0] == 0).all()


def test_enough_images_are_drawn_for_a_large_p() -> None:
    for p in (0.3, 0.6, 0.8):
        c = experiment(**FIVE, sharing__p=p)
        wanted = contribution(c, N_TOTAL, 259)
        for need in needed(c):
            assert wanted <= len(need.labels) < wanted + 259
            assert len(need.labels) % 259 == 0


def test_a_rho_of_less_than_one_image_is_refused_and_names_the_client() -> None:
    with pytest.raises(UserError, match=r"generator\.rho = 0\.003 of client 0's 259 images is not one image"):
        needed(experiment(**FIVE, generator__rho=0.003))


def generator_keys(c: Experiment) -> list[str]:
    """Keys under which the trained generators are stored."""
    return [key_of(need.generator_facts) for need in needed(c)]


def image_keys(c: Experiment) -> list[str]:
    """Keys under which the drawn images are stored."""
    return [key_of(need.images_facts) for need in needed(c)]


def test_every_client_has_keys_of_its_own() -> None:
    c = experiment(**FIVE)
    assert len(set(generator_keys(c))) == 5
    assert len(set(image_keys(c))) == 5


@pytest.mark.parametrize(
    "change",
    [
        *({"client.lr": 0.3}, {"client.epochs": 3}, {"model.name": "linear"}, {"federation.rounds": 3}),
        *({"algorithm": "fedavg"}, {"sharing.setting": "local_synthetic"}, {"artifacts": "elsewhere"}),
        *({"sharing.p": 0.0}, {"sharing.p": 0.06}, {"sharing.p": 0.5}),
    ],
    ids=str,
)
def test_nothing_is_made_again_for(change: Mapping[str, object]) -> None:
    c = experiment(**FIVE)
    assert generator_keys(override(c, change)) == generator_keys(c)
    assert image_keys(override(c, change)) == image_keys(c)


@pytest.mark.parametrize(
    "change", [{"generator.sampler": "ddim"}, {"generator.sampling_steps": 50}, {"sharing.p": 0.7}], ids=str
)
def test_only_images_are_drawn_again_for(change: Mapping[str, object]) -> None:
    c = experiment(**FIVE)
    assert generator_keys(override(c, change)) == generator_keys(c)
    assert not set(image_keys(override(c, change))) & set(image_keys(c))


@pytest.mark.parametrize(
    "change",
    [
        *({"seed": 1}, {"generator.rho": 0.7}, {"generator.epochs": 3}),
        *({"generator.batch_size": 32}, {"generator.lr": 0.001}),
        {"generator.channels": (8, 16)},
        {"generator.ema_decay": 0.99},
        {"generator.timesteps": 2000},
        {"generator.schedule": "squaredcos_cap_v2"},
        {"partition.name": "dirichlet_classes"},
        {"partition.n_clients": 6},
    ],
    ids=str,
)
def test_generators_are_trained_again_for(change: Mapping[str, object]) -> None:
    c = experiment(**FIVE)
    assert not set(generator_keys(override(c, change))) & set(generator_keys(c))
    assert not set(image_keys(override(c, change))) & set(image_keys(c))


def test_every_setting_of_the_generator_decides_one_of_the_keys() -> None:
    # a field added to config.Generator and to no key would let a stale artifact be taken for the new one
    known = {*synthetic_pool._FITTING, "sampler", "sampling_steps", "rho"}  # rho: by the examples themselves
    assert set(config.Generator.__dataclass_fields__) == known


def test_a_trained_generator_depends_on_all_of_its_need_but_the_clients_number_and_the_labels_asked_for() -> None:
    # field by field: through the config a seed changes the examples too, and one fact would hide the lack of another
    need = needed(experiment(**FIVE))[0]
    examples = Examples(need.examples.x, need.examples.y.roll(1))
    for change in ({"flip": True}, {"n_classes": 11}, {"examples": examples}, {"seed": need.seed + 1}):
        other = replace(need, **change)
        assert key_of(other.generator_facts) != key_of(need.generator_facts), change
        assert key_of(other.images_facts) != key_of(need.images_facts), change
    fewer = replace(need, labels=need.labels[1:])
    assert key_of(fewer.generator_facts) == key_of(need.generator_facts)
    assert key_of(fewer.images_facts) != key_of(need.images_facts)
    assert key_of(replace(need, client=4).images_facts) == key_of(need.images_facts)


@dataclass(frozen=True)
class FakeGenerator:
    """Its weight is the mean of what it saw; its images are that weight, the label, and their number."""

    settings: config.Generator
    flip: bool = False

    def fit(self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int]) -> dict[int, Weights]:
        CALLS.append("fit")
        return {e: {"mean": examples.x.float().mean().view(1) + e % 2} for e in epochs}

    def sample(
        self, weights: Mapping[str, Tensor], shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int
    ) -> Tensor:
        CALLS.append("sample")
        x = torch.zeros(len(labels), *shape, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = weights["mean"].to(torch.uint8), labels.to(torch.uint8)
        x[:, 0, 1, 0], x[:, 0, 1, 1] = torch.arange(len(labels)) % 256, torch.arange(len(labels)) // 256
        return x


CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here trains a real generator."""
    monkeypatch.setitem(GENERATORS, "ddpm", FakeGenerator)
    CALLS.clear()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Store:
    return Store(tmp_path, said.append)


def make_all(store: Store, wanted: Sequence[Need]) -> None:
    """What a run does before its first round."""
    for job in missing(store, wanted):
        keep(store, job, make(job))


def test_what_was_made_is_found_and_never_made_again(store: Store, said: list[str]) -> None:
    wanted = needed(experiment(**FIVE))
    assert len(missing(store, wanted)) == 5
    make_all(store, wanted)
    assert sorted(CALLS) == ["fit"] * 5 + ["sample"] * 5
    assert missing(store, wanted) == []
    make_all(store, wanted)
    assert len(CALLS) == 10
    assert missing(Store(store.folder), needed(experiment(**FIVE, client__lr=0.5, sharing__p=0.2))) == []
    assert said == []


def test_a_thing_that_many_cells_need_is_one_job(store: Store) -> None:
    wanted = [need for lr in (0.01, 0.1, 1.0) for need in needed(experiment(**FIVE, client__lr=lr))]
    assert len(wanted) == 15
    assert [job.needs[0].client for job in missing(store, wanted)] == [0, 1, 2, 3, 4]


def test_a_generator_is_trained_once_for_several_sets_of_images(store: Store) -> None:
    """Cells of p = 0.5 and p = 0.7 need sets of different sizes from the same five generators."""
    make_all(store, [need for p in (0.5, 0.7) for need in needed(experiment(**FIVE, sharing__p=p))])
    assert sorted(CALLS) == ["fit"] * 5 + ["sample"] * 10


def test_generators_that_differ_in_epochs_alone_come_from_one_training(store: Store) -> None:
    early, late = (needed(experiment(**FIVE, generator__epochs=epochs)) for epochs in (3, 8))
    jobs = missing(store, early + late)
    assert [job.epochs for job in jobs] == [[3, 8]] * 5
    make_all(store, early + late)
    assert sorted(CALLS) == ["fit"] * 5 + ["sample"] * 10
    for a, b in zip(early, late, strict=True):  # each from its own weights
        apart = read(store, a, 16).x[:, 0, 0, 0].float() - read(store, b, 16).x[:, 0, 0, 0].float()
        assert (apart == 1).all()
    CALLS.clear()
    later = needed(experiment(**FIVE, generator__epochs=9))
    assert [job.epochs for job in missing(store, late + later)] == [[9]] * 5  # the others are there


def test_other_images_are_drawn_with_the_weights_that_are_there(store: Store) -> None:
    make_all(store, needed(experiment(**FIVE)))
    CALLS.clear()
    make_all(store, needed(experiment(**FIVE, generator__sampling_steps=7)))
    assert CALLS == ["sample"] * 5


def test_images_read_back_are_those_that_were_made_with_their_labels(store: Store) -> None:
    need = needed(experiment(**FIVE))[2]
    job = Job([need], {})
    keep(store, job, make(job))
    everything = read(store, need, len(need.labels))
    assert torch.equal(everything.y, need.labels)
    assert torch.equal(everything.x[:, 0, 0, 1].long(), need.labels)
    assert torch.equal(everything.x, make(job).images[0])


@pytest.mark.parametrize("n", [0, 1, 16, 100, 258])
def test_a_part_that_is_read_has_the_classes_in_proportion_and_no_image_twice(n: int, store: Store) -> None:
    need = needed(experiment(**FIVE))[0]
    job = Job([need], {})
    keep(store, job, make(job))
    some = read(store, need, n)
    assert len(some) == n
    assert max(images(some.x).values(), default=1) == 1
    assert torch.equal(some.x[:, 0, 0, 1].long(), some.y)
    drawn = np.bincount(need.labels.numpy(), minlength=10)
    assert np.abs(np.bincount(some.y.numpy(), minlength=10) - drawn * n / drawn.sum()).max() < 1


def test_reading_what_was_never_made_says_whose_it_is(store: Store) -> None:
    with pytest.raises(LookupError, match="client 3 have not been made"):
        read(store, needed(experiment(**FIVE))[3], 1)


def test_a_damaged_images_artifact_is_said_and_rebuilt_from_the_weights(store: Store, said: list[str]) -> None:
    wanted = needed(experiment(**FIVE))
    make_all(store, wanted)
    before = read(store, wanted[1], 100)
    path = store.folder / "images" / f"{key_of(wanted[1].images_facts)}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    CALLS.clear()
    jobs = missing(store, wanted)
    assert [job.needs[0].client for job in jobs] == [1]
    assert len(said) == 1
    assert path.name in said[0]
    make_all(store, wanted)
    assert CALLS == ["sample"]  # the generator was intact
    assert torch.equal(read(store, wanted[1], 100).x, before.x)


def test_a_damaged_generator_is_trained_again_only_when_images_are_missing(store: Store, said: list[str]) -> None:
    wanted = needed(experiment(**FIVE))
    make_all(store, wanted)
    for path in (store.folder / "generators").glob("*.safetensors"):
        path.write_bytes(b"")
    CALLS.clear()
    assert missing(store, wanted) == []
    make_all(store, needed(experiment(**FIVE, generator__sampling_steps=7)))
    assert sorted(CALLS) == ["fit"] * 5 + ["sample"] * 5
    assert len(said) == 5


def extra(shared: Shared, client: int) -> Tensor:
    """Images the client trains on that are not its own."""
    data = shared.clients[client]
    assert data.n_own is not None
    return data.x[data.n_own :]


def test_the_whole_way_to_a_pool_meets_p(store: Store) -> None:
    c = experiment(**FIVE, sharing__setting="shuffled_synthetic", sharing__p=0.3)
    given = dealt(c)
    wanted = needed(c)
    make_all(store, wanted)
    sizes = [contribution(c, N_TOTAL, len(rows)) for rows in given.rows]
    sets = [read(store, need, n) for need, n in zip(wanted, sizes, strict=True)]
    shared = share(c, DATASET, given, sets)
    for client, rows in enumerate(given.rows):
        n_extra = len(extra(shared, client))
        assert abs(n_extra - 0.3 * (len(rows) + n_extra)) <= 1  # p within one image
    assert sum((images(extra(shared, i)) for i in range(5)), Counter()) == images(torch.cat([s.x for s in sets]))
