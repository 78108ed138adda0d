"""Fedssyn's pool: what must be generated, with which keys; kept with its receipt, and read again."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from five_clients import DATASET, make_data
from torch import Tensor

from fedcommons import ClientDatasets, Clients, Examples, Experiment, GenerationRequest, GeneratorRecipe, UserError
from fedcommons.config.dotted import override, part_of
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.generator import Receipt, TrainedGenerator, Weights
from fedcommons.generators.image_cache import Job, keep, make, missing, read
from fedcommons.generators.requests import contribution, largest_remainder
from fedcommons.privacy.accountants import composed
from fedcommons.privacy.ledger import Ledger
from fedcommons.privacy.release import SAMPLED_GAUSSIAN, Release
from fedcommons.privacy.statement import statement
from fedcommons.runs import build, load_data
from fedcommons.sharing.exchange import share
from fedcommons.sharing.synthetic import ShuffledSynthetic
from fedcommons.storage.artifact_store import Store, key_of

START = make_data()  # 5 clients of 259 images each
PRIVATE = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=1.5, sensitivity=2.0, steps=30)
CALLS: list[str] = []


@dataclass(frozen=True)
class Fake:
    """Its weight is the mean of what it saw; its images are the weight, the label and their number."""

    epochs: int = 4
    offset: int = 0
    sampling: ClassVar[tuple[str, ...]] = ("offset",)
    receipt: ClassVar[Receipt | None] = None

    def fit(self, examples: Examples, n_classes: int, seed: int, epochs: Any, *, flip: bool = False) -> Any:
        CALLS.append("fit")
        return {e: TrainedGenerator({"mean": examples.x.float().mean().view(1) + e % 2}, self.receipt) for e in epochs}

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        CALLS.append("sample")
        x = torch.zeros(len(labels), *shape, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = weights["mean"].to(torch.uint8), labels.to(torch.uint8)
        x[:, 0, 1, 0], x[:, 0, 1, 1] = torch.arange(len(labels)) % 256, torch.arange(len(labels)) // 256
        return x


def needed(
    p: float | None = None,
    start: ClientDatasets = START,
    receipt: Receipt | None = None,
    noise: float = 0.0,
    **constants: int,
) -> list[GenerationRequest]:
    kind: Any = type("Fake", (Fake,), {"receipt": receipt})
    return list(
        ShuffledSynthetic(p).requests(start, GeneratorRecipe("fake", kind(**constants), 1.0, label_noise=noise))
    )


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, messages: list[str]) -> Store:
    return Store(tmp_path, messages.append)


def calls_for(store: Store, wanted: Sequence[GenerationRequest]) -> Mapping[str, int]:
    """Make what is missing, as a run does before its first round, and count the calls of the generators."""
    CALLS.clear()
    for job in missing(store, wanted):
        keep(store, job, make(job))
    return Counter(CALLS)


def some(store: Store, need: GenerationRequest, n: int) -> Examples:
    return read(store, replace(need, n=n)).examples


def test_one_training_serves_all_that_differ_in_size_epochs_or_sampling(store: Store) -> None:
    wanted = needed()
    with pytest.raises(LookupError, match="client 3"):
        read(store, wanted[3])
    assert [[n.client for n in job.requests] for job in missing(store, wanted + wanted)] == [[i] for i in range(5)]
    assert calls_for(store, wanted) == {"fit": 5, "sample": 5}
    assert missing(Store(store.folder), needed(p=0.2)) == missing(store, wanted) == []
    assert calls_for(store, needed(p=0.5) + needed(p=0.7)) == {"sample": 5}  # 0.5: the images that are there
    early, late = needed(epochs=3), needed(epochs=8)
    assert [job.epochs for job in missing(store, early + late)] == [[3, 8]] * 5
    assert calls_for(store, early + late) == {"fit": 5, "sample": 10}
    for a, b in zip(early, late, strict=True):  # drawn with the weights of these epochs
        apart = some(store, a, 16).x[:, 0, 0, 0].float() - some(store, b, 16).x[:, 0, 0, 0].float()
        assert (apart == 1).all()


@pytest.mark.parametrize("n", [0, 16, 259])
def test_a_part_that_is_read_has_the_classes_in_proportion_and_no_image_twice(n: int, store: Store) -> None:
    need = needed()[0]
    job = Job([need], {})
    keep(store, job, result := make(job))
    part = some(store, need, n)
    assert len({x.numpy().tobytes() for x in part.x}) == len(part) == n
    assert torch.equal(part.x[:, 0, 0, 1].long(), part.y)
    expected = np.bincount(need.labels.numpy(), minlength=10)
    assert np.abs(np.bincount(part.y.numpy(), minlength=10) - expected * n / expected.sum()).max() < 1
    assert n < 259 or torch.equal(part.x, result.images[0])


def test_damaged_images_are_rebuilt_from_weights_and_weights_if_needed(store: Store, messages: list[str]) -> None:
    wanted = needed()
    calls_for(store, wanted)
    before = some(store, wanted[1], 100)
    path = store.folder / "images" / f"{wanted[1].images_key}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert [job.requests[0].client for job in missing(store, wanted)] == [1]
    assert [path.name in message for message in messages] == [True]
    assert calls_for(store, wanted) == {"sample": 1}  # the generator was intact
    assert torch.equal(some(store, wanted[1], 100).x, before.x)
    for path in (store.folder / "generators").glob("*.safetensors"):
        path.write_bytes(b"")
    assert missing(store, wanted) == []
    assert calls_for(store, needed(offset=7)) == {"fit": 5, "sample": 5}


def test_stored_images_of_another_need_are_named_and_drawn_again(store: Store, messages: list[str]) -> None:
    need = needed()[0]
    good = torch.zeros(len(need.labels), *DATASET.shape, dtype=torch.uint8)
    for tensors in (
        {"images": good[1:], "labels": need.labels},
        {"images": good.float(), "labels": need.labels},
        {"images": good, "labels": need.labels.flip(0)},
    ):
        store.put("images", tensors, need.images_facts, {})
        assert len(missing(store, [need])) == 1
    assert ["client 0" in message for message in messages] == [True] * 3
    for findings in ({}, {"receipt": {"noise": 1.0}}):  # what is no receipt is none
        store.put("images", {"images": good, "labels": need.labels}, need.images_facts, findings)
        assert read(store, need).receipt is None


@pytest.mark.parametrize("receipt", [PRIVATE, Receipt(), None], ids=["private", "plain", "none"])
def test_a_receipt_comes_back_with_the_images_and_covers_the_pool(receipt: Receipt | None, store: Store) -> None:
    wanted = needed(receipt=receipt)
    calls_for(store, wanted)
    for path in (store.folder / "images").iterdir():
        path.unlink()
    later = Store(store.folder)
    assert calls_for(later, wanted) == {"sample": 5}
    sets = [read(later, need) for need in wanted]
    assert [(each.receipt, each.n_sources) for each in sets] == [(receipt, 259)] * 5
    releases = share(ShuffledSynthetic(), START, sets).releases
    for what, covered in (("synthetic images", receipt is PRIVATE), ("class counts", False)):
        assert [(r.client, r.covered) for r in releases if r.what == (what,)] == [(i, covered) for i in range(5)]
    assert len(releases) == 10


def test_a_private_generator_with_noisy_labels_covers_the_pool(store: Store) -> None:
    wanted = needed(receipt=PRIVATE, noise=4.0)
    calls_for(store, wanted)
    ledger = Ledger.before_rounds(share(ShuffledSynthetic(), START, [read(store, need) for need in wanted]).releases)
    result = statement(ledger, 5, 1e-5, rejected=0, local=False, secret=True)
    epsilon = composed(((0.1, 1.5, 30), (1.0, 4.0, 1)), 1e-5)
    assert epsilon > composed(((0.1, 1.5, 30),), 1e-5)
    assert (result["pool_epsilon_of_each_client"], result["overall"]) == ([epsilon] * 5, epsilon)
    after = statement(ledger.after([Release(0, ("delta",))]), 5, 1e-5, rejected=0, local=False, secret=True)
    assert (after["pool_epsilon_max"], after["overall"]) == (epsilon, "none")


def test_flips_and_the_number_of_clients_are_those_of_the_data() -> None:
    for flip in (False, True):
        assert {need.flip for need in needed(start=replace(START, flip=flip))} == {flip}
    assert [need.n for need in needed(start=replace(START, clients=START.clients[:4]))] == [round(1295 / 4)] * 4


N_TOTAL = len(DATASET.train)  # 1,295 = 5 * 259
FIVE = {"sharing.setting": "shuffled_synthetic", "partition.name": "iid", "partition.n_clients": 5}


def needs_of(changes: Mapping[str, object] = {}) -> list[GenerationRequest]:
    c = override(Experiment(), {**FIVE, **changes})
    rows = load_data.partition_rows(
        c.partition.name, c.partition.constants, DATASET.train.y.numpy(), 10, c.seed, n_clients=c.partition.n_clients
    ).rows
    start = ClientDatasets(Clients(DATASET.train, rows), 10, DATASET.flip, c.seed)
    return list(part_of(c, "sharing").requests(start, build.recipe(c)))


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
    for need in needs_of({"sharing.p": 0.8}):  # enough images are drawn for a large p
        assert need.n == contribution(0.8, N_TOTAL, 5, 259) == 4 * 259 == len(need.labels)


def test_a_generator_sees_rho_of_its_clients_images_and_a_smaller_rho_a_part_of_them() -> None:
    for small, middle, whole in zip(*(needs_of({"generator.rho": rho}) for rho in (0.1, 0.75, 1.0)), strict=True):
        seen = [{x.numpy().tobytes() for x in need.examples.x} for need in (small, middle, whole)]
        assert seen[0] < seen[1] < seen[2]
        assert [len(need.examples) for need in (small, middle, whole)] == [25, 194, 259]  # rounded down
    with pytest.raises(UserError, match=r"generator\.rho = 0\.003 .*client 0"):
        needs_of({"generator.rho": 0.003})


def test_labels_follow_the_class_frequencies_of_what_the_generator_saw() -> None:
    for need in needs_of({"partition.name": "dirichlet_niid", "partition.alpha": 0.3}):
        seen, labels = counts(need.examples.y), counts(need.labels)
        assert labels.sum() == 259  # n_total / N, however many the client owns
        assert np.abs(labels - seen * 259 / seen.sum()).max() < 1
        assert (labels[seen == 0] == 0).all()


SAME = [{"client.lr": 0.3}, {"model.name": "linear"}, {"sharing.setting": "local_synthetic"}, {"sharing.p": 0.5}]
SAMPLING = [{"generator.sampler": "ddim"}, {"sharing.p": 0.7}, {"generator.label_noise": 1e5}]
TRAINED = [{"seed": 1}, {"generator.rho": 0.7}, {"generator.epochs": 3}, {"partition.n_clients": 6}]


def test_what_a_change_trains_and_draws_again() -> None:
    def keys(changes: Mapping[str, object] = {}) -> tuple[list[str], list[str]]:
        needs = needs_of(changes)
        return [key_of(need.generator_facts) for need in needs], [need.images_key for need in needs]

    before, other = keys()
    assert [len(set(before)), len(set(other))] == [5, 5]
    for change in (*SAME, *SAMPLING, *TRAINED):
        generators, sets = keys(change)
        assert (generators == before, sets == other) == (change not in TRAINED, change in SAME), change
        assert change not in TRAINED or not set(generators) & set(before), change
        assert change in SAME or not set(sets) & set(other), change
    for noise, covered in ((0.0, False), (1e5, True)):
        assert needs_of({"generator.label_noise": noise})[0].recipe.of_counts.release(0).covered == covered


@pytest.mark.parametrize("name", [field.name for field in fields(DDPM)])
def test_every_constant_of_the_generator_decides_one_of_the_keys(name: str) -> None:
    need = needs_of()[0]
    values = asdict(DDPM())
    other = (8, 16) if name == "channels" else 7 if values[name] is None else values[name] * 2
    if isinstance(values[name], bool):
        other = not values[name]
    changed = replace(need, recipe=replace(need.recipe, generator=DDPM(**{**values, name: other})))
    assert changed.images_key != need.images_key
    assert (key_of(changed.generator_facts) == key_of(need.generator_facts)) == (name in DDPM.sampling)
    assert (key_of(changed.course_facts) == key_of(need.course_facts)) == (name in (*DDPM.sampling, "epochs"))


def test_a_constant_that_comes_later_renames_nothing() -> None:

    def keys(**recipe: Any) -> set[str]:
        other = replace(need, recipe=replace(need.recipe, **recipe))
        return {key_of(facts) for facts in (other.images_facts, other.generator_facts, other.course_facts)}

    need = needs_of()[0]
    later: Any = make_dataclass("Later", [("sigma", float, 0.0)], bases=(DDPM,), frozen=True)
    plain, changed = (keys(generator=later(**asdict(need.recipe.generator), sigma=s)) for s in (0.0, 1.5))  # pyright: ignore
    assert plain == keys()
    assert not changed & plain
    assert not keys(name="private") & plain


def test_a_trained_generator_depends_on_all_of_its_need_but_the_clients_number_and_the_labels() -> None:
    need = needs_of()[0]
    examples = Examples(need.examples.x, need.examples.y.roll(1))
    recipe = {"recipe": replace(need.recipe, digest="0f3c")}
    for change in (recipe, {"flip": True}, {"n_classes": 11}, {"examples": examples}, {"seed": need.seed + 1}):
        other = replace(need, **change)
        assert key_of(other.generator_facts) != key_of(need.generator_facts), change
        assert other.images_key != need.images_key, change
    fewer = replace(need, labels=need.labels[1:])
    assert key_of(fewer.generator_facts) == key_of(need.generator_facts)
    assert fewer.images_key != need.images_key
    for change in ({"client": 4}, {"n": 1}):
        assert key_of(replace(need, **change).images_facts) == need.images_key
