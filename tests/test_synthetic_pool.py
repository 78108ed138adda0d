"""Fedssyn's pool: what is needed, what is made once, kept and read."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.accounting.privacy import Ledger
from fedcommons.accounting.statement import in_short, statement
from fedcommons.artifacts import Store, key_of
from fedcommons.config import experiment as config
from fedcommons.config.experiment import Experiment
from fedcommons.config.flat import override, part_of
from fedcommons.core.accountants import composed
from fedcommons.core.release import SAMPLED_GAUSSIAN, Release
from fedcommons.data.clients import Clients
from fedcommons.data.examples import Examples
from fedcommons.generators.ddpm import DDPM
from fedcommons.generators.generator import Receipt, TrainedGenerator, Weights
from fedcommons.runs import build, inputs
from fedcommons.runs.inputs import deal
from fedcommons.sharing.dealt import Dealt
from fedcommons.sharing.needs import Need
from fedcommons.sharing.stage import Generating, Shared, share
from fedcommons.sharing.synthetic_pool import (
    Job,
    keep,
    make,
    missing,
    read,
)

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


def fake_fit(receipt: Receipt | None) -> Callable[..., dict[int, TrainedGenerator]]:
    """A training with this receipt: the weight is the mean of what it saw."""

    def fit(
        self: DDPM, examples: Examples, n_classes: int, seed: int, epochs: Collection[int], *, flip: bool = False
    ) -> dict[int, TrainedGenerator]:
        CALLS.append("fit")
        return {e: TrainedGenerator({"mean": examples.x.float().mean().view(1) + e % 2}, receipt) for e in epochs}

    return fit


def fake_sample(
    self: DDPM, weights: Weights, shape: tuple[int, ...], n_classes: int, labels: Tensor, seed: int
) -> Tensor:
    """Images that are the weight, the label, and their number."""
    CALLS.append("sample")
    x = torch.zeros(len(labels), *shape, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = weights["mean"].to(torch.uint8), labels.to(torch.uint8)
    x[:, 0, 1, 0], x[:, 0, 1, 1] = torch.arange(len(labels)) % 256, torch.arange(len(labels)) // 256
    return x


CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here trains a real generator."""
    monkeypatch.setattr(DDPM, "fit", fake_fit(None))
    monkeypatch.setattr(DDPM, "sample", fake_sample)
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
        apart = part(store, a, 16).x[:, 0, 0, 0].float() - part(store, b, 16).x[:, 0, 0, 0].float()
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
    everything = part(store, need, len(need.labels))
    assert torch.equal(everything.y, need.labels)
    assert torch.equal(everything.x[:, 0, 0, 1].long(), need.labels)
    assert torch.equal(everything.x, make(job).images[0])


@pytest.mark.parametrize("n", [0, 1, 16, 100, 258])
def test_a_part_that_is_read_has_the_classes_in_proportion_and_no_image_twice(n: int, store: Store) -> None:
    need = needed(experiment(**FIVE))[0]
    job = Job([need], {})
    keep(store, job, make(job))
    some = part(store, need, n)
    assert len(some) == n
    assert max(images(some.x).values(), default=1) == 1
    assert torch.equal(some.x[:, 0, 0, 1].long(), some.y)
    drawn = np.bincount(need.labels.numpy(), minlength=10)
    assert np.abs(np.bincount(some.y.numpy(), minlength=10) - drawn * n / drawn.sum()).max() < 1


@pytest.mark.parametrize("weights", [{}, {"other": torch.ones(1)}, {"mean": torch.ones(2, 3)}])
def test_weights_that_do_not_fit_the_generator_are_made_anew(weights: Mapping[str, Tensor], store: Store) -> None:
    need = needed(experiment(**FIVE))[1]
    before = make(Job([need], {}))
    CALLS.clear()
    job = Job([need], {need.epochs: TrainedGenerator(weights)})
    keep(store, job, make(job))
    assert CALLS.count("fit") == 1
    assert torch.equal(part(store, need, len(need.labels)).x, before.images[0])


def test_reading_what_was_never_made_says_whose_it_is(store: Store) -> None:
    with pytest.raises(LookupError, match="client 3 have not been made"):
        read(store, needed(experiment(**FIVE))[3])


def test_a_damaged_images_artifact_is_said_and_rebuilt_from_the_weights(store: Store, said: list[str]) -> None:
    wanted = needed(experiment(**FIVE))
    make_all(store, wanted)
    before = part(store, wanted[1], 100)
    path = store.folder / "images" / f"{key_of(wanted[1].images_facts)}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    CALLS.clear()
    jobs = missing(store, wanted)
    assert [job.needs[0].client for job in jobs] == [1]
    assert len(said) == 1
    assert path.name in said[0]
    make_all(store, wanted)
    assert CALLS == ["sample"]  # the generator was intact
    assert torch.equal(part(store, wanted[1], 100).x, before.x)


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


def part(store: Store, need: Need, n: int) -> Examples:
    """So many of a client's stored images."""
    return read(store, replace(need, n=n)).examples


def extra(shared: Shared, client: int) -> Tensor:
    """Images the client trains on that are not its own."""
    data = shared.data.clients[client]
    assert data.n_own is not None
    return data.x[data.n_own :]


def test_the_whole_way_to_a_pool_meets_p(store: Store) -> None:
    c = experiment(**FIVE, sharing__setting="shuffled_synthetic", sharing__p=0.3)
    given = dealt(c)
    wanted = needed(c)
    make_all(store, wanted)
    sets = [read(store, need) for need in wanted]
    shared = share(part_of(c, "sharing"), given, sets)
    for client, rows in enumerate(given.own.rows):
        n_extra = len(extra(shared, client))
        assert abs(n_extra - 0.3 * (len(rows) + n_extra)) <= 1  # p within one image
    made = images(torch.cat([one.examples.x for one in sets]))
    assert sum((images(extra(shared, i)) for i in range(5)), Counter()) == made


# --- receipts


PRIVATE = Receipt(SAMPLED_GAUSSIAN, q=0.1, sigma=1.5, sensitivity=2.0, steps=30)


@pytest.mark.parametrize("receipt", [PRIVATE, Receipt(), None], ids=["private", "plain", "none"])
def test_a_receipt_comes_back_with_what_was_made_before(
    receipt: Receipt | None, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cache hit, and by images that are drawn anew from weights that were there."""
    monkeypatch.setattr(DDPM, "fit", fake_fit(receipt))
    wanted = needed(experiment(**FIVE))
    make_all(store, wanted)
    later = Store(store.folder)
    assert [read(later, need).receipt for need in wanted] == [receipt] * 5
    for path in (store.folder / "images").iterdir():
        path.unlink()
    CALLS.clear()
    make_all(later, wanted)
    assert CALLS == ["sample"] * 5
    assert [read(later, need).receipt for need in wanted] == [receipt] * 5


@pytest.mark.parametrize(
    "flaw", [{"sigma": 0.0}, {"sensitivity": float("inf")}, {"sigma": float("nan")}, {"q": float("nan")}], ids=str
)
def test_a_receipt_that_covers_nothing_does_not_come_back_as_one_that_does(
    flaw: Mapping[str, float], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DDPM, "fit", fake_fit(replace(PRIVATE, **flaw)))
    wanted = needed(experiment(**FIVE))
    make_all(store, wanted)
    assert all((r := read(store, need).receipt) is not None and not r.release(0).covered for need in wanted)


@pytest.mark.parametrize("findings", [{}, {"receipt": 3}, {"receipt": {"noise": 1.0}}], ids=str)
def test_what_is_no_receipt_is_none(findings: Mapping[str, object], store: Store) -> None:
    need = needed(experiment(**FIVE))[0]
    images = torch.zeros(len(need.labels), *DATASET.shape, dtype=torch.uint8)
    store.put("images", {"images": images, "labels": need.labels}, need.images_facts, findings)
    assert read(store, need).receipt is None


@pytest.mark.parametrize(("receipt", "covered"), [(None, False), (Receipt(), False), (PRIVATE, True)])
def test_a_pool_is_covered_as_its_generators_are_and_not_without_a_receipt(
    receipt: Receipt | None, covered: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DDPM, "fit", fake_fit(receipt))
    c = experiment(**FIVE)
    wanted = needed(c)
    make_all(store, wanted)
    shared = share(part_of(c, "sharing"), dealt(c), [read(store, need) for need in wanted])
    images = [release for release in shared.releases if release.what == ("synthetic images",)]
    assert [(release.client, release.covered) for release in images] == [(i, covered) for i in range(5)]
    counts = [release for release in shared.releases if release.what == ("class counts",)]
    assert [(release.client, release.covered) for release in counts] == [(i, False) for i in range(5)]
    assert len(shared.releases) == 10


def test_a_private_generator_with_noisy_labels_covers_the_pool(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epsilon of the pool is that of the generator's steps and of one Gaussian mechanism on the counts."""
    monkeypatch.setattr(DDPM, "fit", fake_fit(PRIVATE))
    c = experiment(**FIVE, generator__label_noise=4.0)
    wanted = needed(c)
    make_all(store, wanted)
    ledger = Ledger.of(share(part_of(c, "sharing"), dealt(c), [read(store, need) for need in wanted]).releases)
    said = statement(ledger, 5, 1e-5, rejected=0, local=False, secret=True)
    one = composed(((0.1, 1.5, 30), (1.0, 4.0, 1)), 1e-5)
    assert said["pool_epsilon_max"] == one > composed(((0.1, 1.5, 30),), 1e-5)
    assert said["pool_epsilon_of_each_client"] == [one] * 5
    assert said["in_words"][0].startswith(
        f"Commons (synthetic images, class counts): epsilon = {one:.4g} at delta = 1e-05"
    )
    assert _numbers(in_short(said)) == {"pool_epsilon_max": one, "overall": one}  # no update was sent yet
    after = statement(ledger.after([Release(0, ("delta",))]), 5, 1e-5, rejected=0, local=False, secret=True)
    assert _numbers(in_short(after)) == {"pool_epsilon_max": one, "overall": "none"}
    assert after["in_words"][1].startswith("Overall guarantee: none, because of model updates (delta), released 1 time")


def _numbers(short: dict[str, float | str]) -> dict[str, float | str]:
    return {name: value for name, value in short.items() if name not in ("in_words", "uncovered", "trusted")}


def test_flips_come_from_the_data_set() -> None:
    c = experiment(**FIVE)
    stage = part_of(c, "sharing")
    assert isinstance(stage, Generating)
    for flip in (False, True):
        assert {need.flip for need in stage.needs(replace(dealt(c), flip=flip), build.recipe(c))} == {flip}


def test_n_is_the_number_of_parts_that_were_dealt() -> None:
    """Not a number in the config, which a partition of somebody's own may not have."""
    c = experiment(**FIVE)
    four = replace(dealt(c), own=dealt(c).own[:4])
    stage = part_of(c, "sharing")
    assert isinstance(stage, Generating)
    wanted = stage.needs(four, build.recipe(c))
    assert [need.n for need in wanted] == [round(N_TOTAL / 4)] * 4
