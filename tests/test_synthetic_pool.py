"""Fedssyn's pool: what is trained and drawn once, kept with its receipt, and read again."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from five_clients import DATASET, dealt
from torch import Tensor

from fedcommons import Dealt, Examples, GeneratorRecipe, Need
from fedcommons.accounting.privacy import Ledger
from fedcommons.accounting.statement import statement
from fedcommons.artifacts import Store, key_of
from fedcommons.core.accountants import composed
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.generators.generator import Receipt, TrainedGenerator, Weights
from fedcommons.sharing.shuffled_synthetic import ShuffledSynthetic
from fedcommons.sharing.stage import share
from fedcommons.sharing.synthetic_pool import Job, keep, make, missing, read

START = dealt()  # 5 clients of 259 images each
PRIVATE = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=1.5, sensitivity=2.0, steps=30)
CALLS: list[str] = []


@dataclass(frozen=True)
class Fake:
    """Its weight is the mean of what it saw; its images are the weight, the label and their number."""

    epochs: int = 4
    offset: int = 0
    sampling: ClassVar[tuple[str, ...]] = ("offset",)
    receipt: ClassVar[Receipt | None] = None

    def fit(
        self, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> dict[int, TrainedGenerator]:
        CALLS.append("fit")
        return {e: TrainedGenerator({"mean": examples.x.float().mean().view(1) + e % 2}, self.receipt) for e in epochs}

    def sample(self, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int) -> Tensor:
        CALLS.append("sample")
        x = torch.zeros(len(labels), *shape, dtype=torch.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = weights["mean"].to(torch.uint8), labels.to(torch.uint8)
        x[:, 0, 1, 0], x[:, 0, 1, 1] = torch.arange(len(labels)) % 256, torch.arange(len(labels)) // 256
        return x


def needed(
    p: float | None = None, start: Dealt = START, receipt: Receipt | None = None, noise: float = 0.0, **constants: int
) -> list[Need]:
    kind: Any = type("Fake", (Fake,), {"receipt": receipt})
    return list(ShuffledSynthetic(p).needs(start, GeneratorRecipe("fake", kind(**constants), 1.0, label_noise=noise)))


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, messages: list[str]) -> Store:
    return Store(tmp_path, messages.append)


def calls_for(store: Store, wanted: Sequence[Need]) -> Mapping[str, int]:
    """Make what is missing, as a run does before its first round, and count the calls of the generators."""
    CALLS.clear()
    for job in missing(store, wanted):
        keep(store, job, make(job))
    return Counter(CALLS)


def some(store: Store, need: Need, n: int) -> Examples:
    return read(store, replace(need, n=n)).examples


def test_one_training_serves_all_that_differ_in_size_epochs_or_sampling(store: Store) -> None:
    wanted = needed()
    with pytest.raises(LookupError, match="client 3"):
        read(store, wanted[3])
    assert [[need.client for need in job.needs] for job in missing(store, wanted + wanted)] == [[i] for i in range(5)]
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
    drawn = np.bincount(need.labels.numpy(), minlength=10)
    assert np.abs(np.bincount(part.y.numpy(), minlength=10) - drawn * n / drawn.sum()).max() < 1
    assert n < 259 or torch.equal(part.x, result.images[0])


def test_damaged_images_are_rebuilt_from_the_weights_and_damaged_weights_when_images_are_missing(
    store: Store, messages: list[str]
) -> None:
    wanted = needed()
    calls_for(store, wanted)
    before = some(store, wanted[1], 100)
    path = store.folder / "images" / f"{key_of(wanted[1].images_facts)}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert [job.needs[0].client for job in missing(store, wanted)] == [1]
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
    assert [(one.receipt, one.seen) for one in sets] == [(receipt, 259)] * 5
    releases = share(ShuffledSynthetic(), START, sets).releases
    for what, covered in (("synthetic images", receipt is PRIVATE), ("class counts", False)):
        assert [(r.client, r.covered) for r in releases if r.what == (what,)] == [(i, covered) for i in range(5)]
    assert len(releases) == 10


def test_a_private_generator_with_noisy_labels_covers_the_pool(store: Store) -> None:
    wanted = needed(receipt=PRIVATE, noise=4.0)
    calls_for(store, wanted)
    ledger = Ledger.of(share(ShuffledSynthetic(), START, [read(store, need) for need in wanted]).releases)
    result = statement(ledger, 5, 1e-5, rejected=0, local=False, secret=True)
    one = composed(((0.1, 1.5, 30), (1.0, 4.0, 1)), 1e-5)
    assert one > composed(((0.1, 1.5, 30),), 1e-5)
    assert (result["pool_epsilon_of_each_client"], result["overall"]) == ([one] * 5, one)
    after = statement(ledger.after([Release(0, ("delta",))]), 5, 1e-5, rejected=0, local=False, secret=True)
    assert (after["pool_epsilon_max"], after["overall"]) == (one, "none")


def test_flips_and_the_number_of_clients_are_those_of_the_data() -> None:
    for flip in (False, True):
        assert {need.flip for need in needed(start=replace(START, flip=flip))} == {flip}
    assert [need.n for need in needed(start=replace(START, own=START.own[:4]))] == [round(1295 / 4)] * 4
