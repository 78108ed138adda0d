"""What must be generated for a pool: the images a generator sees, how many it draws, and the keys of its artifacts."""

from collections.abc import Mapping
from dataclasses import asdict, fields, make_dataclass, replace
from typing import Any

import numpy as np
import pytest
from five_clients import DATASET

from fedcommons import Clients, Dealt, Examples, Experiment, UserError
from fedcommons.artifacts import key_of
from fedcommons.config.flat import override, part_of
from fedcommons.generators.ddpm import DDPM
from fedcommons.runs import build, inputs
from fedcommons.sharing.needs import Need, contribution, largest_remainder

N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
FIVE = {"sharing.setting": "shuffled_synthetic", "partition.name": "iid", "partition.n_clients": 5}


def needed(changes: Mapping[str, object] = {}) -> list[Need]:
    c = override(Experiment(), {**FIVE, **changes})
    rows = inputs.deal(c.partition, DATASET.train.y.numpy(), 10, c.seed).rows
    start = Dealt(Clients(DATASET.train, rows), 10, DATASET.flip, c.seed)
    return list(part_of(c, "sharing").needs(start, build.recipe(c)))


def counts(labels: Any) -> np.ndarray:
    return np.bincount(labels.numpy(), minlength=10)


def test_largest_remainder_gives_the_total_and_each_its_exact_share_to_within_one() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        weights = rng.integers(0, rng.integers(2, 1000), rng.integers(1, 30))
        weights[rng.integers(len(weights))] += 1
        total = int(rng.integers(0, 3000))
        result, exact = largest_remainder(weights, total), weights * total / weights.sum()
        assert result.sum() == total
        assert np.abs(result - exact).max() < 1 + 1e-9
        assert (result[weights == 0] == 0).all()
        up, remainder = result > np.floor(exact + 1e-9), exact - np.floor(exact + 1e-9)
        if up.any() and not up.all():  # a count that was rounded up had the larger remainder
            assert remainder[up].min() >= remainder[~up].max() - 1e-9
    assert largest_remainder(np.array([1] * 4), 6).tolist() == [2, 2, 1, 1]


def test_a_client_receives_the_papers_number_of_images() -> None:
    assert contribution(None, 50_000, 10, 4_321) == 5_000
    assert contribution(None, 3, 40, 1) == 1
    for p in (0.0, 0.06, 0.2, 0.5, 0.57, 0.9, 0.99):
        for n_own in (1, 7, 100, 4_500):
            assert abs(contribution(p, 50_000, 10, n_own) - p * n_own / (1 - p)) <= 0.5 + 1e-9
    for need in needed({"sharing.p": 0.8}):  # enough images are drawn for a large p
        assert need.n == contribution(0.8, N_TOTAL, 5, 259) == 4 * 259 == len(need.labels)


def test_a_generator_sees_rho_of_its_clients_images_and_a_smaller_rho_a_part_of_them() -> None:
    for small, middle, whole in zip(*(needed({"generator.rho": rho}) for rho in (0.1, 0.75, 1.0)), strict=True):
        seen = [{x.numpy().tobytes() for x in need.examples.x} for need in (small, middle, whole)]
        assert seen[0] < seen[1] < seen[2]
        assert [len(need.examples) for need in (small, middle, whole)] == [25, 194, 259]  # rounded down
    with pytest.raises(UserError, match=r"generator\.rho = 0\.003 .*client 0"):
        needed({"generator.rho": 0.003})


def test_labels_follow_the_class_frequencies_of_what_the_generator_saw() -> None:
    for need in needed({"partition.name": "dirichlet_niid", "partition.alpha": 0.3}):
        seen, drawn = counts(need.examples.y), counts(need.labels)
        assert drawn.sum() == 259  # n_total / N, however many the client owns
        assert np.abs(drawn - seen * 259 / seen.sum()).max() < 1
        assert (drawn[seen == 0] == 0).all()


SAME = [{"client.lr": 0.3}, {"model.name": "linear"}, {"sharing.setting": "local_synthetic"}, {"sharing.p": 0.5}]
DRAWN = [{"generator.sampler": "ddim"}, {"sharing.p": 0.7}, {"generator.label_noise": 1e5}]
TRAINED = [{"seed": 1}, {"generator.rho": 0.7}, {"generator.epochs": 3}, {"partition.n_clients": 6}]


def test_what_a_change_trains_and_draws_again() -> None:
    def keys(changes: Mapping[str, object] = {}) -> tuple[list[str], list[str]]:
        needs = needed(changes)
        return [key_of(need.generator_facts) for need in needs], [key_of(need.images_facts) for need in needs]

    before, other = keys()
    assert [len(set(before)), len(set(other))] == [5, 5]
    for change in (*SAME, *DRAWN, *TRAINED):
        generators, sets = keys(change)
        assert (generators == before, sets == other) == (change not in TRAINED, change in SAME), change
        assert change not in TRAINED or not set(generators) & set(before), change
        assert change in SAME or not set(sets) & set(other), change
    for noise, covered in ((0.0, False), (1e5, True)):
        assert needed({"generator.label_noise": noise})[0].recipe.of_counts.release(0).covered == covered


@pytest.mark.parametrize("name", [field.name for field in fields(DDPM)])
def test_every_constant_of_the_generator_decides_one_of_the_keys(name: str) -> None:
    need = needed()[0]
    values = asdict(DDPM())
    other = (8, 16) if name == "channels" else 7 if values[name] is None else values[name] * 2
    if isinstance(values[name], bool):
        other = not values[name]
    changed = replace(need, recipe=replace(need.recipe, generator=DDPM(**{**values, name: other})))
    assert key_of(changed.images_facts) != key_of(need.images_facts)
    assert (key_of(changed.generator_facts) == key_of(need.generator_facts)) == (name in DDPM.sampling)
    assert (key_of(changed.course_facts) == key_of(need.course_facts)) == (name in (*DDPM.sampling, "epochs"))


def test_a_constant_that_comes_later_renames_nothing() -> None:

    def keys(**recipe: Any) -> set[str]:
        other = replace(need, recipe=replace(need.recipe, **recipe))
        return {key_of(facts) for facts in (other.images_facts, other.generator_facts, other.course_facts)}

    need = needed()[0]
    later: Any = make_dataclass("Later", [("sigma", float, 0.0)], bases=(DDPM,), frozen=True)
    plain, one = (keys(generator=later(**asdict(need.recipe.generator), sigma=s)) for s in (0.0, 1.5))  # pyright: ignore
    assert plain == keys()
    assert not one & plain
    assert not keys(name="private") & plain


def test_a_trained_generator_depends_on_all_of_its_need_but_the_clients_number_and_the_labels() -> None:
    need = needed()[0]
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
