"""Small pictures of a run for W&B: synthetic images, class counts, and numbers of training examples of the clients.

Every reader of the W&B project can see the pictures. This list says what each picture discloses, and when it is left
out to protect data:

- ``media/pool``: some images of the pool, the synthetic images that clients share before round 1. Real images are
  never shown: the sharing strategy must be one of ``POOLS``, and the generator must be one of the package. A generator
  may have memorised an image: ``sharing.audit`` measures memorisation, ``sharing.withhold`` removes near copies.
  If the run adds privacy noise, the images are shown only if the pool has a privacy guarantee (epsilon). The number
  above a column is the class count in the pool; with ``generator.label_noise`` it is noisy.
- ``media/partition``: number of training examples per client and class. The picture is left out if the run adds privacy
  noise, because these counts have no privacy guarantee.
- ``media/sizes``: number of training examples per client, which counts as public (see ``privacy.statement``).

The privacy statement in the run's summary says what is protected, so the pictures are created once, at the run's end.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedcommons.config import registry
from fedcommons.storage import safe_read

if TYPE_CHECKING:  # importing PIL is slow
    from PIL.Image import Image

KEYS = ("media/pool", "media/partition", "media/sizes")

POOLS = ("shuffled_synthetic", "server_synthetic")
"""Sharing strategies of the package under which clients send synthetic images to the server or to other clients."""

EXAMPLES, CLASSES, CLIENTS = 4, 10, 40
"""Maximum numbers of images per class, of classes and of clients in a picture."""

SIDE = 32
"""Maximum side of an image, in pixels. So 10 x 4 images take at most 123 kB, even if they are noise."""

_CELL, _LINE = 48, 14

Columns = Sequence[tuple[str, Sequence[np.ndarray]]]
"""For each class: (text above its column of images, some images of shape (C, H, W) and type uint8)."""


def pool_images(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> Columns:
    """Return some images per class of a pool of synthetic images, with the class counts of the pool.

    The result is empty if the pool contains a real example, or if the data are not images with classes.
    x, y: the synthetic examples and labels; rows: indices of the examples in the pool, negative for a real example.
    """
    has_images = x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] in (1, 3)
    if (rows < 0).any() or not has_images or y.ndim != 1 or y.dtype.kind != "i":
        return ()
    classes, counts = np.unique(y[rows], return_counts=True)
    class_counts = [*zip(classes.tolist(), counts.tolist(), strict=True)][:CLASSES]
    return [(f"{c} ({n})", list(x[rows[y[rows] == c][:EXAMPLES]])) for c, n in class_counts]


def allowed(summary: Mapping[str, Any]) -> set[str]:
    """Return the members of ``KEYS`` that a finished run may show without disclosing protected data."""
    config, privacy = summary["config"], summary["privacy"]
    is_open = privacy["noise"] is None and config["dp.noise"] == "seeded"
    is_ours = config["sharing.setting"] in POOLS and not registry.is_user_defined(config["generator.name"])
    permissions = (is_ours and (is_open or privacy["commons"] == "covered"), is_open, True)
    return {key for key, may in zip(KEYS, permissions, strict=True) if may}


def pictures(folder: Path, summary: Mapping[str, Any], pool: Columns) -> dict[str, "Image"]:
    """Return key -> picture of a finished run, for pictures that exist and may be shown.

    pool: synthetic images; if empty, the pool's picture is read from W&B's folder, if it exists there.
    """
    facts = safe_read.json_of(folder / "partition.json") or {}
    drawings: dict[str, Callable[[], Image]] = {}
    if pool:
        title = f"{summary['config']['sharing.setting']}: synthetic images per class (number of images)"
        drawings["media/pool"] = partial(grid, pool, title)
    elif saved := sorted(folder.glob("wandb/*run-*/files/media/images/media/pool_*.png")):
        drawings["media/pool"] = partial(_opened, saved[-1])
    if counts := facts.get("class_counts"):
        drawings["media/partition"] = partial(heat_map, np.array(counts))
    if sizes := facts.get("sizes"):
        drawings["media/sizes"] = partial(histogram, sizes)
    return {key: drawings[key]() for key in drawings if key in allowed(summary)}


def _opened(path: Path) -> "Image":
    from PIL import Image

    with Image.open(path) as picture:
        return picture.copy()


def grid(columns: Columns, title: str) -> "Image":
    """Draw one column of images per class. title: text above the picture."""
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
    """Draw the numbers of training examples as a heat map. counts: array of shape (clients, classes)."""
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
    """Draw a histogram over clients of the number of training examples. sizes: this number for each client."""
    counts, edges = np.histogram(sizes, bins=min(10, len(set(sizes))))
    picture, draw = _canvas(_CELL * len(counts), 8 * _LINE, f"training examples per client, {len(sizes)} clients")
    for i, count in enumerate(counts.tolist()):
        x, foot = _CELL * i, 8 * _LINE
        top = foot - 5 * _LINE * count // max(counts.tolist())
        draw.rectangle((x, top, x + _CELL - 3, foot), fill=_blue(0.8))
        if count:
            draw.text((x + 2, top - _LINE), str(count), "black")
        draw.text((x + 2, foot + 1), str(ceil(edges[i])) + ("-" if len(counts) > 1 else ""), "black")
    return picture


def _canvas(wide: int, high: int, title: str):
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (max(wide, 6 * len(title)) + 4, high + 2 * _LINE), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((2, 0), title, "black")
    return picture, draw


def _blue(share: float) -> tuple[int, int, int]:
    return round(247 - 239 * share), round(251 - 203 * share), round(255 - 148 * share)
