"""The package's data sets, their splits and folders, augmentation, and sprites, drawn or of the published file."""

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcommons import UserError, experiment
from fedcommons.config.dotted import override
from fedcommons.config.schema import Data
from fedcommons.data import datasets, sprites
from fedcommons.data.datasets import data_folder
from fedcommons.data.examples import Dataset, Examples, without_images
from fedcommons.data.sprites import EVERY, FILE, SIZES, dsprites, quadrant_shape, render, split
from fedcommons.data.transforms import flip_and_crop
from fedcommons.runs.build import build, dataset_of, load, module_of
from lightning_modules import Classifier

DIGITS = load(Data())
FOLDERS = {"mnist": "MNIST/raw", "fmnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-py",
           "cifar100": "cifar-100-python"}  # fmt: skip
REAL = Path(os.environ.get("FEDCOMMONS_DATA") or Path(__file__).parents[3] / "shared" / "data")


def parts(dataset: Dataset) -> list[Examples]:
    return [dataset.train, dataset.validation, dataset.test]


def images(examples: Examples) -> list[bytes]:
    return [x.numpy().tobytes() for x in examples.x]


def assert_normalised(dataset: Dataset, tolerance: float) -> None:
    scaled = dataset.train.x[:5_000].float() / 255
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.tensor(dataset.mean), atol=tolerance, rtol=0)
    torch.testing.assert_close(scaled.std((0, 2, 3)), torch.tensor(dataset.std), atol=tolerance, rtol=0)


def test_digits_are_split_into_train_validation_and_test() -> None:
    from sklearn.datasets import load_digits

    # 20 % of 1,797 are the test set, 10 % of the rest the validation set, both rounded down
    assert [len(p) for p in parts(DIGITS)] == [1295, 143, 359]
    for part in parts(DIGITS):
        assert (part.x.dtype, part.y.dtype) == (torch.uint8, torch.int64)
        assert part.x.shape[1:] == DIGITS.shape == (1, 8, 8)
        assert set(part.y.tolist()) == set(range(10))
    assert DIGITS.train.x.max() == 255  # 16 grey values, brought to the full range
    pixels, labels = load_digits(return_X_y=True)
    wanted = sorted((np.rint(p * 255 / 16).astype(np.uint8).tobytes(), y) for p, y in zip(pixels, labels, strict=True))
    pairs = [pair for part in parts(DIGITS) for pair in zip(images(part), part.y.tolist(), strict=True)]
    assert sorted(pairs) == wanted
    assert_normalised(DIGITS, 0.003)
    facts = without_images(DIGITS)  # they travel
    assert (facts.shape, [len(p) for p in parts(facts)]) == (DIGITS.shape, [0, 0, 0])


def test_splits_are_the_same_whatever_else_the_config_or_the_process_draws() -> None:
    torch.manual_seed(1)
    for data in (Data(limit=100), Data(augment=True), Data(dir="elsewhere")):
        again = load(data)
        assert (again.augment, again.flip) == (data.augment or False, False)  # generators mirror no digit
        assert torch.equal(again.test.x, DIGITS.test.x)
        assert torch.equal(again.validation.x, DIGITS.validation.x)
    for share, n in ((0.0, 0), (0.25, 359), (0.5, 719)):
        dataset = load(Data(validation=share))
        assert [len(p) for p in parts(dataset)] == [1438 - n, n, 359]
        assert torch.equal(dataset.test.x, DIGITS.test.x)


@pytest.mark.parametrize("fields", [{}, {"validation_from": "last"}, {"limit": 200}, {"validation": 0.0}])
def test_public_images_belong_to_no_other_part_and_move_no_image_of_another_part(fields: Mapping[str, Any]) -> None:
    plain, dataset = load(Data(**fields)), load(Data(**fields, public=0.25))
    public, n = dataset.public, len(dataset.train)
    assert public is not None
    assert (len(public), dataset.n_public, plain.n_public, int(public.y.abs().sum())) == (359, 359, 0, 0)
    assert n == (200 if "limit" in fields else len(plain.train) - 359)
    assert dataset.test.x.equal(plain.test.x)
    assert dataset.validation.x.equal(plain.validation.x)
    assert set(images(dataset.train)) <= set(images(plain.train))
    if "limit" in fields:
        assert dataset.train.x.equal(plain.train.x)
    else:
        assert sorted(images(dataset.train) + images(public)) == sorted(images(plain.train))
    assert dataset.digest != plain.digest
    assert without_images(dataset).public is None


def test_with_split_random_the_seed_draws_test_and_validation_images() -> None:
    config = experiment("smoke", "digits", {"data.split": "random", "data.limit": None})
    zero, again, other = (dataset_of(override(config, {"seed": seed})) for seed in (0, 0, 1))
    assert zero.digest == again.digest != other.digest
    for dataset in (zero, other):
        assert [len(part) for part in parts(dataset)] == [len(part) for part in parts(DIGITS)]
        every, shared = (sorted(chain(*map(images, parts(each)))) for each in (dataset, DIGITS))
        assert every == shared
    assert len({*images(zero.test)} & {*images(other.test)}) < 120  # a fifth of 359, were the draws independent
    assert {build(override(config, {"data.split": "fixed", "seed": seed})).dataset.digest for seed in (0, 1)} == {
        dataset_of(override(config, {"data.split": "fixed"})).digest
    }
    assert build(override(config, {"seed": 1})).dataset.digest == other.digest
    x, y = torch.arange(100)[:, None], torch.arange(100) % 2
    for returned, is_drawn in (((x, y), True), (((x, y), (x + 100, y)), False)):
        sets = [datasets.load("mine", lambda returned=returned: returned, split_seed=seed) for seed in (0, 1)]
        assert sets[0].test.x.equal(sets[1].test.x) == (not is_drawn)
        assert not sets[0].validation.x.equal(sets[1].validation.x)


def test_a_limit_keeps_that_many_training_images_and_smaller_limits_a_part_of_them() -> None:
    few, more = (load(Data(limit=n)) for n in (50, 200))
    assert (len(few.train), len(more.train)) == (50, 200)
    assert set(images(few.train)) <= set(images(more.train)) <= set(images(DIGITS.train))
    assert len(set(few.train.y.tolist())) > 5  # drawn at random, not the first rows of one class
    assert load(Data(limit=1295)).train.x.equal(DIGITS.train.x)
    with pytest.raises(UserError, match=r"data\.limit .*1295 .*got 1296"):
        load(Data(limit=1296))
    with pytest.raises(UserError, match="cifar10"):
        load(Data(name="cifar-10"))


def test_standardise_is_for_images_and_without_it_models_see_pixels_as_they_are() -> None:
    def numbers() -> tuple[Any, Any]:
        return torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).numpy(), [0, 1] * 20

    assert datasets.load("numbers", numbers).mean
    with pytest.raises(UserError, match=r"data.standardise .*images"):
        datasets.load("numbers", numbers, standardise=False)
    config = experiment("smoke", "digits", {"data.standardise": False, "model.name": "linear"})
    data = load(config.data)
    assert (data.mean, data.std) == ((0.0,), (1.0,))
    module, x = module_of(config)(data), DIGITS.test.x[:5]
    assert isinstance(module, Classifier)
    torch.testing.assert_close(module(x), module.network(x.float() / 255))


def test_the_folder_is_the_one_named_else_the_variable_else_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCOMMONS_DATA", "from/variable")
    assert data_folder("named") == Path("named")
    assert data_folder(None) == Path("from/variable")
    monkeypatch.setenv("FEDCOMMONS_DATA", "")
    assert data_folder(None) == Path("data")
    assert data_folder("~/x") == Path.home() / "x"


@pytest.mark.parametrize("name", FOLDERS)
def test_data_that_is_not_there_is_reported_with_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"data set {name} is not there.*{FOLDERS[name]}.*--download"):
        load(Data(name=name, dir=str(tmp_path / "none")))
    assert list(tmp_path.iterdir()) == []  # no folder is created


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape", "sizes", "first"),  # the first test images: a 7, an ankle boot = 9, a cat = 3
    [
        ("mnist", (1, 28, 28), [54_000, 6_000, 10_000], 7),
        ("fmnist", (1, 28, 28), [54_000, 6_000, 10_000], 9),
        ("cifar10", (3, 32, 32), [45_000, 5_000, 10_000], 3),
    ],
)
def test_real_data_sets_have_their_published_shapes_counts_and_statistics(
    name: str, shape: tuple[int, ...], sizes: list[int], first: int
) -> None:
    if not (folder := REAL / FOLDERS[name]).exists():
        pytest.skip(f"no real {name}: {folder} does not exist (FEDCOMMONS_DATA names another folder)")
    dataset = load(Data(name=name, dir=str(REAL)))
    assert (dataset.shape, [len(p) for p in parts(dataset)]) == (shape, sizes)
    assert dataset.test.y[0] == first
    assert np.bincount(dataset.test.y.numpy()).shape == (dataset.n_classes,)
    assert dataset.augment == dataset.flip == (name == "cifar10")
    if name == "cifar10":  # the authors' std, 0.20, is the mean of each image's own, not that of all pixels, 0.25
        some = dataset.train.x[:5_000].float().div_(255)
        torch.testing.assert_close(some.std((2, 3)).mean(0), torch.tensor(dataset.std), atol=0.005, rtol=0)
        dataset = replace(dataset, std=tuple(some.std((0, 2, 3)).tolist()))
    assert_normalised(dataset, 0.01)


def flip_and_crop_one_by_one(x: Tensor, generator: torch.Generator, padding: int) -> Tensor:
    """Pad, crop and mirror one image at a time, with the same draws."""
    b, c, h, w = x.shape
    flip = torch.rand(b, generator=generator) < 0.5
    row = torch.randint(2 * padding + 1, (b, 1), generator=generator)
    column = torch.randint(2 * padding + 1, (b, 1), generator=generator)
    result = torch.empty_like(x)
    for i in range(b):
        padded = torch.zeros(c, h + 2 * padding, w + 2 * padding, dtype=x.dtype)
        padded[:, padding : padding + h, padding : padding + w] = x[i]
        crop = padded[:, row[i] : row[i] + h, column[i] : column[i] + w]
        result[i] = crop.flip(-1) if flip[i] else crop
    return result


@pytest.mark.parametrize("shape", [(32, 3, 8, 8), (16, 1, 5, 9)], ids=str)
def test_flip_and_crop_equals_the_loop_over_images(shape: tuple[int, ...]) -> None:
    for dtype, padding in product((torch.uint8, torch.float32), (0, 4)):
        x = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        torch.manual_seed(padding)
        fast = flip_and_crop(x, torch.Generator().manual_seed(5), padding)
        assert torch.equal(fast, flip_and_crop_one_by_one(x, torch.Generator().manual_seed(5), padding))
        assert fast.stride() == torch.empty(shape).stride()  # is_contiguous() ignores the stride of a single channel


EVERYTHING = dict(zip(SIZES, np.unravel_index(np.arange(EVERY), tuple(SIZES.values())), strict=True))
SHARE = np.random.default_rng(0).permutation(EVERY)[:600]  # of all combinations


def sprite(**values: int) -> Mapping[str, np.ndarray]:
    middle = {"shape": 0, "scale": 5, "orientation": 0, "x": 16, "y": 16}
    return {name: np.array([value]) for name, value in {**middle, **values}.items()}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A file in the dSprites format: 600 rendered sprites of 32 x 32 pixels; the published images have 64 x 64."""
    classes = np.stack([np.zeros(600, int), *(EVERYTHING[name][SHARE] for name in SIZES)], 1)
    pixels = (render({name: EVERYTHING[name][SHARE] for name in SIZES}, 32) > 127).astype(np.uint8)
    np.savez_compressed(tmp_path / FILE, imgs=pixels, latents_classes=classes, metadata=np.array("of the file"))
    return tmp_path


@pytest.mark.parametrize("images", [24, 100, 1205])
def test_each_quadrant_and_shape_is_as_frequent(images: int) -> None:
    cells = quadrant_shape(EVERYTHING)
    train, test = split(cells, images, "mine")
    assert len(train) + len(test) == images
    counts = np.bincount(cells[np.concatenate([train, test])], minlength=12)
    assert counts.max() - counts.min() <= 1
    assert np.bincount(cells[test], minlength=12).min() >= 1
    assert not np.array_equal(split(cells, images, "others")[0], train)


@pytest.mark.parametrize("shape", range(3))
def test_a_sprite_is_whole_and_has_its_place(shape: int) -> None:
    for orientation, scale in product((0, 7, 30), (0, 5)):
        x = render(sprite(shape=shape, scale=scale, orientation=orientation, x=31, y=0), 64)[0] / 255
        assert x.sum() / 64**2 == pytest.approx((sprites.SIZE * (5 + scale) / 10) ** 2, rel=0.03)
        place = [np.average((np.arange(64) + 0.5) / 64, weights=x.sum(axis)) for axis in (1, 0)]
        assert place == pytest.approx([sprites.MARGIN, 1 - sprites.MARGIN], abs=0.003)


def test_drawn_sprites_are_a_data_set_for_twelve_clients() -> None:
    values = {"images": 240, "side": 8}
    fields = {"data": "procedural_sprites", **{f"data.{n}": v for n, v in values.items()}, "data.validation": 0.0,
              "partition": "by_factor", "partition.factor": "quadrant_shape", "partition.n_clients": 12}  # fmt: skip
    prepared = build(experiment("small", "procedural_sprites", fields))
    assert [len(rows) for rows in prepared.partition.rows] == [18] * 12
    assert ((prepared.partition.class_counts > 0).sum(1) == 1).all()  # pyright: ignore[reportOptionalOperand]
    train = prepared.dataset.train
    assert (train.factors["shape"] == train.y).all()
    assert len(prepared.dataset.test) == 24
    zero, other = (sprites.procedural_sprites(8, 240, seed) for seed in (0, 1))
    assert not zero.test.x.equal(other.test.x)
    every = [sorted(images(each.train) + images(each.test)) for each in (zero, other)]
    assert every[0] == every[1] == sorted(chain(*map(images, parts(prepared.dataset))))


def test_the_published_file_is_read(published: Path) -> None:
    fields = {"data.dir": str(published), "data.side": 32, "data.images": 240}
    data = load(experiment("small", "dsprites", fields).data)
    assert (len(data.train) + len(data.validation), len(data.test), data.n_classes) == (216, 24, 3)
    assert set(data.train.x.unique().tolist()) == {0, 255}
    half, whole = (dsprites(published, side=side, images=240) for side in (16, 32))
    seeds = [dsprites(published, side=32, images=240, split_seed=seed) for seed in (0, 1)]
    assert not seeds[0].test.x.equal(seeds[1].test.x)
    blocks = whole.train.x.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)).round()
    assert (half.train.x.float() - blocks).abs().max() <= 1


def test_another_file_and_what_it_does_not_have_are_refused(published: Path, tmp_path: Path) -> None:
    for fields, words in (
        ({}, r"data\.side .*32 .*got 64"),
        ({"side": 32, "images": 601}, r"data\.images .*600 .*got 601"),
        ({"side": 32, "images": 600}, "images of each quadrant"),  # they are not equally frequent there
    ):
        with pytest.raises(UserError, match=words):
            dsprites(published, **fields)  # pyright: ignore[reportArgumentType]
    classes, black = np.zeros((9, 6), int), np.zeros((9, 64, 64), np.uint8)
    for imgs, latents_classes, words in (
        (None, classes, "no array imgs"), (black[:, :, :3], classes, "imgs must be"),
        (black + 2, classes, "imgs must be"), (black, classes[:3], "latents_classes must be"),
        (black, classes + 9, "latents_classes must be"), (np.array([None] * 9), classes, "is damaged"),
    ):  # fmt: skip
        arrays: dict[str, Any] = {"imgs": imgs, "latents_classes": latents_classes}
        np.savez(tmp_path / FILE, **{name: array for name, array in arrays.items() if array is not None})
        with pytest.raises(UserError, match=words):
            dsprites(tmp_path)
