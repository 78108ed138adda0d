"""What must be made for a pool: which images a generator sees, how many it draws, and by what they are found again."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields, make_dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedcommons.artifacts import key_of
from fedcommons.config import experiment as config
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override, part_of
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.errors import UserError
from fedcommons.generators.ddpm import DDPM
from fedcommons.runs import build, inputs
from fedcommons.runs.inputs import deal
from fedcommons.sharing import needs
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.needs import Need, contribution, largest_remainder
from fedcommons.sharing.stage import Generating

DATASET = inputs.load(config.Data())
N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
FIVE = {"partition.name": "iid", "partition.n_clients": 5}


def experiment(**values: object) -> Experiment:
    """A config with these fields, dots written as double underscores, and Fedssyn's pool."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return override(Experiment(), {"sharing.setting": "shuffled_synthetic", **named})


def dealt(c: Experiment) -> Dealt:
    """The digits as they are dealt."""
    rows = deal(c.partition, DATASET.train.y.numpy(), DATASET.n_classes, c.seed).rows
    return Dealt(Clients(DATASET.train, rows), DATASET.n_classes, DATASET.flip, c.seed)


def needed(c: Experiment) -> list[Need]:
    """What must be made for the digits."""
    stage = part_of(c, "sharing")
    assert isinstance(stage, Generating)
    return list(stage.needs(dealt(c), build.recipe(c)))


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
    assert contribution(None, 50_000, 10, 4_321) == 5_000
    assert contribution(None, 50_000, 40, 17) == 1_250
    assert contribution(None, 3, 40, 1) == 1  # never none


@pytest.mark.parametrize("p", [0.0, 0.06, 0.2, 0.5, 0.57, 0.9, 0.99])
def test_p_is_met_to_within_one_image(p: float) -> None:
    for n_own in (1, 7, 100, 4_500):
        exact = p * n_own / (1 - p)
        assert abs(contribution(p, 50_000, 10, n_own) - exact) <= 0.5 + 1e-9


# --- what must be made


def test_the_generator_sees_rho_of_its_clients_images_and_no_others() -> None:
    c = experiment(**FIVE, generator__rho=0.75)
    for need, rows in zip(needed(c), dealt(c).own.rows, strict=True):
        assert len(need.examples) == int(0.75 * 259) == 194
        assert images(need.examples.x) <= images(DATASET.train.x[rows])
        assert need.n_classes == 10


def test_what_a_smaller_rho_sees_is_part_of_what_a_larger_one_sees() -> None:
    sets = [needed(experiment(**FIVE, generator__rho=rho)) for rho in (0.1, 0.5, 1.0)]
    for client in range(5):
        small, middle, whole = (images(of_rho[client].examples.x) for of_rho in sets)
        assert small < middle < whole
    rows = dealt(experiment(**FIVE)).own.rows[0]
    assert images(sets[2][0].examples.x) == images(DATASET.train.x[rows])


def test_labels_follow_the_class_frequencies_of_what_the_generator_saw() -> None:
    c = experiment(partition__name="dirichlet_niid", partition__n_clients=5, partition__alpha=0.3)
    for need in needed(c):
        seen = np.bincount(need.examples.y.numpy(), minlength=10)
        asked = np.bincount(need.labels.numpy(), minlength=10)
        assert asked.sum() == 259  # n_total / N, however many the client owns
        assert np.abs(asked - seen * 259 / seen.sum()).max() < 1
        assert (asked[seen == 0] == 0).all()


def test_with_noise_labels_follow_counts_of_which_each_has_its_own_gaussian_draw() -> None:
    """Over clients and seeds the noise has the stated deviation; other noise, rho and seed share no draw."""
    found, draws = [], []
    for seed in range(40):
        c = experiment(**FIVE, seed=seed, generator__label_noise=3.0)
        for client, need in enumerate(needed(c)):
            noisy = needs._counts(need.examples, client, dealt(c), build.recipe(c))
            seen = np.bincount(need.examples.y.numpy(), minlength=10)
            found.append(noisy - seen)
            asked = np.bincount(need.labels.numpy(), minlength=10)
            assert np.abs(asked - noisy * asked.sum() / noisy.sum()).max() < 1
    for change in ({}, {"generator.label_noise": 3.1}, {"generator.rho": 0.7}, {"partition.n_clients": 4}):
        c = override(experiment(**FIVE, generator__label_noise=3.0), change)
        need = needed(c)[0]
        seen = np.bincount(need.examples.y.numpy(), minlength=10)
        draws.append((needs._counts(need.examples, 0, dealt(c), build.recipe(c)) - seen) / build.recipe(c).label_noise)
    noise = np.concatenate(found)  # 2,000 draws; all counts are far above 0
    assert abs(noise.mean()) < 4 * 3 / len(noise) ** 0.5
    assert abs(noise.std() - 3) < 4 * 3 / (2 * len(noise)) ** 0.5
    assert all(np.abs(a - b).min() > 1e-6 for a, b in combinations(draws, 2))


def test_noise_on_labels_trains_no_generator_again() -> None:
    c = experiment(**FIVE)
    noisy = override(c, {"generator.label_noise": 1e5})
    assert generator_keys(noisy) == generator_keys(c)
    assert not set(image_keys(noisy)) & set(image_keys(c))
    assert not build.recipe(c).of_counts.release(0).covered
    assert build.recipe(noisy).of_counts.release(0).covered


def test_where_noise_leaves_no_count_above_zero_all_classes_are_alike() -> None:
    """Of one class without an image: half of the draws are below zero."""
    c, nothing = experiment(**FIVE, generator__label_noise=3.0), DATASET.train[np.zeros(0, np.int64)]
    one = replace(dealt(c), n_classes=1)
    found = [needs._counts(nothing, 0, replace(one, seed=seed), build.recipe(c))[0] for seed in range(20)]
    assert min(found) > 0
    assert 0 < found.count(1) < 20


def test_enough_images_are_drawn_for_a_large_p() -> None:
    for p in (0.3, 0.6, 0.8):
        c = experiment(**FIVE, sharing__p=p)
        wanted = contribution(p, N_TOTAL, 5, 259)
        for need in needed(c):
            assert need.n == wanted <= len(need.labels) < wanted + 259
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


@pytest.mark.parametrize("name", [field.name for field in fields(DDPM)])
def test_every_constant_of_the_generator_decides_one_of_the_keys(name: str) -> None:
    """One that decided none would let a stale artifact be taken for the new one."""
    need = needed(experiment(**FIVE))[0]
    values = asdict(DDPM())
    other = (8, 16) if name == "channels" else 7 if values[name] is None else values[name] * 2
    if isinstance(values[name], bool):
        other = not values[name]
    changed = replace(need, recipe=replace(need.recipe, generator=DDPM(**{**values, name: other})))
    assert key_of(changed.images_facts) != key_of(need.images_facts)
    assert (key_of(changed.generator_facts) == key_of(need.generator_facts)) == (name in DDPM.sampling)
    assert (key_of(changed.course_facts) == key_of(need.course_facts)) == (name in (*DDPM.sampling, "epochs"))


@pytest.mark.parametrize("change", [{}, {"generator.lr": 0.01, "generator.sampler": "ddim"}], ids=str)
def test_a_constant_that_comes_later_renames_nothing(change: Mapping[str, object]) -> None:
    """And a private generator is never served as a plain one: neither by a constant of it nor by its name."""
    need = needed(override(experiment(**FIVE), change))[0]
    generator: Any = need.recipe.generator
    later = make_dataclass("Later", [("sigma", float, 0.0)], bases=(type(generator),), frozen=True)

    def keys(recipe: Any) -> set[str]:
        other = replace(need, recipe=recipe)
        return {key_of(other.images_facts), key_of(other.generator_facts), key_of(other.course_facts)}

    def of(**values: object) -> Any:
        return replace(need.recipe, generator=later(**{**asdict(generator), **values}))

    assert keys(of()) == keys(need.recipe)
    assert not keys(of(sigma=1.5)) & keys(need.recipe)
    assert not keys(of(sigma=1.5)) & keys(of(sigma=2.5))
    assert not keys(replace(need.recipe, name="private")) & keys(need.recipe)


def test_a_trained_generator_depends_on_all_of_its_need_but_the_clients_number_and_the_labels_asked_for() -> None:
    # field by field: through the config a seed changes the examples too, and one fact would hide the lack of another
    need = needed(experiment(**FIVE))[0]
    examples = Examples(need.examples.x, need.examples.y.roll(1))
    from_outside = {"recipe": replace(need.recipe, digest="0f3c")}
    for change in (from_outside, {"flip": True}, {"n_classes": 11}, {"examples": examples}, {"seed": need.seed + 1}):
        other = replace(need, **change)
        assert key_of(other.generator_facts) != key_of(need.generator_facts), change
        assert key_of(other.images_facts) != key_of(need.images_facts), change
    fewer = replace(need, labels=need.labels[1:])
    assert key_of(fewer.generator_facts) == key_of(need.generator_facts)
    assert key_of(fewer.images_facts) != key_of(need.images_facts)
    for change in ({"client": 4}, {"n": 1}):
        assert key_of(replace(need, **change).images_facts) == key_of(need.images_facts)
