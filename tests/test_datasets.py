"""Data sets, clients as lazy views of them, and augmentation."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons.config.presets import experiment
from fedcommons.config.sections import Data
from fedcommons.data import datasets
from fedcommons.data.augment import flip_and_crop
from fedcommons.data.clients import Clients, Rows
from fedcommons.data.datasets import data_folder
from fedcommons.data.examples import Dataset, Examples, without_images
from fedcommons.errors import UserError
from fedcommons.runs.inputs import load
from fedcommons.runs.worker import build_module
from lightning_modules import Classifier

DIGITS = load(Data())
FOLDERS = {"mnist": "MNIST/raw", "fmnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-py",
           "cifar100": "cifar-100-python"}  # fmt: skip
REAL = Path(os.environ.get("FEDCOMMONS_DATA") or Path(__file__).parents[2] / "shared" / "data")


def parts(dataset: Dataset) -> list[Examples]:
    """Training, validation and test part."""
    return [dataset.train, dataset.validation, dataset.test]


def images(examples: Examples) -> list[bytes]:
    """The images as values that can be sorted and compared."""
    return [x.numpy().tobytes() for x in examples.x]


def store(n: int) -> Examples:
    """n examples whose one pixel is their row, so that it shows where an image came from."""
    return Examples(torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n) % 3)


# --- digits


def test_digits_are_split_into_train_validation_and_test() -> None:
    # 20 % of 1,797 are the test set, 10 % of the rest the validation set, both rounded down
    assert [len(p) for p in parts(DIGITS)] == [1295, 143, 359]
    for part in parts(DIGITS):
        assert part.x.dtype == torch.uint8
        assert part.x.shape[1:] == DIGITS.shape == (1, 8, 8)
        assert part.y.dtype == torch.int64
        assert set(part.y.tolist()) == set(range(10))
    assert DIGITS.train.x.max() == 255  # 16 grey values, brought to the full range
    assert not DIGITS.augment


def test_splits_are_disjoint_and_complete() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    wanted = sorted((np.rint(p * 255 / 16).astype(np.uint8).tobytes(), y) for p, y in zip(pixels, labels, strict=True))
    found = [pair for part in parts(DIGITS) for pair in zip(images(part), part.y.tolist(), strict=True)]
    # as multisets: with every image there exactly as often as in the whole, no row is in two parts
    assert sorted(found) == wanted


def test_splits_are_the_same_whatever_else_is_asked_or_drawn() -> None:
    np.random.seed(1)  # noqa: NPY002  (the legacy generator is what must not matter)
    torch.manual_seed(1)
    for data in (Data(), Data(limit=100), Data(augment=True), Data(dir="elsewhere")):
        again = load(data)
        assert torch.equal(again.test.x, DIGITS.test.x)
        assert torch.equal(again.validation.x, DIGITS.validation.x)


@pytest.mark.parametrize(("share", "n"), [(0.0, 0), (0.25, 359), (0.5, 719)])
def test_the_validation_share_is_taken_from_the_training_images(share: float, n: int) -> None:
    dataset = load(Data(validation=share))
    assert [len(p) for p in parts(dataset)] == [1438 - n, n, 359]
    assert torch.equal(dataset.test.x, DIGITS.test.x)


def test_a_limit_keeps_that_many_training_images_and_smaller_limits_a_part_of_them() -> None:
    few, more = (load(Data(limit=n)) for n in (50, 200))
    assert (len(few.train), len(more.train)) == (50, 200)
    assert set(images(few.train)) <= set(images(more.train)) <= set(images(DIGITS.train))
    assert len(set(few.train.y.tolist())) > 5  # drawn at random, not the first rows of one class
    assert load(Data(limit=1295)).train.x.equal(DIGITS.train.x)


def test_a_limit_above_what_there_is_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.limit must be at most the 1295 training images there are, got 1296"):
        load(Data(limit=1296))


def test_augmentation_can_be_asked_for_and_not() -> None:
    assert load(Data(augment=True)).augment
    assert not load(Data(augment=False)).augment


def test_generators_mirror_no_digit_also_where_clients_augment() -> None:
    assert not load(Data(augment=True)).flip
    assert not load(Data()).flip


def test_what_is_no_image_is_seen_as_it_is_anyway() -> None:
    def numbers() -> tuple[Any, Any]:
        return torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).numpy(), [0, 1] * 20

    assert datasets.load("numbers", numbers).mean
    with pytest.raises(UserError, match=r"data.standardise must be true for data set numbers: it is for images"):
        datasets.load("numbers", numbers, standardise=False)


def test_models_see_pixels_as_they_are_where_nothing_is_to_be_standardised() -> None:
    config = experiment("smoke", "digits", {"data.standardise": False, "model.name": "linear"})
    data = load(config.data)
    assert (data.mean, data.std) == ((0.0,), (1.0,))
    module, x = build_module(config, data), DIGITS.test.x[:5]
    assert isinstance(module, Classifier)
    torch.testing.assert_close(module(x), module.network(x.float() / 255))


def test_an_unknown_data_set_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'cifar10'"):
        load(Data(name="cifar-10"))


def test_the_facts_of_a_data_set_travel_without_its_images() -> None:
    facts = without_images(DIGITS)
    assert facts.shape == DIGITS.shape
    assert [len(p) for p in parts(facts)] == [0, 0, 0]
    assert (
        replace(facts, train=DIGITS.train, validation=DIGITS.validation, test=DIGITS.test, origin=DIGITS.origin)
        == DIGITS
    )


# --- mean and std, folders, the real data sets


def assert_normalised(dataset: Dataset, tolerance: float) -> None:
    """The constants are those of the training images, to the digits they are printed with."""
    scaled = dataset.train.x[:5_000].float() / 255
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.tensor(dataset.mean), atol=tolerance, rtol=0)
    torch.testing.assert_close(scaled.std((0, 2, 3)), torch.tensor(dataset.std), atol=tolerance, rtol=0)


def test_digits_are_normalised_by_their_own_mean_and_std() -> None:
    assert_normalised(DIGITS, 0.003)


def test_the_folder_is_the_one_named_else_the_variable_else_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_DATA", "from/variable")
    assert data_folder("named") == Path("named")
    assert data_folder(None) == Path("from/variable")
    monkeypatch.setenv("FEDCOMMONS_DATA", "")
    assert data_folder(None) == Path("data")
    monkeypatch.delenv("FEDCOMMONS_DATA")
    assert data_folder(None) == Path("data")
    assert data_folder("~/x") == Path.home() / "x"


@pytest.mark.parametrize("name", ["mnist", "fmnist", "cifar10", "cifar100"])
def test_data_that_is_not_there_is_said_in_one_sentence_with_folder_and_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        load(Data(name=name, dir=str(tmp_path / "none")))
    message = str(raised.value)
    assert f"data set {name} is not there" in message
    assert str(tmp_path / "none" / FOLDERS[name]) in message
    assert f"--dataset {name} --data-dir {tmp_path / 'none'} --download" in message
    assert "\n" not in message
    assert message.count(". ") == 0
    assert message.endswith(".")
    assert list(tmp_path.iterdir()) == []  # asking makes no folder


@pytest.fixture(scope="module")
def real() -> Iterator[dict[str, Dataset]]:
    """The real data sets, each loaded once, by the first test that asks."""
    loaded: dict[str, Dataset] = {}
    yield loaded
    loaded.clear()


def real_dataset(loaded: dict[str, Dataset], name: str) -> Dataset:
    """The real data set, or a skip that says what is missing."""
    folder = REAL / FOLDERS[name]
    if not folder.exists():
        pytest.skip(f"no real {name}: {folder} does not exist (FEDCOMMONS_DATA names another folder)")
    if name not in loaded:
        loaded[name] = load(Data(name=name, dir=str(REAL)))
    return loaded[name]


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("mnist", (1, 28, 28), [54_000, 6_000, 10_000]),
        ("fmnist", (1, 28, 28), [54_000, 6_000, 10_000]),
        ("cifar10", (3, 32, 32), [45_000, 5_000, 10_000]),
    ],
)
@pytest.mark.long
def test_real_data_sets_have_their_published_shapes_counts_and_statistics(
    name: str, shape: tuple[int, ...], sizes: list[int], real: dict[str, Dataset]
) -> None:
    dataset = real_dataset(real, name)
    assert dataset.shape == shape
    assert [len(p) for p in parts(dataset)] == sizes
    for part in parts(dataset):
        assert part.x.dtype == torch.uint8
        assert part.x.is_contiguous()
        assert part.y.dtype == torch.int64
    assert np.bincount(dataset.test.y.numpy()).shape == (dataset.n_classes,)
    assert dataset.augment == dataset.flip == (name == "cifar10")
    if name == "cifar10":  # the authors' std, 0.20, is the mean of each image's own, not that of all pixels, 0.25
        some = dataset.train.x[:5_000].float().div_(255)
        torch.testing.assert_close(some.std((2, 3)).mean(0), torch.tensor(dataset.std), atol=0.005, rtol=0)
        dataset = replace(dataset, std=tuple(some.std((0, 2, 3)).tolist()))
    assert_normalised(dataset, 0.01)


def test_real_test_images_are_those_of_the_published_files(real: dict[str, Dataset]) -> None:
    # the first test images are a 7 (MNIST), an ankle boot = 9 (Fashion-MNIST), a cat = 3 (CIFAR-10)
    for name, label in (("mnist", 7), ("fmnist", 9), ("cifar10", 3)):
        assert real_dataset(real, name).test.y[0] == label


# --- clients


def test_a_client_gets_the_rows_that_are_its_own() -> None:
    clients = Clients(store(6), [np.array([4, 0]), np.array([1, 2, 5])])
    assert len(clients) == 2
    assert clients.sizes == [2, 3]
    client = clients[1]
    assert client.x.flatten().tolist() == [1, 2, 5]
    assert client.y.tolist() == [1, 2, 2]
    assert client.ids is not None
    assert client.ids.tolist() == [1, 2, 5]
    assert client.n_own == len(client) == 3
    assert [c.x.flatten().tolist() for c in clients] == [[4, 0], [1, 2, 5]]


def test_a_client_that_trains_does_not_write_into_the_store() -> None:
    clients = Clients(store(4), [np.array([1, 2])])
    clients[0].x.zero_()
    assert clients.store.x.flatten().tolist() == [0, 1, 2, 3]


def test_indexing_gathers_that_clients_rows_only() -> None:
    # the other clients' rows cannot be gathered: whoever touched them would raise
    nowhere = np.array([10**9])
    clients = Clients(store(3), [nowhere, np.array([2, 0]), nowhere])
    assert clients[1].x.flatten().tolist() == [2, 0]
    assert clients[1:2][0].x.flatten().tolist() == [2, 0]
    assert clients.sizes == [1, 2, 1]
    assert len(clients.on(clients.store)[1]) == 2
    with pytest.raises(IndexError):
        clients[0]


def test_a_million_clients_cost_no_copy_of_the_data() -> None:
    rows = Rows(torch.arange(3), np.zeros(1_000_000, int), np.full(1_000_000, 2))
    clients = Clients(store(3), rows)
    assert len(clients) == 1_000_000
    assert clients.rows is rows
    assert clients[999_999].x.flatten().tolist() == [0, 1]
    assert clients[500_000:500_003].store is clients.store


def test_a_slice_of_clients_is_lazy_too_and_keeps_what_is_known_of_each() -> None:
    clients = Clients(store(6), [np.array([0]), np.array([1, 2]), np.array([3, 4, 5])], n_own=[1, 1, 2])
    some = clients[1:]
    assert isinstance(some, Clients)
    assert some.store is clients.store
    assert [c.x.flatten().tolist() for c in some] == [[1, 2], [3, 4, 5]]
    assert [c.n_own for c in some] == [1, 2]
    assert [c.n_own for c in clients.on(clients.store)] == [1, 1, 2]


# --- augmentation


def flip_and_crop_one_by_one(x: Tensor, generator: torch.Generator, padding: int) -> Tensor:
    """The same draws, then one image at a time: pad, crop, mirror."""
    b, c, h, w = x.shape
    flip = torch.rand(b, generator=generator) < 0.5
    top = torch.randint(2 * padding + 1, (b, 1), generator=generator)
    left = torch.randint(2 * padding + 1, (b, 1), generator=generator)
    result = torch.empty_like(x)
    for i in range(b):
        padded = torch.zeros(c, h + 2 * padding, w + 2 * padding, dtype=x.dtype)
        padded[:, padding : padding + h, padding : padding + w] = x[i]
        crop = padded[:, top[i] : top[i] + h, left[i] : left[i] + w]
        result[i] = crop.flip(-1) if flip[i] else crop
    return result


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(32, 3, 8, 8), (16, 1, 5, 9), (1, 3, 32, 32)], ids=str)
def test_flip_and_crop_equals_the_loop_over_images(shape: tuple[int, ...], dtype: torch.dtype, padding: int) -> None:
    x = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    fast = flip_and_crop(x, torch.Generator().manual_seed(5), padding)
    assert torch.equal(fast, flip_and_crop_one_by_one(x, torch.Generator().manual_seed(5), padding))
    assert fast.shape == x.shape
    assert fast.dtype == dtype
    assert fast.stride() == torch.empty(shape).stride()  # is_contiguous() ignores the stride of a single channel
    assert torch.equal(x, before)


def test_flip_and_crop_draws_from_the_generator_handed_in_and_from_no_other() -> None:
    x = DIGITS.train.x[:64]
    torch.manual_seed(0)
    first = flip_and_crop(x, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    assert torch.equal(first, flip_and_crop(x, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, flip_and_crop(x, torch.Generator().manual_seed(6)))


def test_half_of_the_images_are_mirrored_and_every_shift_occurs() -> None:
    n, padding = 4000, 1
    x = torch.zeros(n, 1, 3, 3, dtype=torch.uint8)
    x[:, 0, 1, 1], x[:, 0, 1, 0] = 2, 1  # a bright centre with its left neighbour marked
    out = flip_and_crop(x, torch.Generator().manual_seed(0), padding)[:, 0]
    at = (out == 2).flatten(1).int().argmax(1)  # where the centre went
    assert (out == 2).flatten(1).sum(1).eq(1).all()  # a shift by one never loses it
    shares = torch.bincount(at, minlength=9) / n
    assert (shares - 1 / 9).abs().max() < 4 * (1 / 9 * 8 / 9 / n) ** 0.5
    middle = out[(at % 3) == 1]  # not shifted sideways: the mark tells whether it was mirrored
    mirrored = (middle == 1).any(1)[:, 2].float().mean()
    assert abs(mirrored - 0.5) < 4 * 0.5 / len(middle) ** 0.5
