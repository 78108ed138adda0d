"""Small pictures of a run for W&B: synthetic images of the pool, class counts and sizes of the client data sets.

Every reader of the W&B project sees the pictures. This list says what each picture discloses; protected data are left
out:

- ``media/pool``: images drawn by the package's generators, sent before round 1 to the server or to other clients. Real
  images are never shown: the sharing strategy must be one of ``POOLS``, the generator the package's, no row real.
  A generator can memorise an image: ``sharing.audit`` measures memorisation, ``sharing.withhold`` removes near copies.
  If a run adds protective noise, the images are shown only if an epsilon covers the pool. Above each column stands the
  number of images of the class in the pool; with ``generator.label_noise`` this number is noisy.
- ``media/partition``: number of training examples per client and class. The picture is omitted if a run adds
  protective noise, because no epsilon covers these counts.
- ``media/sizes``: number of training examples per client, which counts as public (see ``statement``).

The privacy statement in the run's summary lists what is protected, so the pictures are created once, at the run's end.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcommons.config import registry
from fedcommons.storage import safe_read

if TYPE_CHECKING:  # the import is slow
    from PIL.Image import Image

KEYS = ("media/pool", "media/partition", "media/sizes")

POOLS = ("shuffled_synthetic", "server_synthetic")
"""Sharing strategies of the package that send generated images from the clients."""

EXAMPLES, CLASSES, CLIENTS = 4, 10, 40
"""The largest numbers of images per class, classes and clients in a picture."""

SIDE = 32
"""The largest side of an image, in pixels. With it, 10 x 4 images have at most 123 kB, even if they are noise."""

_CELL, _LINE = 48, 14

Columns = Sequence[tuple[str, Sequence[np.ndarray]]]
"""Per class: the label above the column of images, and some images, (C, H, W) uint8."""


def pool_images(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> Columns:
    """Return some images per class of a pool; nothing if a row is real or the data are not images with classes.

    x, y: the synthetic examples and labels; rows: indices of the examples in the pool, negative for a real example.
    """
    has_images = x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3)
    if (rows < 0).any() or not has_images or y.ndim != 1 or y.dtype.kind != "i":
        return ()
    classes, counts = np.unique(y[rows], return_counts=True)
    class_counts = [*zip(classes.tolist(), counts.tolist(), strict=True)][:CLASSES]
    return [(f"{c} ({n})", list(x[rows[y[rows] == c][:EXAMPLES]])) for c, n in class_counts]


def allowed(summary: Mapping[str, Any]) -> set[str]:
    """Return the members of ``KEYS`` that may be shown for a finished run."""
    config, privacy = summary["config"], summary["privacy"]
    is_open = privacy["noise"] is None and config["dp.noise"] == "seeded"
    is_ours = config["sharing.setting"] in POOLS and not registry.is_user_defined(config["generator.name"])
    permissions = (is_ours and (is_open or privacy["commons"] == "covered"), is_open, True)
    return {key for key, may in zip(KEYS, permissions, strict=True) if may}


def pictures(folder: Path, summary: Mapping[str, Any], pool: Columns) -> dict[str, "Image"]:
    """Return the pictures of a finished run that exist and may be shown."""
    facts = safe_read.json_of(folder / "partition.json") or {}
    drawings: dict[str, Callable[[], Image]] = {}
    if pool:
        title = f"{summary['config']['sharing.setting']}: made images of each class (of how many)"
        drawings["media/pool"] = partial(grid, pool, title)
    if counts := facts.get("class_counts"):
        drawings["media/partition"] = partial(heat_map, np.array(counts))
    if sizes := facts.get("sizes"):
        drawings["media/sizes"] = partial(histogram, sizes)
    return {key: drawings[key]() for key in drawings if key in allowed(summary)}


def grid(columns: Columns, title: str) -> "Image":
    """Draw one column of images per class."""
    from PIL import Image

    picture, draw = _canvas(_CELL * len(columns), (_CELL + 2) * EXAMPLES + _LINE, title)
    for i, (label, images) in enumerate(columns):
        draw.text((_CELL * i + 2, _LINE), label, "black")
        for j, x in enumerate(images):
            image = Image.fromarray(x[0] if len(x) == 1 else np.moveaxis(x, 0, -1))
            image.thumbnail((SIDE, SIDE))
            times = max(1, (_CELL - 2) // max(image.size))
            image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
            picture.paste(image.convert("RGB"), (_CELL * i, 2 * _LINE + (_CELL + 2) * j))
    return picture


def heat_map(counts: np.ndarray) -> "Image":
    """Draw the numbers of training examples by client (rows) and class (columns); counts: (clients, classes)."""
    n, visible = len(counts), counts[:CLIENTS, : 2 * CLASSES]
    cut = "" if visible.shape == counts.shape else f", {visible.shape[0]} of {n} clients, {visible.shape[1]} classes"
    wide, high = _CELL * (visible.shape[1] + 1), _LINE * (len(visible) + 1)
    picture, draw = _canvas(wide, high, f"training examples by client and class{cut}")
    for c in range(visible.shape[1]):
        draw.text((_CELL * (c + 1) + 2, _LINE), f"class {c}", "black")
    for i, row in enumerate(visible):
        y = _LINE * (i + 2)
        draw.text((2, y), f"client {i}", "black")
        for c, count in enumerate(row.tolist()):
            x, share = _CELL * (c + 1), count / max(1, visible.max())
            draw.rectangle((x, y, x + _CELL - 2, y + _LINE - 2), fill=_blue(share))
            if count:
                draw.text((x + 4, y), str(count), "white" if share > 0.5 else "black")
    return picture


def histogram(sizes: Sequence[int]) -> "Image":
    """Draw a histogram of the numbers of training examples per client."""
    counts, edges = np.histogram(sizes, bins=min(10, len(set(sizes))))
    picture, draw = _canvas(_CELL * len(counts), 8 * _LINE, f"training examples of each of {len(sizes)} clients")
    for i, count in enumerate(counts.tolist()):
        x, foot = _CELL * i, 8 * _LINE
        top = foot - 5 * _LINE * count // max(counts.tolist())
        draw.rectangle((x, top, x + _CELL - 3, foot), fill=_blue(0.8))
        if count:
            draw.text((x + 2, top - _LINE), str(count), "black")
        draw.text((x + 2, foot + 1), str(ceil(edges[i])) + ("-" if len(counts) > 1 else ""), "black")
    return picture


def _canvas(wide: int, high: int, title: str):
    """Return a white picture with a title, and the object that draws on the picture."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (max(wide, 6 * len(title)) + 4, high + 2 * _LINE), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((2, 0), title, "black")
    return picture, draw


def _blue(share: float) -> tuple[int, int, int]:
    """Return an RGB colour from white (0) to dark blue (1)."""
    return round(247 - 239 * share), round(251 - 203 * share), round(255 - 148 * share)
