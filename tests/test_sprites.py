"""dSprites by its npz, and drawn sprites: factors, split, shapes."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcommons import experiment
from fedcommons.data import sprites
from fedcommons.data.groups import by_factor
from fedcommons.data.sprites import EVERY, FILE, SIZES, dsprites, procedural_sprites, quadrant_shape, render, split
from fedcommons.errors import UserError
from fedcommons.runs import inputs
from fedcommons.runs.build import prepare

EVERYTHING = dict(zip(SIZES, np.unravel_index(np.arange(EVERY), tuple(SIZES.values())), strict=True))
SHARE = np.random.default_rng(0).permutation(EVERY)[:600]  # of all combinations


def one(**values: int) -> Mapping[str, np.ndarray]:
    """The factors of one image; those that are not given are in the middle."""
    middle = {"shape": 0, "scale": 5, "orientation": 0, "x": 16, "y": 16}
    return {name: np.array([value]) for name, value in {**middle, **values}.items()}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A file as the published one, of 600 of its images, with half the pixels."""
    classes = np.stack([np.zeros(600, int), *(EVERYTHING[name][SHARE] for name in SIZES)], 1)
    pixels = (render({name: EVERYTHING[name][SHARE] for name in SIZES}, 32) > 127).astype(np.uint8)
    np.savez_compressed(tmp_path / FILE, imgs=pixels, latents_classes=classes, metadata=np.array("of the file"))
    return tmp_path


@pytest.mark.long
def test_the_papers_clients_by_counting() -> None:
    cells = quadrant_shape(EVERYTHING)
    train, test = split(cells, None, "dsprites")
    assert len(np.intersect1d(train, test)) == 0
    assert (np.bincount(cells[test]) == [6144] * 12).all()
    clients = by_factor({"quadrant_shape": cells[train]}, np.random.default_rng(0))
    assert [len(rows) for rows in clients] == [55_296] * 12
    for client, rows in enumerate(clients):
        there = {name: values[train][rows] for name, values in EVERYTHING.items()}
        assert set(there["shape"]) == {client % 3}
        assert set(there["x"] // 16) == {client // 3 % 2}
        assert set(there["y"] // 16) == {client // 6}


@pytest.mark.parametrize("images", [24, 100, 1205])
def test_each_quadrant_and_shape_is_as_frequent(images: int) -> None:
    cells = quadrant_shape(EVERYTHING)
    train, test = split(cells, images, "mine")
    assert len(train) + len(test) == images
    counts = np.bincount(cells[np.concatenate([train, test])], minlength=12)
    assert counts.max() - counts.min() <= 1
    assert np.bincount(cells[test], minlength=12).min() >= 1
    again, _ = split(cells, images, "mine")
    other, _ = split(cells, images, "others")
    assert (again == train).all()
    assert not np.array_equal(other, train)


@pytest.mark.parametrize("shape", range(3))
def test_a_sprite_is_whole_and_has_its_place(shape: int) -> None:
    for orientation, scale in product((0, 7, 30), (0, 5)):
        x = render(one(shape=shape, scale=scale, orientation=orientation, x=31, y=0), 64)[0] / 255
        assert x.sum() / 64**2 == pytest.approx((sprites.SIZE * (5 + scale) / 10) ** 2, rel=0.03)
        place = [np.average((np.arange(64) + 0.5) / 64, weights=x.sum(axis)) for axis in (1, 0)]
        assert place == pytest.approx([sprites.MARGIN, 1 - sprites.MARGIN], abs=0.003)


def test_a_turn_of_a_quarter_turns_the_image_and_a_square_looks_as_before() -> None:
    middle = render({**one(shape=2, orientation=0), "x": np.array([15.5]), "y": np.array([15.5])}, 32)[0]
    turned = render({**one(shape=2, orientation=10), "x": np.array([15.5]), "y": np.array([15.5])}, 32)[0]
    assert np.abs(np.rot90(middle, -1).astype(int) - turned).max() <= 64  # points on an edge are rounded
    assert np.abs(np.rot90(middle).astype(int) - turned).max() == 255
    square, quarter = (render(one(orientation=k), 32)[0].astype(int) for k in (0, 10))
    assert np.abs(square - quarter).max() <= 64


def test_drawn_sprites_are_a_data_set_for_twelve_clients() -> None:
    values = {"images": 240, "side": 8}
    fields = {"data": "procedural_sprites", **{f"data.{n}": v for n, v in values.items()}, "data.validation": 0.0,
              "partition": "by_factor", "partition.factor": "quadrant_shape", "partition.n_clients": 12}  # fmt: skip
    prepared = prepare(experiment("small", "procedural_sprites", fields))
    assert [len(rows) for rows in prepared.partition.rows] == [18] * 12
    assert ((prepared.partition.class_counts > 0).sum(1) == 1).all()  # pyright: ignore[reportOptionalOperand]
    train = prepared.dataset.train
    assert set(train.factors) == {*SIZES, "quadrant_shape"}
    assert (train.factors["shape"] == train.y).all()
    assert train.x.shape[1:] == (1, 8, 8)
    assert len(prepared.dataset.test) == 24
    first, again = (procedural_sprites(8, 240) for _ in range(2))  # they follow from their numbers
    assert first.train.x.equal(again.train.x)
    assert first.test.x.equal(again.test.x)


def test_the_published_file_is_read(published: Path) -> None:
    fields = {"data.dir": str(published), "data.side": 32, "data.images": 240}
    data = inputs.load(experiment("small", "dsprites", fields).data)
    assert (len(data.train) + len(data.validation), len(data.test), data.n_classes) == (216, 24, 3)
    assert set(data.train.x.unique().tolist()) == {0, 255}
    half = dsprites(published, side=16, images=240)
    whole = dsprites(published, str(published / FILE), side=32, images=240)
    blocks = whole.train.x.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)).round()
    assert (half.train.x.float() - blocks).abs().max() <= 1
    assert half.train.y.equal(whole.train.y)


def test_another_file_and_what_it_does_not_have_are_refused(published: Path, tmp_path: Path) -> None:
    for fields, words in (
        ({}, r"data\.side .*32 .*got 64"),
        ({"side": 32, "images": 601}, r"data\.images .*600 .*got 601"),
        ({"side": 32, "images": 600}, "images of each quadrant"),  # they are not equally frequent there
    ):
        with pytest.raises(UserError, match=words):
            dsprites(published, **fields)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="is not there"):
        dsprites(tmp_path / "elsewhere")
    classes, black = np.zeros((9, 6), int), np.zeros((9, 64, 64), np.uint8)
    for imgs, latents_classes, words in (
        (None, classes, "no array imgs"), (black, None, "no array latents_classes"),
        (black[:, :, :3], classes, "imgs must be"), (black + 2, classes, "imgs must be"),
        (black.astype(float), classes, "imgs must be"), (black, classes[:3], "latents_classes must be"),
        (black, classes + 9, "latents_classes must be"), (np.array([None] * 9), classes, "is damaged"),
    ):  # fmt: skip
        arrays: dict[str, Any] = {"imgs": imgs, "latents_classes": latents_classes}
        np.savez(tmp_path / FILE, **{name: array for name, array in arrays.items() if array is not None})
        with pytest.raises(UserError, match=words):
            dsprites(tmp_path)
    (tmp_path / FILE).write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(UserError, match="is damaged"):
        dsprites(tmp_path)
