"""dSprites (Matthey et al. 2017, github.com/google-deepmind/dsprites-dataset) and sprites rendered from its factors.

Factors, each numbered from 0: shape (square, ellipse, heart), scale (6 values), orientation (40), x (32, from the
left), y (32, from the top). All combinations of values are 737,280 images. The label is the shape.
The factor ``quadrant_shape`` is 3 times the quadrant (top left, top right, bottom left, bottom right) plus the shape.
The partition ``by_factor`` creates one client for each of its 12 values, as Fedssyn does (appendix A.4).

Images are sampled in a random order that depends on the data set's name only, in equal numbers for each of the 12
values of ``quadrant_shape``. A tenth of each value's images belongs to the test set; with ``data.split random``, the
run's seed chooses the tenth. With all 737,280 images, each value has 55,296 training and 6,144 test images.
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
"""Number of combinations of quadrant and shape."""
FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
TEST = 0.1
"""Share of the images of each quadrant and shape that becomes the test set."""

SIZE, MARGIN = 0.34, 0.28
"""Shares of the image side. SIZE: square root of a rendered sprite's area at the largest scale. MARGIN: minimum
distance between a sprite's centre and the image's edge."""
HEART = 3.661972723
"""Area of the heart, the set of points (u, v) with (u^2 + v^2 - 1)^3 <= u^2 v^3."""
MIDDLE = 0.2935
"""Coordinate v of the centre of mass of the heart that ``HEART`` describes; its coordinate u is 0."""
FINE = 4
"""A rendered pixel is the mean of FINE x FINE points inside the pixel."""

Factors = Mapping[str, np.ndarray]
"""The factors of n images: factor name to the values (n,)."""

Images = Annotated[int | None, "[24, 737280]"]
Side = Annotated[int, "[8, 1024]"]


def dsprites(
    dir: Path, file: str | None = None, side: Side = 64, images: Images = None, split_seed: int | None = None
) -> Source:
    """The published dSprites: 737,280 binary images of 64x64.

    Args:
        file: path of the npz file; default: the published file's name in the folder data.dir
        side: pixels of a side, a divisor of 64; each pixel is the mean of a square of the published pixels
        images: number of sampled images, with equal numbers per quadrant and shape; default: all

    Raises:
        UserError: the file is missing or lacks an array, ``side`` does not divide the published images' side, or
            ``images`` is larger than the number of published images.
    """
    path = user_path("data.file", file) if file else dir / FILE
    pixels, classes = _read(path)
    if pixels.shape[1] % side:
        whole = pixels.shape[1]
        raise UserError(f"data.side must divide {whole} (pixels of a side of the images in {path}), got {side}.")
    if images is not None and images > len(pixels):
        raise UserError(f"data.images must be at most the {len(pixels):,} images that {path} has, got {images}.")
    factors = dict(zip(SIZES, classes[:, 1:].T, strict=True))  # without the first factor, the colour (always white)
    return _source("dsprites", factors, images, lambda rows: _coarse(pixels[rows], side), split_seed)


def procedural_sprites(side: Side = 32, images: Images = 12000, split_seed: int | None = None) -> Source:
    """Sprites rendered from the factors of dSprites; areas differ from those in dSprites, and edges are grey.

    The three shapes have equal areas. The square root of the area is 0.34 of the image side at the largest scale, and
    0.17 of the image side at the smallest scale.

    Args:
        side: pixels of a side
        images: number of rendered images, with equal numbers per quadrant and shape; default: 12000
    """
    everything = np.unravel_index(np.arange(EVERY), tuple(SIZES.values()))
    factors = dict(zip(SIZES, everything, strict=True))

    def pixels(rows: np.ndarray) -> np.ndarray:
        return render({name: values[rows] for name, values in factors.items()}, side)

    return _source("procedural_sprites", factors, images, pixels, split_seed)


def quadrant_shape(factors: Factors) -> np.ndarray:
    """Return 3 times the quadrant of the sprite's centre (0 to 3) plus the shape (0 to 2): (n,) in 0..11."""
    half = SIZES["x"] // 2
    return 3 * (2 * (factors["y"] >= half) + (factors["x"] >= half)) + factors["shape"]


def split(
    cells: np.ndarray, images: int | None, name: str, split_seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sample images in equal numbers per quadrant and shape; return the sorted training rows and sorted test rows.

    cells: (n,) each image's ``quadrant_shape``, in 0..11. images: total number of sampled images; None: all images.
    name: name of the data set, which seeds the random choice.
    split_seed: key of the test set's random split; None: the split that runs share by default.

    Raises:
        UserError: fewer than two images per quadrant and shape are requested, or more than there are.
    """
    train, test = [], []
    for cell in range(CELLS):
        available = np.flatnonzero(cells == cell)
        wanted = len(available) if images is None else images // CELLS + (cell < images % CELLS)
        if not 2 <= wanted <= len(available):
            raise UserError(
                f"data set {name} needs at least 2 images of each quadrant and shape, but for one quadrant and shape "
                f"{wanted} are requested (see data.images) and {len(available)} exist."
            )
        chosen = available[numpy_generator("sprites", name, cell).permutation(len(available))[:wanted]]
        if split_seed is not None:
            chosen = numpy_generator("test split", name, split_seed, cell).permutation(chosen)
        n_test = max(1, int(TEST * wanted))
        test.append(chosen[:n_test])
        train.append(chosen[n_test:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _source(
    name: str, factors: Factors, images: int | None, pixels: Callable[[np.ndarray], np.ndarray], split_seed: int | None
) -> Source:
    cells = quadrant_shape(factors)
    parts = []
    for rows in split(cells, images, name, split_seed):
        columns = {**factors, "quadrant_shape": cells}
        tensors = {which: torch.from_numpy(values[rows].astype(np.int64)) for which, values in columns.items()}
        parts.append(Examples(torch.from_numpy(pixels(rows)).unsqueeze(1), tensors["shape"], factors=tensors))
    train, test = parts
    x = train.x[:: max(1, len(train) // 5000)].float() / 255
    return Source(train, test, 3, (float(x.mean()),), (float(x.std()),))


def _coarse(pixels: np.ndarray, side: int) -> np.ndarray:
    """Shrink images of pixels 0 and 1, (n, S, S), to means over squares of pixels: (n, side, side) in 0..255."""
    each = pixels.shape[1] // side
    if each == 1:
        return pixels * np.uint8(255)
    sums = pixels.reshape(len(pixels), side, each, side, each).sum((2, 4), dtype=np.uint32)
    return np.rint(sums * (255 / each**2)).astype(np.uint8)


def render(factors: Factors, side: int) -> np.ndarray:
    """Render white sprites on a black background, (n, side, side) uint8, from the factors of n images.

    Orientation k is a rotation by 2 pi k/40. The factors x and y place the centre of the sprite in equal steps from
    ``MARGIN`` to 1 - ``MARGIN`` of the image side.
    """
    pixels = np.empty((len(factors["shape"]), side, side), np.uint8)
    places = ((np.arange(FINE * side) + 0.5) / (FINE * side)).astype(np.float32)
    for shape, inside in enumerate((_square, _ellipse, _heart)):
        of_shape = np.flatnonzero(factors["shape"] == shape)
        for rows in np.array_split(of_shape, len(of_shape) // 128 + 1):
            some = {name: values[rows, None, None].astype(np.float32) for name, values in factors.items()}
            root = SIZE * (5 + some["scale"]) / 10  # square root of the area, as a share of the image side
            x, y = (MARGIN + (1 - 2 * MARGIN) * some[name] / 31 for name in ("x", "y"))
            right, up = places[None, None, :] - x, y - places[None, :, None]
            turn = 2 * np.pi * some["orientation"] / 40
            cos, sin = np.cos(turn) / root, np.sin(turn) / root
            points = inside(right * cos - up * sin, right * sin + up * cos)
            means = points.reshape(-1, side, FINE, side, FINE).sum((2, 4), dtype=np.float32) / FINE**2
            pixels[rows] = np.rint(255 * means).astype(np.uint8)
    return pixels


# Each function below returns whether points (u, v), u to the right and v up, lie in a shape of area 1 around (0, 0).


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(abs(u), abs(v)) <= 0.5


def _ellipse(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return u * u / 4 + v * v <= 1 / (2 * np.pi)  # semi-axes in the ratio 2 to 1


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return whether points (u, v) lie in a heart of area 1 around its centre of mass.

    The heart is  (a^2 + b^2 - 1)^3 <= a^2 b^3  with a = u sqrt(``HEART``) and b = v sqrt(``HEART``) + ``MIDDLE``.
    """
    aa, b = u * u * HEART, v * HEART**0.5 + MIDDLE
    bb = b * b
    q = aa + bb - 1
    return q * q * q <= aa * bb * b


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read the images, (n, S, S) pixels 0 and 1, and the values of the six published factors, (n, 6).

    Raises:
        UserError: the file is missing, damaged or not the published file.
    """
    where = f"data set dsprites: {os.path.realpath(path)}"
    if not path.is_file():
        raise UserError(
            f"{where} is not there: name the published {FILE} with --data.file, or its folder with --data-dir."
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if missing := [name for name in ("imgs", "latents_classes") if name not in archive.files]:
                raise UserError(f"{where} has no array {missing[0]}, so it is not the published file.")
            pixels, classes = archive["imgs"], archive["latents_classes"]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, MemoryError) as error:
        raise UserError(f"{where} is damaged ({' '.join(str(error).split())[:200]}).") from error
    whole = pixels.ndim == 3 and pixels.dtype == np.uint8 and pixels.shape[1] == pixels.shape[2] and len(pixels)
    if not whole or pixels.max() > 1:
        raise UserError(f"{where} is not the published file: imgs must be (n, side, side) uint8 of 0 and 1.")
    sizes = np.array([1, *SIZES.values()])
    if (
        classes.shape != (len(pixels), 6)
        or classes.dtype.kind not in "iu"
        or (classes < 0).any()
        or (classes >= sizes).any()
    ):
        raise UserError(
            f"{where} is not the published file: latents_classes must be (n, 6) whole numbers of colour, shape, scale, "
            "orientation, x and y."
        )
    return pixels, classes
