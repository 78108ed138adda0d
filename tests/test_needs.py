"""What must be generated for a pool: the images a generator sees, how many it draws, and the keys of its artifacts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields, make_dataclass, replace
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
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.needs import Need, contribution, largest_remainder
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic

DATASET = inputs.load(config.Data())
N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
FIVE = {"partition.name": "iid", "partition.n_clients": 5}


def experiment(**values: object) -> Experiment:
    """Five clients and Fedssyn's pool with these fields, dots written as double underscores."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return override(Experiment(), {"sharing.setting": "shuffled_synthetic", **FIVE, **named})


def clients(c: Experiment) -> Dealt:
    rows = inputs.deal(c.partition, DATASET.train.y.numpy(), DATASET.n_classes, c.seed).rows
    return Dealt(Clients(DATASET.train, rows), DATASET.n_classes, DATASET.flip, c.seed)


def needed(c: Experiment) -> list[Need]:
    """What must be generated for the digits."""
    return list(part_of(c, "sharing").needs(clients(c), build.recipe(c)))


def images(x: Tensor) -> Counter[bytes]:
    """Images as a multiset."""
    return Counter(image.numpy().tobytes() for image in x)


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
        if up.any() and not up.all():  # a count that was rounded up had the larger remainder
            remainder = exact - np.floor(exact + 1e-9)
            assert remainder[up].min() >= remainder[~up].max() - 1e-9


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [([3, 0, 6, 1], 20, [6, 0, 12, 2]), ([49, 51], 100, [49, 51]), ([1, 1, 1, 1], 6, [2, 2, 1, 1])],
)
def test_largest_remainder_is_exact_and_ties_go_to_the_lower_index(
    weights: list[int], total: int, counts: list[int]
) -> None:
    assert largest_remainder(np.array(weights), total).tolist() == counts


@pytest.mark.parametrize(
    ("n_total", "n_clients", "n_own", "n"), [(50_000, 10, 4_321, 5_000), (50_000, 40, 17, 1_250), (3, 40, 1, 1)]
)
def test_a_client_receives_the_papers_number_of_images(n_total: int, n_clients: int, n_own: int, n: int) -> None:
    """n_total/N, and never none."""
    assert contribution(None, n_total, n_clients, n_own) == n


@pytest.mark.parametrize("p", [0.0, 0.06, 0.2, 0.5, 0.57, 0.9, 0.99])
def test_p_is_met_to_within_one_image(p: float) -> None:
    for n_own in (1, 7, 100, 4_500):
        exact = p * n_own / (1 - p)
        assert abs(contribution(p, 50_000, 10, n_own) - exact) <= 0.5 + 1e-9


def test_a_generator_sees_rho_of_its_clients_images_and_a_smaller_rho_a_part_of_them() -> None:
    sets = [needed(experiment(generator__rho=rho)) for rho in (0.1, 0.75, 1.0)]
    rows = clients(experiment()).own.rows
    for client in range(5):
        small, middle, whole = (images(of_rho[client].examples.x) for of_rho in sets)
        assert small < middle < whole == images(DATASET.train.x[rows[client]])
        assert [len(of_rho[client].examples) for of_rho in sets] == [25, 194, 259]  # rounded down
    with pytest.raises(UserError, match=r"generator\.rho = 0\.003 .*client 0"):
        needed(experiment(generator__rho=0.003))


def test_labels_follow_the_class_frequencies_of_what_the_generator_saw() -> None:
    c = experiment(partition__name="dirichlet_niid", partition__alpha=0.3)
    for need in needed(c):
        seen = np.bincount(need.examples.y.numpy(), minlength=10)
        drawn = np.bincount(need.labels.numpy(), minlength=10)
        assert drawn.sum() == 259  # n_total / N, however many the client owns
        assert np.abs(drawn - seen * 259 / seen.sum()).max() < 1
        assert (drawn[seen == 0] == 0).all()


def noise_of(**values: object) -> list[np.ndarray]:
    """What noise adds to each client's counts, less its part of their sum: read off so many labels that they tell."""
    result = []
    for need in needed(experiment(sharing__p=0.99, **values)):
        seen = np.bincount(need.examples.y.numpy(), minlength=10)
        drawn = np.bincount(need.labels.numpy(), minlength=10)
        result.append(drawn * seen.sum() / drawn.sum() - seen)
    return result


def test_noisy_labels_have_gaussian_draws_of_the_stated_deviation() -> None:
    """Shares of the counts n_k + s z_k move by s (z_k - share_k sum_l z_l): variance s^2 (1 - 1/10) of ten classes."""
    noise = np.concatenate([one for seed in range(40) for one in noise_of(seed=seed, generator__label_noise=3.0)])
    assert len(noise) == 2000
    deviation = 3 * 0.9**0.5
    assert abs(noise.mean()) < 4 * deviation / len(noise) ** 0.5
    assert abs(noise.std() - deviation) < 4 * deviation / (2 * len(noise)) ** 0.5 + 0.02
    plain = np.concatenate(noise_of())
    assert np.abs(plain).max() < 0.02  # rounding


def test_every_client_seed_rho_and_deviation_has_its_own_noise() -> None:
    noise: dict[str, object] = {"generator__label_noise": 3.0}
    first = noise_of(**noise)
    assert all(np.array_equal(a, b) for a, b in zip(first, noise_of(**noise), strict=True))
    changes: list[dict[str, object]] = [
        {"generator__label_noise": 3.1}, {"generator__rho": 0.7}, {"partition__n_clients": 4}, {"seed": 1},
    ]  # fmt: skip
    others = [noise_of(**{**noise, **change})[0] for change in changes]
    assert all(np.abs(first[0] - other).max() > 0.5 for other in [*first[1:], *others])


def test_where_noise_leaves_no_count_above_zero_all_classes_are_alike() -> None:
    """Of two classes and noise far above the counts, a quarter of the draws leave none, and half leave one alone."""
    shares = []
    for seed in range(40):
        c = experiment(seed=seed, generator__label_noise=1e5)
        rows = [rows[DATASET.train.y.numpy()[rows] < 2][:4] for rows in clients(experiment()).own.rows[:2]]
        start = Dealt(Clients(DATASET.train, rows), 2, False, seed)
        need = next(iter(ShuffledSynthetic(0.0).needs(start, build.recipe(c))))
        counts = np.bincount(need.labels.numpy(), minlength=2)
        shares.append(counts[0] / counts.sum())
    alike = sum(abs(share - 0.5) < 0.002 for share in shares)
    assert 4 <= alike <= 16
    assert 12 <= sum(share in (0, 1) for share in shares) <= 28


def test_noise_on_labels_trains_no_generator_again() -> None:
    c = experiment()
    noisy = override(c, {"generator.label_noise": 1e5})
    assert keys(noisy)[0] == keys(c)[0]
    assert not set(keys(noisy)[1]) & set(keys(c)[1])
    assert not build.recipe(c).of_counts.release(0).covered
    assert build.recipe(noisy).of_counts.release(0).covered


def test_enough_images_are_drawn_for_a_large_p() -> None:
    for p in (0.3, 0.6, 0.8):
        wanted = contribution(p, N_TOTAL, 5, 259)
        for need in needed(experiment(sharing__p=p)):
            assert need.n == wanted <= len(need.labels) < wanted + 259
            assert len(need.labels) % 259 == 0


def keys(c: Experiment) -> tuple[list[str], list[str]]:
    """Keys under which the trained generators and the drawn images are stored."""
    needs = needed(c)
    return [key_of(need.generator_facts) for need in needs], [key_of(need.images_facts) for need in needs]


def test_every_client_has_keys_of_its_own() -> None:
    assert [len(set(of)) for of in keys(experiment())] == [5, 5]


SAME = [{"client.lr": 0.3}, {"client.epochs": 3}, {"model.name": "linear"}, {"federation.rounds": 3},
        {"algorithm": "fedavg"}, {"sharing.setting": "local_synthetic"}, {"artifacts": "elsewhere"},
        {"sharing.p": 0.0}, {"sharing.p": 0.06}, {"sharing.p": 0.5}]  # fmt: skip
DRAWN = [{"generator.sampler": "ddim"}, {"generator.sampling_steps": 50}, {"sharing.p": 0.7}]
TRAINED = [{"seed": 1}, {"generator.rho": 0.7}, {"generator.epochs": 3}, {"generator.batch_size": 32},
           {"generator.lr": 0.001}, {"partition.name": "dirichlet_classes"}, {"partition.n_clients": 6}]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "trained", "drawn"),
    [*((change, False, False) for change in SAME), *((change, False, True) for change in DRAWN),
     *((change, True, True) for change in TRAINED)],
    ids=str,
)  # fmt: skip
def test_what_a_change_trains_and_draws_again(change: Mapping[str, object], trained: bool, drawn: bool) -> None:
    (generators, sets), (before, other) = keys(override(experiment(), change)), keys(experiment())
    assert (generators == before, sets == other) == (not trained, not drawn)
    assert not trained or not set(generators) & set(before)
    assert not drawn or not set(sets) & set(other)


@pytest.mark.parametrize("name", [field.name for field in fields(DDPM)])
def test_every_constant_of_the_generator_decides_one_of_the_keys(name: str) -> None:
    """One that decided none would let a stale artifact be taken for the new one."""
    need = needed(experiment())[0]
    values = asdict(DDPM())
    other = (8, 16) if name == "channels" else 7 if values[name] is None else values[name] * 2
    if isinstance(values[name], bool):
        other = not values[name]
    changed = replace(need, recipe=replace(need.recipe, generator=DDPM(**{**values, name: other})))
    assert key_of(changed.images_facts) != key_of(need.images_facts)
    assert (key_of(changed.generator_facts) == key_of(need.generator_facts)) == (name in DDPM.sampling)
    assert (key_of(changed.course_facts) == key_of(need.course_facts)) == (name in (*DDPM.sampling, "epochs"))


def all_keys(need: Need) -> set[str]:
    return {key_of(facts) for facts in (need.images_facts, need.generator_facts, need.course_facts)}


def test_a_constant_that_comes_later_renames_nothing() -> None:
    """And a private generator is never served as a plain one: neither by a constant of it nor by its name."""
    for change in ({}, {"generator.lr": 0.01, "generator.sampler": "ddim"}):
        need = needed(override(experiment(), change))[0]
        generator: Any = need.recipe.generator
        later = make_dataclass("Later", [("sigma", float, 0.0)], bases=(type(generator),), frozen=True)

        def keys_of(need: Need = need, later: Any = later, **values: object) -> set[str]:
            part = later(**{**asdict(need.recipe.generator), **values})  # pyright: ignore[reportArgumentType]
            return all_keys(replace(need, recipe=replace(need.recipe, generator=part)))

        assert keys_of() == all_keys(need)
        assert not keys_of(sigma=1.5) & all_keys(need)
        assert not keys_of(sigma=1.5) & keys_of(sigma=2.5)
        assert not all_keys(replace(need, recipe=replace(need.recipe, name="private"))) & all_keys(need)


def test_a_trained_generator_depends_on_all_of_its_need_but_the_clients_number_and_the_labels() -> None:
    # field by field: through the config a seed changes the examples too, and one fact would hide the lack of another
    need = needed(experiment())[0]
    examples = Examples(need.examples.x, need.examples.y.roll(1))
    own = {"recipe": replace(need.recipe, digest="0f3c")}
    for change in (own, {"flip": True}, {"n_classes": 11}, {"examples": examples}, {"seed": need.seed + 1}):
        other = replace(need, **change)
        assert key_of(other.generator_facts) != key_of(need.generator_facts), change
        assert key_of(other.images_facts) != key_of(need.images_facts), change
    fewer = replace(need, labels=need.labels[1:])
    assert key_of(fewer.generator_facts) == key_of(need.generator_facts)
    assert key_of(fewer.images_facts) != key_of(need.images_facts)
    for change in ({"client": 4}, {"n": 1}):
        assert key_of(replace(need, **change).images_facts) == key_of(need.images_facts)
