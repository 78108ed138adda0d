"""dSprites (Matthey et al. 2017, github.com/google-deepmind/dsprites-dataset), and drawn sprites of the same factors.

Factors, each numbered from 0: shape (square, ellipse, heart), scale (6), orientation (40), x (32, from the left), y
(32, from the top); every combination once is 737,280 images. The label is the shape. ``quadrant_shape``: 3 times the
quadrant (top left, top right, bottom left, bottom right) plus the shape, so ``by_factor`` deals 12 clients as Fedssyn
does (appendix A.4).

Images are drawn from a fixed order, keyed by the data set's name, in which the 12 are equally frequent; a tenth of each
is the test set. So of all 737,280 each of the 12 has 55,296 training images and 6,144 test images.
"""

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from fedcommons.data.examples import Examples, Source
from fedcommons.errors import UserError
from fedcommons.seeding import numpy_generator
from fedcommons.storage.paths import user_path

SIZES = {"shape": 3, "scale": 6, "orientation": 40, "x": 32, "y": 32}
EVERY = 3 * 6 * 40 * 32 * 32
CELLS = 12
FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
TEST = 0.1
"""Share of the images of each quadrant and shape that are the test set."""

SIZE, MARGIN = 0.34, 0.28
"""Of drawn sprites, in sides of the image: the root of the area at the largest scale, and from the edge to a centre."""
HEART = 3.661972723
"""Area of (u^2 + v^2 - 1)^3 <= u^2 v^3."""
MIDDLE = 0.2935
"""Height of that heart's centre of mass."""
FINE = 4
"""A drawn pixel is the mean of as many squared points."""

Factors = Mapping[str, np.ndarray]
"""Each factor's values, (n,), by name."""

Images = Annotated[int | None, "[24, 737280]"]
Side = Annotated[int, "[8, 1024]"]


def dsprites(dir: Path, file: str | None = None, side: Side = 64, images: Images = None) -> Source:
    """The published dSprites: 737,280 binary images of 64x64.

    Args:
        file: path of the npz; default: its published name in data.dir
        side: pixels of a side, 64 or a part of it, of which a pixel is the mean of the published ones
        images: how many are drawn, every quadrant and shape as often; default: all

    Raises:
        UserError: the file is not there, lacks its arrays, or has fewer images or pixels.
    """
    path = user_path("data.file", file) if file else dir / FILE
    pixels, classes = _read(path)
    if pixels.shape[1] % side:
        whole = pixels.shape[1]
        raise UserError(f"data.side must divide the {whole} pixels of a side that {path} has, got {side}.")
    if images is not None and images > len(pixels):
        raise UserError(f"data.images must be at most the {len(pixels):,} images that {path} has, got {images}.")
    factors = dict(zip(SIZES, classes[:, 1:].T, strict=True))  # the first is the colour, which is white
    return _source("dsprites", factors, images, lambda rows: _coarse(pixels[rows], side))


def procedural_sprites(side: Side = 32, images: Images = 12000) -> Source:
    """Sprites of dSprites' factors that are drawn here, not dSprites: other sizes and edges, which are grey.

    The three shapes have the same area. At the largest scale its root is 0.34 of the side, at the smallest half of it.

    Args:
        side: pixels of a side
        images: how many are drawn, every quadrant and shape as often; default: 12000
    """
    everything = np.unravel_index(np.arange(EVERY), tuple(SIZES.values()))
    factors = dict(zip(SIZES, everything, strict=True))
    return _source(
        "procedural_sprites", factors, images, lambda rows: render({n: f[rows] for n, f in factors.items()}, side)
    )


def quadrant_shape(factors: Factors) -> np.ndarray:
    """(n,) in 0..11: 3 times the quadrant plus the shape."""
    half = SIZES["x"] // 2
    return 3 * (2 * (factors["y"] >= half) + (factors["x"] >= half)) + factors["shape"]


def split(cells: np.ndarray, images: int | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows of training and of test, in order; cells: (n,) in 0..11; images: how many of all, an equal part of each.

    Raises:
        UserError: a cell has fewer than its part.
    """
    train, test = [], []
    for cell in range(CELLS):
        there = np.flatnonzero(cells == cell)
        wanted = len(there) if images is None else images // CELLS + (cell < images % CELLS)
        if not 2 <= wanted <= len(there):
            raise UserError(
                f"data set {name}: {wanted} images of each quadrant and shape are wanted, at least 2, and of one there "
                f"are {len(there)}."
            )
        drawn = there[numpy_generator("sprites", name, cell).permutation(len(there))[:wanted]]
        n_test = max(1, int(TEST * wanted))
        test.append(drawn[:n_test])
        train.append(drawn[n_test:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _source(name: str, factors: Factors, images: int | None, pixels: Callable[[np.ndarray], np.ndarray]) -> Source:
    cells = quadrant_shape(factors)
    parts = []
    for rows in split(cells, images, name):
        of = {**factors, "quadrant_shape": cells}
        known = {which: torch.from_numpy(values[rows].astype(np.int64)) for which, values in of.items()}
        parts.append(Examples(torch.from_numpy(pixels(rows)).unsqueeze(1), known["shape"], factors=known))
    train, test = parts
    x = train.x[:: max(1, len(train) // 5000)].float() / 255
    return Source(train, test, 3, (float(x.mean()),), (float(x.std()),))


def _coarse(pixels: np.ndarray, side: int) -> np.ndarray:
    """0 and 1 (n, S, S) as 0..255 (n, side, side), means over squares."""
    each = pixels.shape[1] // side
    if each == 1:
        return pixels * np.uint8(255)
    sums = pixels.reshape(len(pixels), side, each, side, each).sum((2, 4), dtype=np.uint32)
    return np.rint(sums * (255 / each**2)).astype(np.uint8)


def render(factors: Factors, side: int) -> np.ndarray:
    """(n, side, side) uint8: white sprites on black, for these factors (n,) by name.

    Orientation k is a turn by 2 pi k/40; the centre goes in equal steps from ``MARGIN`` to 1 - ``MARGIN``.
    """
    pixels = np.empty((len(factors["shape"]), side, side), np.uint8)
    places = ((np.arange(FINE * side) + 0.5) / (FINE * side)).astype(np.float32)
    for shape, inside in enumerate((_square, _ellipse, _heart)):
        of_shape = np.flatnonzero(factors["shape"] == shape)
        for rows in np.array_split(of_shape, len(of_shape) // 128 + 1):
            some = {name: values[rows, None, None].astype(np.float32) for name, values in factors.items()}
            root = SIZE * (5 + some["scale"]) / 10  # of the area
            x, y = (MARGIN + (1 - 2 * MARGIN) * some[name] / 31 for name in ("x", "y"))
            right, up = places[None, None, :] - x, y - places[None, :, None]
            turn = 2 * np.pi * some["orientation"] / 40
            cos, sin = np.cos(turn) / root, np.sin(turn) / root
            points = inside(right * cos - up * sin, right * sin + up * cos)
            means = points.reshape(-1, side, FINE, side, FINE).sum((2, 4), dtype=np.float32) / FINE**2
            pixels[rows] = np.rint(255 * means).astype(np.uint8)
    return pixels


# Whether points lie in a shape of area 1 around 0; u to the right, v up.


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(abs(u), abs(v)) <= 0.5


def _ellipse(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return u * u / 4 + v * v <= 1 / (2 * np.pi)  # half axes in the ratio 2 to 1


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(a^2 + b^2 - 1)^3 <= a^2 b^3 for a and b in its own measure."""
    aa, b = u * u * HEART, v * HEART**0.5 + MIDDLE
    bb = b * b
    q = aa + bb - 1
    return q * q * q <= aa * bb * b


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, S, S) of 0 and 1, and latent classes (n, 6).

    Raises:
        UserError: there are none.
    """
    there = f"data set dsprites: {os.path.realpath(path)}"
    if not path.is_file():
        raise UserError(
            f"{there} is not there: name the published {FILE} with --data.file, or its folder with --data-dir."
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            if lacking := [name for name in ("imgs", "latents_classes") if name not in found.files]:
                raise UserError(f"{there} has no array {lacking[0]}, so it is not the published file.")
            pixels, classes = found["imgs"], found["latents_classes"]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, MemoryError) as error:
        raise UserError(f"{there} is damaged ({' '.join(str(error).split())[:200]}).") from error
    whole = pixels.ndim == 3 and pixels.dtype == np.uint8 and pixels.shape[1] == pixels.shape[2] and len(pixels)
    if not whole or pixels.max() > 1:
        raise UserError(f"{there} is not the published file: imgs must be (n, side, side) uint8 of 0 and 1.")
    sizes = np.array([1, *SIZES.values()])
    if (
        classes.shape != (len(pixels), 6)
        or classes.dtype.kind not in "iu"
        or (classes < 0).any()
        or (classes >= sizes).any()
    ):
        raise UserError(
            f"{there} is not the published file: latents_classes must be (n, 6) whole numbers of colour, shape, scale, "
            "orientation, x and y."
        )
    return pixels, classes
